"""Keeps the advice that libraries print at import and load out of a run's output; their errors still show.

Import before torch, diffusers and transformers: they read these settings once.
"""

import logging
import os
import warnings

_ERRORS_ONLY = (
    # Lightning sets the level of its top loggers when it is imported; the ones below it, which speak, keep theirs.
    "pytorch_lightning.utilities.rank_zero",
    "lightning_fabric.utilities.rank_zero",
    "lightning_fabric.utilities.distributed",  # "Initializing distributed: GLOBAL_RANK: 0", from every rank
    "pytorch_lightning.trainer.connectors.checkpoint_connector",
    "xformers",  # a block of advice when its extension was built for another PyTorch, used or not
    "bitsandbytes.backends.cpu.ops",  # "pip install kernels", for 4-bit weights, which nothing here uses
)
_ADVICE = (
    # DDP copies such a gradient, as it did before it had views: 1×1 convolutions in channels_last on some CPUs.
    "Grad strides do not match bucket view strides",
    # A pipeline is asked for its type as diffusers before 0.40 knows it.
    "`torch_dtype` is deprecated",
    "This DataLoader will create",  # more loader processes than cores, which is what waiting for storage needs
)
_LIGHTNING = r"pytorch_lightning|lightning_fabric"
"""It warns of how it is called, which is this program's business and not the user's: workers, intervals, old names."""


def quiet_libraries() -> None:
    """Errors only from the libraries; anything the user set himself stays."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    for name in _ERRORS_ONLY:
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in _ADVICE:
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", module=_LIGHTNING)
