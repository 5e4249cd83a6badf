"""From the command line to a checked `Config`: OmegaConf merges files and overrides, pydantic validates, one report.

A file may come from somebody else: it is YAML without objects, of bounded size; `${another.option}` is the only thing
that is filled in; and it cannot permit shell commands.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError

from sd_training.config import fields
from sd_training.config.changes import PERMISSION
from sd_training.config.check import check, warnings
from sd_training.config.fields import SECRETS, groups, is_below, option_of, options, place_of, rename_old, shown
from sd_training.config.schema import LENGTHS, Config
from sd_training.errors import ConfigError
from sd_training.log import get_logger, note_secret

log = get_logger(__name__)

MAX_FILE_BYTES = 32 * 2**20
"""Largest configuration file [bytes]."""
_MAX_NODES = 500_000
"""YAML nodes after alias expansion; a class list of a thousand classes with eighty prompts each fits."""
_KEY = re.compile(r"[^\s<>!=.\[\]]+(\.[^\s<>!=.\[\]]+|\[\d+\])*")
_NOT_YAML = (">", "|", "!", "&", "*")
"""A value that starts so is text: YAML would read `>5` as an empty block and `*a` as an alias."""
_SHARDS = "dataset.params.path"
_COMMAND_LINE = "command line"
_REFERENCE = re.compile(r"(?<!\\)\$\{([^${}:]+)\}")
"""`${another.option}` inside a text."""

Problems = dict[str, str]
"""Dotted option, file or argument → what is wrong with it."""
Origins = dict[str, str]
"""Dotted option → "file, line n" or "command line"."""
Rules = Callable[[Config], list[str]]

for _name in ("env", "create", "decode", "coerce", "select", "deprecated", "dict.keys", "dict.values"):
    OmegaConf.clear_resolver(f"oc.{_name}")  # `${oc.env:…}` would read the environment


def load_config(argv: Sequence[str], further: Rules | None = None) -> Config:
    """Reads `config=a.yaml[,b.yaml]` and `a.b.c=value`.

    Args:
        argv: the arguments after the program's name; files are merged left to right, then overrides in order.
        further: checks of other layers whose problems belong to the same report; each starts with the option's name.

    Raises:
        ConfigError: with every problem of files, overrides, options and the rules between them.
    """

    def broken_rules(config: Config) -> list[str]:
        return list(dict.fromkeys(check(config) + (further(config) if further else [])))

    problems, origins = Problems(), Origins()
    try:
        tree = _gather(argv, origins, problems)
        values = _resolve(tree, "", problems, tree)
    except RecursionError:
        raise ConfigError("configuration: nested too deeply, or an option contains itself by interpolation") from None
    problems |= rename_old(values, origins)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems = _wrong_values(error, values, origins) | problems
    if problems:
        others = _rules_that_hold_anyway(values, problems, broken_rules)
        raise ConfigError([*(f"{key}: {text}" for key, text in problems.items()), *others])
    if broken := broken_rules(config):
        raise ConfigError(broken)
    note_secret(config.wandb.api_key)
    for warning in warnings(config):
        log.warning(warning)
    return config


def split_words(
    argv: Sequence[str], own: Sequence[str], program: str
) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """Own options of a command, in order; overrides of the run (`a.b.c=value`); and a sentence for each word that is
    neither."""
    given: list[tuple[str, str]] = []
    overrides: list[str] = []
    problems: list[str] = []
    for word in argv:
        name, equals, value = word.partition("=")
        if equals and "." in name:
            overrides.append(word)
        elif equals and name in own:
            given.append((name, value))
        else:
            near = fields.suggest(name, own)
            hint = f"did you mean {near}?" if near else f"options are {', '.join(own)}, and a.b.c=value"
            problems.append(f"{word}: is no option of {program}; {hint}")
    return given, overrides, problems


def _file_names(text: str) -> list[str]:
    """Files with a comma between them, or a single one whose path has a comma itself."""
    return [text] if os.path.isfile(text) else [name.strip() for name in text.split(",")]


def _gather(argv: Sequence[str], origins: Origins, problems: Problems) -> DictConfig:
    """Files and overrides laid over the schema's defaults.

    Raises:
        ConfigError: a file cannot be read, or permits what only the command line can permit. What it may hold beside
            that is not looked at.
    """
    defaults: dict[str, Any] = {}
    for key, option in options().items():
        *above, name = key.split(".")
        holder = reduce(lambda group, step: group.setdefault(step, {}), above, defaults)
        holder[name] = "???" if option.required else option.default
    tree = OmegaConf.create(defaults)
    if stray := next((item for item in argv if "=" not in item and item.endswith((".yaml", ".yml"))), None):
        raise ConfigError(f"{stray}: is no option; did you mean config={stray}?")
    unreadable = []
    for name in (name for item in argv if item.startswith("config=") for name in _file_names(item[7:])):
        try:
            values, lines = _read_file(name)
        except ConfigError as error:
            unreadable.append(str(error))
            continue
        for holder, key, place in _entries(values):
            # Wherever it stands: interpolation could move any mapping.
            if key == PERMISSION and holder[key] not in (False, None):
                remedy = f"this permission is given on the command line only ({place}=true)"
                unreadable.append(f"{place}: is {shown(holder[key])} in {name}; {remedy}")
        try:
            tree.merge_with(OmegaConf.create(values))
        except OmegaConfBaseException as error:  # a list where a group is, for instance
            unreadable.append(f"config={name}: {_first_line(error)}")
        origins |= lines
    if unreadable:
        raise ConfigError(unreadable)
    overrides = [item for item in argv if not item.startswith("config=")]
    for item in overrides:
        _override(tree, item, origins, problems)
    lengths = [f"experiment.{name}" for name in LENGTHS]
    given = [key for key in lengths if origins.get(key) == _COMMAND_LINE and OmegaConf.select(tree, key) is not None]
    if len(given) == 1:  # it takes the place of a file's, whichever that is
        for key in {*lengths} - {*given}:
            OmegaConf.update(tree, key, None)
    # An unquoted `{000..999}` reaches us as a thousand paths, of which the last would win silently.
    if (times := len({item for item in overrides if item.startswith(f"{_SHARDS}=")})) > 1:
        problems[_SHARDS] = f"is given {times} times with different values; give one, and quote a pattern with braces"
    return tree


def _read_file(name: str) -> tuple[dict[Any, Any], Origins]:
    """The file's mapping and the line of every key.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    where, path = f"config={name}", Path(name)
    try:
        if not path.exists() and (installed := Path(sys.prefix, "share", "sd_training", name)).is_file():
            path = installed  # by pip, from this project's `configs`
        with path.open("rb") as file:  # or a pipe, as `config=<(…)` gives one
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{where}: larger than {MAX_FILE_BYTES:,} bytes")
        text = content.decode("utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader) or yaml.MappingNode("", [])
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{where}: must be a mapping of options, such as `experiment:` with `name: …`")
        values = _plain(OmegaConf.create(text, max_yaml_expanded_nodes=_MAX_NODES))
        return dict(values), dict(_lines(node, name))
    except OSError as error:
        raise ConfigError(f"{where}: cannot read this file: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        where += f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{where}: not readable as YAML: {str(error.problem).partition('. ')[0]}") from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not readable as YAML: {_first_line(error)}") from error


def _lines(node: yaml.MappingNode, name: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        yield dotted, f"{name}, line {key.start_mark.line + 1}"
        if isinstance(value, yaml.MappingNode) and dotted not in options():
            yield from _lines(value, name, f"{dotted}.")


def _entries(holder: Any, prefix: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Every entry of nested containers: the container, the key in it, and the dotted name."""
    for key in range(len(holder)) if isinstance(holder, list) else list(holder):
        yield holder, key, f"{prefix}{key}"
        if isinstance(holder[key], (dict, list)):
            yield from _entries(holder[key], f"{prefix}{key}.")


def _override(tree: DictConfig, item: str, origins: Origins, problems: Problems) -> None:
    key, equals, text = item.partition("=")
    if any(secret in key for secret in SECRETS):
        item = f"{key}=…"
    if not equals or not _KEY.fullmatch(key):
        rule = "an option is dotted names up to the first =, as in dataset.params.filters.width='>=512'"
        problems[item] = f"not understood; write config=FILE or option=value; {rule}"
        return
    try:
        wrapped = {key: _parse_value(key, text)}
        OmegaConf.update(tree, key, wrapped[key], merge=True)
        for _, _, place in _entries(wrapped):
            origins[place.replace("[", ".").replace("]", "")] = _COMMAND_LINE
    except (OmegaConfBaseException, ValueError) as error:
        problems[item] = f"cannot be set: {_first_line(error)}"


def _parse_value(key: str, text: str) -> Any:
    """The value of an override: YAML as OmegaConf reads it, or the text itself where YAML cannot read it.

    An option that takes the text but not that value keeps it as it was typed: `experiment.name=007` is not seven.
    """
    if text.startswith(_NOT_YAML):
        return text
    try:
        value = _plain(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        if "maximum nesting depth" in str(error):  # PyYAML 6.0.4; before it, Python's own limit is met
            raise RecursionError from None
        return text  # ValueError: a number of 5,000 digits, no UTF-8
    option = options().get(key)
    if option is None or value is None or isinstance(value, list):
        return value
    if isinstance(value, str):  # YAML drops blanks around a text without quotes
        return text if value == text.strip() and option.accepts(text) else value
    return text if option.accepts(text) and not option.accepts(value) else value


def _resolve(node: Any, path: str, problems: Problems, root: DictConfig) -> Any:
    """Plain containers with interpolations filled in, without the values that are missing (`???`)."""
    found = {}
    for key in range(len(node)) if isinstance(node, ListConfig) else node:
        place = f"{path}.{key}" if path else str(key)
        try:
            value = node[key]
        except MissingMandatoryValue:
            if is_below(place, options()):
                if place not in options():  # in a free mapping or a list, without a default
                    problems.setdefault(place, "is required (it is ???)")
                continue
            value = None  # of an old name, or an unknown one
        except InterpolationToMissingValueError:
            continue  # reported where it has to be filled in, or where it is required
        except OmegaConfBaseException as error:
            written, hint = _plain(node)[key], "only ${another.option} is read, nothing from outside the files"
            problems.setdefault(place, f"is {written}: {_first_line(error)}; {hint}")
            continue
        if isinstance(value, str) and OmegaConf.is_interpolation(node, key) and (null := _null_inside(node, key, root)):
            remedy = f"give {null} a value, or {place} another one"
            problems.setdefault(place, f"is {_plain(node)[key]}, but {null} is null; {remedy}")
        # In YAML, a group or mapping with nothing but comments below it is null: it has its defaults.
        default = options()[place].default if place in options() else {} if place in groups() else None
        if not (value is None and isinstance(default, (dict, list))):
            found[key] = _resolve(value, place, problems, root) if isinstance(value, DictConfig | ListConfig) else value
    return list(found.values()) if isinstance(node, ListConfig) else found


def _null_inside(node: Any, key: Any, root: DictConfig) -> str | None:
    """The first option without a value in a text with interpolations, which would hold the word None there."""
    names = _REFERENCE.findall(_plain(node)[key])
    return next((n for n in names if OmegaConf.select(node if n[0] == "." else root, n) is None), None)


def _wrong_values(error: ValidationError, values: Any, origins: Origins) -> Problems:
    """Dotted name and sentence for each wrong value; pydantic reports every branch of a union, this reports once."""
    found = Problems()
    for item in error.errors(include_url=False):
        key, value = _locate(item["loc"], values)
        at = max((place for place in origins if is_below(key, [place])), key=len, default=None)
        where = f" ({origins[at]})" if at is not None else ""
        if item["type"] == "missing":
            key = ".".join(filter(None, (key, str(item["loc"][-1]))))
            option = options().get(key)
            found[key] = f"is required ({option.allowed}): {option.doc}" if option else "is required"
        elif item["type"] in ("extra_forbidden", "invalid_key"):
            near = fields.suggest_option(key)
            found[key] = f"unknown option{where}; {f'did you mean {near}?' if near else 'see docs/config.md'}"
        elif key in groups():
            found[key] = f"is {shown(value)}{where}, but it is a group of options"
        else:
            option = option_of(key)
            near = fields.suggest_value(str(value), option) if isinstance(value, (str, int)) else None
            allowed = option.allowed if key == option.key else f"{option.allowed} for {option.key}"
            hint = f"; did you mean {near}?" if near else ""
            found[key] = f"is {shown(value, option.key)}{where}; allowed: {allowed}{hint}"
    return {key: text for key, text in found.items() if not any(other.startswith(f"{key}.") for other in found)}


def _locate(location: Iterable[int | str], values: Any) -> tuple[str, Any]:
    """The part of pydantic's location that exists in the values: it also names union branches."""
    path: list[str] = []
    for step in location:
        if isinstance(values, dict):
            step = next((key for key in values if str(key) == str(step)), step)
        try:
            values = values[step]
        except (KeyError, IndexError, TypeError):
            continue
        path.append(str(step))
    return ".".join(path), values


def _rules_that_hold_anyway(values: Any, problems: Problems, rules: Rules) -> Iterator[str]:
    """Rules about options without a problem, so that whoever corrects one report does not meet a second one."""
    for key in problems:
        # The value that is wrong: of an option's part the whole option.
        group, name = place_of(values, option_of(key).key if is_below(key, options()) else key)
        group.pop(name, None)
    for key, option in options().items():
        if option.required:
            group, name = place_of(values, key)
            group.setdefault(name, "stand-in")
    try:
        config = Config.model_validate(values)
    except ValidationError:
        return
    for rule in rules(config):
        # Not if it names an option with a problem, or is about a group above or below one of them.
        about, words = rule.partition(":")[0], {word.strip(".,:;()'\"`") for word in rule.replace("=", " ").split()}
        if not is_below(about, problems) and not any(key in words or is_below(key, [about]) for key in problems):
            yield rule


def _plain(tree: Any) -> Any:
    return OmegaConf.to_container(tree, resolve=False)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
