"""From the command line to a checked `Config`: OmegaConf merges, pydantic validates, every problem in one report.

Plain containers laid over the schema: unknown keys out, unset options left to their defaults.

`${another.option}` replaced by its value; what cannot be replaced becomes a problem, not an exception.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from pydantic import TypeAdapter, ValidationError

from sd_training.config.changes import not_permitted
from sd_training.config.check import check, warnings
from sd_training.config.fields import accepts, group_fields, groups, is_group, options
from sd_training.config.problems import (
    Problem,
    is_below,
    mentions,
    not_a_group,
    required,
    suggest,
    unknown_key,
    wrong_values,
)
from sd_training.config.schema import Config
from sd_training.config.sources import gather
from sd_training.errors import ConfigError
from sd_training.log import get_logger
from sd_training.redaction import note_secret

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


@dataclass
class Fitted:
    """Values of known options only."""

    values: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)
    """Required options without a value; apart, because they say nothing when a file could not be read."""


def fit(values: dict[Any, Any], origins: dict[str, str], sources: dict[str, str]) -> Fitted:
    """Keeps what the schema knows.

    Args:
        values: resolved containers; `???` marks a missing value.
        origins: dotted key → where it was set, for messages.
        sources: missing option → the interpolation it was to come from.
    """
    result = Fitted({})
    result.values = _fit_group(values, Config, "", origins, result)
    given = {key for key in options() if _has(result.values, key)}
    result.missing += [required(o, sources.get(k, "")) for k, o in options().items() if o.required and k not in given]
    return result


def _fit_group(values: Any, group: type, prefix: str, origins: dict[str, str], result: Fitted) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    fields = group_fields(group)
    for key, value in values.items():
        path = f"{prefix}{key}"
        if key not in fields:
            result.problems.append(unknown_key(_only_leaf(path, value), origins))
        elif is_group(annotation := fields[key].annotation):
            if isinstance(value, dict):
                assert isinstance(annotation, type), "is_group says so"
                kept[key] = _fit_group(value, annotation, f"{path}.", origins, result)
            elif value is not None and value != MISSING:  # A group with nothing but comments is null in YAML.
                result.problems.append(not_a_group(path, value, origins))
        elif value != MISSING and not _is_empty_container(path, value):
            result.missing += _holes(path, value)
            kept[key] = value
    return kept


def _is_empty_container(path: str, value: Any) -> bool:
    """`params:` with nothing but comments below it is null in YAML, and means its empty default."""
    option = options()[path]
    return value is None and isinstance(option.default, (dict, list)) and not accepts(option.annotation, type(None))


def _only_leaf(path: str, value: Any) -> str:
    """The whole dotted name of a misspelt key, where it holds a single value."""
    while isinstance(value, dict) and len(value) == 1:
        [(key, value)] = value.items()
        path = f"{path}.{key}"
    return path


def _holes(path: str, value: Any) -> list[Problem]:
    """`???` inside a free mapping or list has no default."""
    if isinstance(value, str):
        return [Problem(path, "is required (it is ???)")] if value == MISSING else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [problem for key, item in items for problem in _holes(f"{path}.{key}", item)]


def _has(values: dict[str, Any], key: str) -> bool:
    node: Any = values
    for step in key.split("."):
        if not isinstance(node, dict) or step not in node:
            return False
        node = node[step]
    return True


log = get_logger(__name__)

_ADAPTER = TypeAdapter(Config)
_STAND_INS = ("experiment.log_dir=.", "experiment.name=data", "model.pretrained=nobody/nothing")
"""What a run needs and its data does not."""
_LONG_RUN = 10**12
"""Stands in for a missing number, large enough for every rule about the length of a run."""


def load_config(argv: Sequence[str], further: Callable[[Config], list[str]] | None = None) -> Config:
    """Reads `config=a.yaml[,b.yaml]` and `a.b.c=value`.

    Args:
        argv: the arguments after the program's name; files are merged left to right, then overrides in order.
        further: checks of other layers whose problems belong to the same report; each starts with the option's name.

    Raises:
        ConfigError: with every problem of files, overrides, options and the rules between them.
    """
    sources = gather(argv)
    resolved = resolve(sources.tree)
    fitted = fit(resolved.values, sources.origins, resolved.sources)
    problems = sources.problems + resolved.problems + fitted.problems
    problems += not_permitted(fitted.values, sources.origins)
    already = [problem.key for problem in problems if problem.is_option]
    if sources.complete:
        problems += [missing for missing in fitted.missing if not is_below(missing.key, already)]
    config, wrong = _validate(fitted.values, sources.origins)
    problems += wrong
    if config is None or problems:
        broken = [problem.key for problem in problems if problem.is_option]
        rules = _rules_that_hold_anyway(fitted.values, broken, further) if sources.complete else []
        raise ConfigError(_unique([*map(str, problems), *rules]))
    if rules := _all_rules(config, further):
        raise ConfigError(_unique(rules))
    note_secret(config.wandb.api_key)
    for warning in warnings(config):
        log.warning(warning)
    return config


def load_data_config(argv: Sequence[str]) -> Config:
    """As `load_config`, for tools that look at the data only: no model, folder, name or length need be given."""
    given = {item.partition("=")[0] for item in argv}
    return load_config([*(item for item in _STAND_INS if item.partition("=")[0] not in given), *argv])


def _validate(values: dict[str, Any], origins: dict[str, str]) -> tuple[Config | None, list[Problem]]:
    try:
        return _ADAPTER.validate_python(values), []
    except ValidationError as error:
        return None, wrong_values(error, values, origins)


def _all_rules(config: Config, further: Callable[[Config], list[str]] | None) -> list[str]:
    return check(config) + (further(config) if further else [])


def _rules_that_hold_anyway(
    values: dict[str, Any], broken: list[str], further: Callable[[Config], list[str]] | None
) -> list[str]:
    """Cross-field problems that do not depend on the options already reported.

    Those options are left out or replaced by stand-ins, so that a user who corrects one report does not meet a second.
    """
    _remove(values, broken)
    for key, option in options().items():
        if option.required:
            _set_default(values, key, _LONG_RUN if accepts(option.annotation, int) else "stand-in")
    config, _ = _validate(values, {})
    return [text for text in _all_rules(config, further) if not mentions(text, broken)] if config is not None else []


def _remove(values: dict[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        while key and key not in options():
            key = key.rpartition(".")[0]
        group, _, name = key.rpartition(".")
        holder: Any = values
        for step in filter(None, group.split(".")):
            holder = holder.get(step, {})
        holder.pop(name, None)


def _set_default(values: dict[str, Any], key: str, value: Any) -> None:
    *groups, name = key.split(".")
    for step in groups:
        values = values.setdefault(step, {})
    values.setdefault(name, value)


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
