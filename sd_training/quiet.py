"""Keeps the advice that libraries print at import and load out of a run's output; their errors still show.

Import before torch, diffusers and transformers: they read these settings once.
"""

import logging
import os
import warnings


def quiet_libraries() -> None:
    """Errors only from the libraries; anything the user set himself stays."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    # Lightning sets the level of its top loggers when it is imported; the ones below it, which speak, keep theirs.
    for name in (
        "pytorch_lightning.utilities.rank_zero",
        "lightning_fabric.utilities.rank_zero",
        "pytorch_lightning.trainer.connectors.checkpoint_connector",
        "xformers",
    ):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"pytorch_lightning|lightning_fabric|torch\.utils\.data")
