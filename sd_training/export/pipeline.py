"""Trained parts as a folder that diffusers loads: written beside the old one, reloaded, compared, then put in place.

    current_pipeline.partial-7 being written or checked, by start 7 of the run
    current_pipeline           the newest good export; with `keep_export` a link to pipelines/step_N
    current_pipeline.old       the one before, for the moment between two renames

A process killed at any moment leaves a good folder that `recover_export`, called at the start of a run, puts in place.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline, ModelMixin
from torch import nn

from sd_training.checkpoint.durable import (
    flush_folder,
    flush_tree,
    make_empty_folder,
    remove,
    remove_quietly,
    require_free,
    system_error,
    write_failure,
)
from sd_training.checkpoint.writer import UNFENCED, Fence
from sd_training.export.compare import differences, without_progress_bars
from sd_training.rank_log import get_logger

log = get_logger(__name__)

CURRENT = "current_pipeline"
"""Name of the newest export in a run folder."""
KEPT = "pipelines"
"""Folder of the exports that are kept, `step_N`, in a run folder."""


class ExportError(OSError):
    """The exported folder does not give back what was in memory. The export before it is still in place."""


def export_pipeline(pipeline: DiffusionPipeline | ModelMixin, destination: Path, fence: Fence = UNFENCED) -> None:
    """Replaces `destination` by `pipeline` in diffusers' layout, once the new folder was reloaded and compared.

    Args:
        pipeline: a whole pipeline, or one model such as an autoencoder; on any device. A part is copied to the CPU
            for the comparison, one part at a time.
        destination: folder to replace; a link there is replaced, not followed.
        fence: of this start of the run.

    Raises:
        OSError: it could not be written; names folder and free space. `destination` is as it was.
        ExportError: the folder does not load as what was written. `destination` is as it was.
        TakenOverError: another start has the run. `destination` is as it was.
    """
    partial = _partial(destination, fence)
    try:
        fence.check()
        recover_export(destination)
        require_free(destination.parent, _bytes(pipeline))
        make_empty_folder(partial)
        _save(pipeline, partial)
        problems = differences(pipeline, partial)
        if problems:
            raise ExportError(f"the pipeline written to {partial} is not the one in memory: {'; '.join(problems)}")
        fence.check()
        _replace(destination, lambda: os.rename(partial, destination))
    except OSError as error:
        remove_quietly(partial)
        raise error if isinstance(error, ExportError) else write_failure("pipeline", destination, error) from error
    except BaseException:
        remove_quietly(partial)
        raise


def keep_export(pipeline: DiffusionPipeline | ModelMixin, run_dir: Path, step: int, fence: Fence = UNFENCED) -> Path:
    """Exports to `run_dir/pipelines/step_N` and points the link `run_dir/current_pipeline` at it.

    Returns:
        The new folder. Errors as in `export_pipeline`.
    """
    kept = run_dir / KEPT / f"step_{step}"
    export_pipeline(pipeline, kept, fence)
    current = run_dir / CURRENT
    recover_export(current)
    link = _partial(current, fence)
    remove(link)
    link.symlink_to(Path(KEPT) / kept.name)  # relative, so that the run folder can be moved
    if current.is_symlink():
        os.replace(link, current)  # one step: there is no moment without a pipeline
        flush_folder(run_dir)
    else:
        _replace(current, lambda: os.rename(link, current))
    return kept


def recover_export(destination: Path) -> None:
    """Puts the former export back if a process was killed between two renames."""
    old = _beside(destination, "old")
    if os.path.lexists(old) and not os.path.lexists(destination):
        log.info("putting %s back in place: a process was stopped while it was replaced", destination)
        os.rename(old, destination)
        flush_folder(destination.parent)
    remove(old)


def recover_exports(run_dir: Path) -> None:
    """Tidies everything that `export_pipeline` and `keep_export` write in a run folder; half-written ones are removed.

    To be called once, at the start of a run.
    """
    kept = run_dir / KEPT
    for partial in [*run_dir.glob(f"{CURRENT}.partial*"), *kept.glob("step_*.partial*")]:
        remove(partial)
    recover_export(run_dir / CURRENT)
    for name in sorted({path.name.removesuffix(".old") for path in kept.glob("step_*")}):
        recover_export(kept / name)


def _partial(destination: Path, fence: Fence) -> Path:
    return _beside(destination, f"partial{fence.suffix}")


def _beside(destination: Path, suffix: str) -> Path:
    return destination.with_name(f"{destination.name}.{suffix}")


def _save(pipeline: Any, folder: Path) -> None:
    try:
        with without_progress_bars():
            pipeline.save_pretrained(folder, safe_serialization=True)
    except Exception as error:  # I/O errors of safetensors and tokenizers are no OSErrors
        raise (system_error(error) or error) from None
    flush_tree(folder)


def _bytes(pipeline: Any) -> int:
    """Weights of all parts; the rest of a pipeline is small."""
    parts = pipeline.components.values() if isinstance(pipeline, DiffusionPipeline) else [pipeline]
    modules = (part for part in parts if isinstance(part, nn.Module))
    return sum(t.numel() * t.element_size() for module in modules for t in module.state_dict(keep_vars=True).values())


def _replace(destination: Path, put_in_place: Callable[[], None]) -> None:
    """Moves the old folder out of the way, the new one in, and deletes the old one last."""
    old = _beside(destination, "old")
    if os.path.lexists(destination):
        os.rename(destination, old)
        flush_folder(destination.parent)
    try:
        put_in_place()
    except OSError:
        if os.path.lexists(old) and not os.path.lexists(destination):
            os.rename(old, destination)
        raise
    flush_folder(destination.parent)
    remove(old)
