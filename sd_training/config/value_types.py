"""What options are made of: value types with their bounds, and which other option decides whether one is read."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

SCHEMA = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)


def no_bool(value: Any) -> Any:
    """YAML's `true` must not pass for the number 1."""
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true/false")
    return value


Int = Annotated[int, BeforeValidator(no_bool)]
Count = Annotated[Int, Field(ge=0)]
PositiveInt = Annotated[Int, Field(ge=1)]
Number = Annotated[float, BeforeValidator(no_bool), Field(allow_inf_nan=False)]
NonNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Probability = Annotated[Number, Field(ge=0, le=1)]
BelowOne = Annotated[Number, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class ReadWith:
    """Metadata of a field, or of a group for all options in it: they are read with some values of another option only.

    This takes the place of tagged unions: an option of another choice is refused all the same, but the resolved
    configuration lists every option under every choice, and code that reads options needs no cases.
    """

    option: str
    """Name of the deciding option in the same group, or in the nearest group above that has it."""
    values: tuple[str | None, ...] = ()
    """Its values with which this option is read; none: any value that switches it on."""
    is_refused: bool = True
    """Whether an option that is not read is an error; otherwise it is a warning."""


def read_with(option: str, *values: str | None) -> ReadWith:
    """An option of some choices: giving it with another one is an error."""
    return ReadWith(option, values)


def used_with(option: str) -> ReadWith:
    """An option of a feature that can be off: shared files set it without the feature, so that is a warning."""
    return ReadWith(option, is_refused=False)


DENOISER = read_with("model.train", "denoiser")
