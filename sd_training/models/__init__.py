"""Networks: the allow-list, loading, and what a model family does with them."""

import sys
from typing import Any


def _import_diffusers() -> None:
    """diffusers imports bitsandbytes wherever it is installed, and that the whole of torch's compiler: three seconds of
    CPU time in every process, for quantized weights, which this project refuses. diffusers looks once whether it is
    there; the 8-bit optimizer imports it later, when it is used."""
    if "diffusers" in sys.modules or "bitsandbytes" in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    modules["bitsandbytes"] = None  # Python's mark of a module that is not there
    try:
        import diffusers  # noqa: F401
    finally:
        del sys.modules["bitsandbytes"]


_import_diffusers()
