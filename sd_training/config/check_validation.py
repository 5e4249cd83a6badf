"""Rules between options of the held-out data, and of what its loss decides."""

from collections.abc import Iterator

from sd_training.config.fields import defaults
from sd_training.config.schema import Config
from sd_training.config.validation_schema import ValidationConfig


def validation_problems(config: Config) -> Iterator[str]:
    """One sentence each; each starts with the option's dotted name."""
    validation, checkpoint = config.validation, config.checkpoint
    if validation.path is not None and not validation.path:
        yield "validation.path: is empty; give a tar file, a folder, a glob or a brace pattern, or leave it out"
    elif validation.path == config.dataset.params.path:
        yield "validation.path: is the data that is trained on; keep some shards out of dataset.params.path"
    if checkpoint.best_by == "validation_loss":
        yield from _best_by(config)


def unread_validation(config: Config) -> Iterator[str]:
    """For warnings: a second run of the same options, without the held-out data, is no mistake."""
    for name in ("every", "num_samples", "num_levels"):
        if config.validation.path is None and getattr(config.validation, name) != defaults(ValidationConfig)[name]:
            yield f"validation.{name}: is not used, because validation.path, which names held-out data, is not set"


def _best_by(config: Config) -> Iterator[str]:
    every, save_every = config.validation.every, config.experiment.save_every
    if config.validation.path is None:
        yield "checkpoint.best_by: validation_loss needs validation.path, which names the held-out data"
    elif not config.checkpoint.keep_best:
        yield "checkpoint.best_by: is only read with checkpoint.keep_best above 0"
    elif save_every % every:
        yield (
            f"validation.every: {every:,} does not divide experiment.save_every={save_every:,}, and "
            "checkpoint.best_by=validation_loss compares checkpoints that were measured after their own step"
        )
