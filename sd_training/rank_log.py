"""Plain log lines on stderr; from the first process only, so that 64 ranks do not say a thing 64 times."""

import logging
import os
import sys

from sd_training.redaction import for_terminal


def global_rank() -> int:
    """Rank of this process by the launcher's variables (torchrun, SLURM); 0 when started alone."""
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def is_main_process() -> bool:
    """Whether this is the first process of the run."""
    return global_rank() == 0


class _MainProcessOnly(logging.Filter):
    """Errors come from every rank, warnings and information from the first one only."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or is_main_process()


class _WithoutSecrets(logging.Formatter):
    """What is logged may come from outside: names of samples, messages of libraries."""

    def format(self, record: logging.LogRecord) -> str:
        return for_terminal(super().format(record))


def get_logger(name: str) -> logging.Logger:
    """Logger of a module. The handler is put on the package's root logger once."""
    root = logging.getLogger("sd_training")
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_WithoutSecrets("%(message)s"))
        handler.addFilter(_MainProcessOnly())
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        root.propagate = False
    return logging.getLogger(name if name.startswith("sd_training") else f"sd_training.{name}")
