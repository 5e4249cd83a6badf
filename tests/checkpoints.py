"""A sealed checkpoint from a function that fills its folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sd_training.checkpoint.folder import NO_LOCK, RunLock, begin_partial, folder_name, seal_partial


def write_sealed(
    root: Path, step: int, fill: Callable[[Path], None], info: Mapping[str, Any], run_lock: RunLock = NO_LOCK
) -> Path:
    """`root/step=N`; one that is there and verifies is kept."""
    partial = begin_partial(root, step, run_lock)
    if partial is None:
        return root / folder_name(step)
    fill(partial)
    return seal_partial(partial, info, run_lock)
