"""The value types that options are made of."""

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

SCHEMA = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)


def no_bool(value: Any) -> Any:
    """YAML's `true` must not pass for the number 1."""
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true/false")
    return value


Int = Annotated[int, BeforeValidator(no_bool)]
Count = Annotated[int, BeforeValidator(no_bool), Field(ge=0)]
PositiveInt = Annotated[int, BeforeValidator(no_bool), Field(ge=1)]
NonNegative = Annotated[float, BeforeValidator(no_bool), Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(no_bool), Field(gt=0, allow_inf_nan=False)]
Probability = Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1)]
BelowOne = Annotated[float, BeforeValidator(no_bool), Field(ge=0, lt=1)]
