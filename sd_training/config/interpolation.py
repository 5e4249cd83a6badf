"""`${another.option}` replaced by its value; what cannot be replaced becomes a problem, not an exception."""

import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from sd_training.config.fields import groups, options
from sd_training.config.problems import Problem
from sd_training.config.suggest import suggest

MISSING = "???"
_MAX_DEPTH = 30
"""Nesting after interpolation; deeper means that a group contains itself."""


@dataclass
class Resolved:
    """Plain containers, with `???` where a value is missing."""

    values: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    """Missing option → the interpolation that it hoped to get its value from."""


def resolve(tree: DictConfig) -> Resolved:
    """Plain Python containers of a merged tree."""
    result = Resolved({})
    result.values = _container(tree, "", result)
    return result


def _container(node: Any, path: str, result: Resolved) -> Any:
    if isinstance(node, ListConfig):
        return [_item(node, index, f"{path}.{index}", result) for index in range(len(node))]
    return {key: _item(node, key, f"{path}.{key}" if path else str(key), result) for key in node}


def _item(holder: DictConfig | ListConfig, key: Any, path: str, result: Resolved) -> Any:
    """One value of a container; `???` where it has none."""
    try:
        value = holder[key]
    except MissingMandatoryValue:
        return MISSING
    except InterpolationToMissingValueError:
        result.sources[path] = _written(holder, key)
        return MISSING
    except InterpolationKeyError:
        result.problems.append(
            Problem(path, f"is {_written(holder, key)}, but there is no such option{_near(_written(holder, key))}")
        )
        return MISSING
    except OmegaConfBaseException as error:
        result.problems.append(
            Problem(path, f"is {_written(holder, key)}, which has no value: {str(error).splitlines()[0]}")
        )
        return MISSING
    if not isinstance(value, (DictConfig, ListConfig)):
        return value
    if path.count(".") > _MAX_DEPTH:
        result.problems.append(Problem(path[:60] + "…", "contains itself through an interpolation"))
        return MISSING
    return _container(value, path, result)


def _written(holder: DictConfig | ListConfig, key: Any) -> str:
    return str(OmegaConf.to_container(holder, resolve=False)[key])  # type: ignore[index]


def _near(written: str) -> str:
    if variable := re.search(r"\$\{([A-Z][A-Z0-9_]*)\}", written):
        return f"; a variable of the environment is written ${variable[1]}, in names of output folders only"
    near = suggest(written.strip("${} "), [*options(), *groups()])
    return f"; did you mean ${{{near}}}?" if near else ""
