"""What a run does about numbers that went wrong. Importable without torch."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from sd_training.config.value_types import SCHEMA, Count, PositiveInt, no_bool


@dataclass(config=SCHEMA, kw_only=True)
class NumericsConfig:
    """Non-finite steps, loss spikes, and replicas that no longer agree (docs/numerics.md)."""

    max_skipped_in_a_row: PositiveInt = 10
    """A step with a non-finite loss or gradient is skipped. After so many in a row the run goes back to a checkpoint
    from before the first of them [optimizer steps]."""
    max_rollbacks: Count = 3
    """The run ends with status 86 when it would go back once more; 0 ends it the first time [count]."""
    on_spike: Literal["record", "rollback"] = "record"
    """What a loss spike leads to: an incident file, or that and going back to a checkpoint from before it."""
    spike_threshold: Annotated[float, BeforeValidator(no_bool), Field(gt=0, allow_inf_nan=False)] = 6.0
    """A spike is a median of the last 5 steps' log loss that lies so many robust standard deviations (1.4826 × median
    absolute deviation) above the median of the 200 steps before."""
    digest_every: Count = 1000
    """Compare the trained weights of all replicas, bit for bit, every so many optimizer steps and before every save;
    0: never. Only with ddp and hsdp."""
