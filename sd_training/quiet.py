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
    for name in ("pytorch_lightning", "lightning_fabric", "xformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"pytorch_lightning|lightning_fabric|torch\.utils\.data")
