"""What options are made of: value types with their bounds, which other option decides whether one is read, and paths.

Folders and files that a run or a script writes are local paths, with `~` and `$NAME` expanded once, here. Nothing else
expands them: libraries that do so on their own would put a part of a run elsewhere. A configuration file may come from
somebody else, so a variable whose name says that it holds a secret is never read.
"""

import argparse
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sd_training.log import is_secret_name

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


# --- Paths ---

_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)
"""As `os.path.expandvars` finds them."""
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:/|://")
"""Also with one slash, as `Path` would write it, and after a folder that was put before it."""


def output_problem(text: str) -> str:
    """Why `text` cannot be a local path to write to, for a sentence that names the option; empty when it can."""
    for name in (first or second for first, second in _VARIABLE.findall(text)):
        if is_secret_name(name):
            return f"{text!r} names ${name}, which may hold a secret; no path may be made of it"
        if not os.environ.get(name):
            return f"{text!r} names ${name}, which is not set in the environment"
    expanded = os.path.expandvars(text)
    if "$" in expanded:
        return f"{text!r} is {expanded!r} with its variables; a path here cannot have a $"
    if is_url(expanded):
        remedy = "; write the path without file:" if expanded.startswith("file:") else ""
        return f"{text!r} is a URL, and files are written to local or mounted folders only{remedy}"
    try:
        Path(expanded).expanduser()
    except RuntimeError:
        return f"{text!r} begins with ~ and a user that this machine does not know"
    return ""


def is_url(text: str) -> bool:
    """Whether a path to write to, with its variables expanded, is the URL of another place."""
    return _URL.search(os.path.expandvars(text)) is not None


def output_path(text: str) -> Path:
    """The path that an option names, after `output_problem` found nothing."""
    return Path(os.path.expandvars(text)).expanduser()


def path_argument(text: str) -> Path:
    """Type of a command's argument that names a file or folder to write.

    Raises:
        argparse.ArgumentTypeError: it is no local path.
    """
    if problem := output_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return output_path(text)
