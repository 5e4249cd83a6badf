"""Networks: the allow-list, loading, and what a model family does with them.

diffusers and peft import bitsandbytes wherever it is installed, and that the whole of torch's compiler: three seconds
of CPU time in every process, for quantized weights, which this project refuses. By accelerate, which peft brings,
transformers would import DeepSpeed at the first save of a text encoder. All of them look once whether a library is
there; the 8-bit optimizer imports bitsandbytes later, when it is used.
"""

import sys

if not {"diffusers", "bitsandbytes", "accelerate"} & sys.modules.keys():
    # Python's mark of a module that is not there.
    sys.modules |= {"bitsandbytes": None, "accelerate": None}  # type: ignore[dict-item]
    try:
        from transformers.utils import is_accelerate_available

        is_accelerate_available.cache_clear()
        is_accelerate_available()  # keeps its answer
        del sys.modules["accelerate"]  # peft needs it
        import diffusers  # noqa: F401
        import peft  # noqa: F401 - diffusers' pipelines import it
    finally:
        for name in ("bitsandbytes", "accelerate"):
            if sys.modules.get(name, sys) is None:
                del sys.modules[name]
