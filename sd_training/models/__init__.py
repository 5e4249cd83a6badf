"""Networks: the allow-list, loading, and what a model family does with them.

diffusers imports bitsandbytes wherever it is installed, and that the whole of torch's compiler: three seconds of CPU
time in every process, for quantized weights, which this project refuses. diffusers looks once whether it is there; the
8-bit optimizer imports it later, when it is used.
"""

import sys

if "diffusers" not in sys.modules and "bitsandbytes" not in sys.modules:
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment] # Python's mark of a module that is not there
    try:
        import diffusers  # noqa: F401
    finally:
        del sys.modules["bitsandbytes"]
