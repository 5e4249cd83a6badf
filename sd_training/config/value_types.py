"""What options are made of: value types with their bounds, and which other option decides whether one is read."""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Group = TypeVar("Group", bound="OptionGroup")


class OptionGroup(BaseModel):
    """Options that stand together; the docstring of a field says what it means, with its unit."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)

    def replace(self: Group, **changes: Any) -> Group:
        """A copy with other values, which are checked."""
        return type(self)(**dict(self) | changes)


def no_bool(value: Any) -> Any:
    """YAML's `true` must not pass for the number 1."""
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true/false")
    return value


def text(pattern: str, allowed: str) -> Any:
    """A text of one form, and how a message describes it."""
    return Field(pattern=pattern, json_schema_extra={"allowed": allowed})


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
