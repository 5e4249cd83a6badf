"""What a run is measured on while it trains. Importable without torch."""

from pydantic.dataclasses import dataclass

from sd_training.config.value_types import SCHEMA, PositiveInt


@dataclass(config=SCHEMA, kw_only=True)
class ValidationConfig:
    """The loss on pictures that are not trained on, always with the same noise at the same noise levels
    (docs/validation.md)."""

    path: str | list[str] | None = None
    """Held-out data, read as `dataset.params.path` is: of the type, and with the filters, captions and sizes of
    `dataset`, but cut from the middle and not mirrored. null: no validation."""
    every: PositiveInt = 1000
    """Measure every so many optimizer steps, before the first one and after the last one."""
    num_samples: PositiveInt = 512
    """Samples, spread evenly over the held-out data; all of them where there are fewer [count]."""
    num_levels: PositiveInt = 8
    """Noise levels at which each sample is measured: the middles of so many equally likely parts of
    `objective.timestep_density` [count]."""
