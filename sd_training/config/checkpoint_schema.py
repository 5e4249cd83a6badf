"""Options of the checkpoints that a run resumes from."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from sd_training.config.value_types import SCHEMA, Count, Positive, PositiveInt, no_bool


@dataclass(config=SCHEMA, kw_only=True)
class CheckpointConfig:
    """Resumable state beside the exported pipeline (docs/checkpoints.md)."""

    keep: Annotated[int, BeforeValidator(no_bool), Field(ge=2)] = 2
    """Newest checkpoints kept; at least two, so that a damaged newest one never loses the run [count]."""
    save_every_minutes: Positive | None = None
    """Save as well when the last save is this long ago [minutes]; null: only every `experiment.save_every` steps."""
    milestone_every: Count = 0
    """Save every so many optimizer steps as well, and never delete these checkpoints; 0: none."""
    keep_best: Count = 0
    """Keep so many checkpoints with the lowest loss (`best_by`), beside the newest ones; 0: none. It is never a reason
    to save [count]."""
    best_by: Literal["training_loss", "validation_loss"] = "training_loss"
    """`training_loss`: the mean since the save before. `validation_loss`: of the weights that are exported, after the
    step of the checkpoint; needs `validation.path`."""
    max_failed_saves: PositiveInt = 3
    """A save that fails (full disk, quota, read-only folder) is told and tried again when the next one is due; so many
    in a row end the run with status 74 [count]. The last save of a run must succeed."""
    asynchronous: bool = False
    """Copy what is saved to CPU memory after the optimizer step, and write, hash, flush and export it in the background
    while training goes on. The same bytes. One save at a time: the next one and the end of the run wait for it. Memory
    beside the training: each process its part of a checkpoint, the first one the exported network as well."""
    mirror: str | None = None
    """URL of a folder (`s3://…`, `gs://…` or `file:///…`) that gets copies of the checkpoints, in the background, at
    `<mirror>/<experiment.name>/checkpoints`; a run whose own folder has nothing as new goes on from there. Keys and
    endpoints come from the environment."""
