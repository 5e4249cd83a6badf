"""Random numbers that depend on seed, purpose and position in the run, and on nothing else (design contract 3)."""

import hashlib
from functools import lru_cache

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray

_POSITION_BITS = 48


class _Key(ISeedSequence):
    """Hands its 128-bit key to Philox as it is. `Philox(key=…)` would first gather entropy it does not use: 10 µs."""

    __slots__ = ("words",)

    def __init__(self, high: int, low: int) -> None:
        self.words = np.array((high, low), dtype=np.uint64)

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[np.uint64]:
        return self.words


@lru_cache(maxsize=1024)
def _stream(seed: int, purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{purpose}".encode(), digest_size=8).digest(), "big")


def generator(seed: int, purpose: str, position: int, attempt: int = 0) -> np.random.Generator:
    """A generator of its own for each (seed, purpose, position, attempt); equal arguments give equal bits.

    Args:
        seed: of the run.
        purpose: what is drawn, for example `crop`.
        position: of the sample in the global order of the run, or an epoch number; below 2^48.
        attempt: below 2^16, for draws that are repeated.
    """
    low = position | attempt << _POSITION_BITS
    return np.random.Generator(np.random.Philox(_Key(_stream(seed, purpose), low)))  # type: ignore[arg-type]
