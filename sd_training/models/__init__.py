"""Networks: the allow-list, loading, and what a model family does with them.

diffusers, transformers and peft import bitsandbytes and torchao wherever they are installed, and these torch's
compiler: three seconds of CPU time in every process, for quantized weights, which this project refuses. By accelerate,
which peft brings, transformers would import DeepSpeed at the first save of a text encoder. All of them look once
whether a library is there; the 8-bit optimizer and `model.float8` import theirs later.
"""

import sys

_NOT_NOW = ("bitsandbytes", "torchao", "accelerate")
if not {"diffusers", *_NOT_NOW} & sys.modules.keys():
    # Python's mark of a module that is not there.
    sys.modules |= dict.fromkeys(_NOT_NOW)  # type: ignore[arg-type]
    try:
        from transformers.utils import is_accelerate_available, is_torchao_available

        for is_available in (is_accelerate_available, is_torchao_available):
            is_available.cache_clear()
            is_available()  # keeps its answer
        del sys.modules["accelerate"]  # peft needs it
        import diffusers  # noqa: F401
        import peft  # noqa: F401 - diffusers' pipelines import it
        from peft.import_utils import is_torchao_available as of_peft

        of_peft()
    finally:
        for name in _NOT_NOW:
            if sys.modules.get(name, sys) is None:
                del sys.modules[name]
