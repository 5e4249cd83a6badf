"""How long a process of a run may do one thing. Importable without torch."""

from pydantic.dataclasses import dataclass

from sd_training.config.value_types import SCHEMA, Positive

SECTIONS = ("start", "data", "step", "save", "validate")
"""What a process does, in the words of the options `watch.<section>_s`."""


@dataclass(config=SCHEMA, kw_only=True)
class WatchConfig:
    """The hang watch (docs/watch.md): a process that stays in one section for longer writes down what it was doing and
    ends the run with status 87. null: as long as it likes."""

    start_s: Positive | None = 1800.0
    """From the loading of the model to the end of the first optimizer step, compilation included [s]."""
    data_s: Positive | None = 600.0
    """Waiting for a micro-batch [s]."""
    step_s: Positive | None = 600.0
    """Forward, backward, optimizer and metrics of a micro-batch [s]."""
    save_s: Positive | None = 1800.0
    """A checkpoint and its export [s]."""
    validate_s: Positive | None = 1800.0
    """Drawing previews or evaluation images, or a whole validation [s]."""
    collective_timeout_s: Positive = 2400.0
    """How long the processes of a group wait for each other; longer than the sections, which say more [s]."""
