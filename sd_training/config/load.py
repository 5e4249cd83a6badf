"""From the command line to a checked `Config`: OmegaConf merges, pydantic validates, every problem in one report."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sd_training.config.check import check, warnings
from sd_training.config.fields import accepts, options
from sd_training.config.fit import fit
from sd_training.config.interpolation import resolve
from sd_training.config.permissions import not_permitted
from sd_training.config.problems import Problem, is_below, mentions, wrong_values
from sd_training.config.schema import Config
from sd_training.config.sources import gather
from sd_training.errors import ConfigError
from sd_training.rank_log import get_logger
from sd_training.redaction import note_secret

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
