"""What `--fit` is asked: `gpu_gib=80 gpus=8`. Importable without torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sd_training.errors import ConfigError

_WORDS = ("gpu_gib", "gpus")


@dataclass(frozen=True)
class FitTarget:
    """The hardware that a run shall fit on."""

    gpu_gib: float
    """Memory of one GPU [GiB]."""
    gpus: int | None = None
    """GPUs of the run; None: as many as `trainer` says."""


def take_target(argv: Sequence[str]) -> tuple[FitTarget, list[str]]:
    """The words of `--fit`, and the other ones.

    Raises:
        ConfigError: a word is missing or has no sense.
    """
    given = dict(word.partition("=")[::2] for word in argv if word.partition("=")[0] in _WORDS)
    rest = [word for word in argv if word.partition("=")[0] not in _WORDS]
    problems = []
    if "gpu_gib" not in given:
        problems.append("gpu_gib: is required with --fit: the memory of one GPU in GiB, such as gpu_gib=80")
    elif not _positive(given["gpu_gib"]):
        problems.append(f"gpu_gib: is {given['gpu_gib']!r}; allowed: a number above 0, the memory of one GPU in GiB")
    if "gpus" in given and not (given["gpus"].isdecimal() and int(given["gpus"]) > 0):
        problems.append(f"gpus: is {given['gpus']!r}; allowed: a whole number above 0, the GPUs of the run")
    if problems:
        raise ConfigError(problems)
    return FitTarget(float(given["gpu_gib"]), int(given["gpus"]) if "gpus" in given else None), rest


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
