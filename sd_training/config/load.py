"""From the command line to a checked `Config`: OmegaConf merges files and overrides, pydantic validates, one report.

A file may come from somebody else: it is YAML without objects, of bounded size; `${another.option}` is the only thing
that is filled in; and it cannot permit shell commands.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from sd_training.config import fields
from sd_training.config.changes import PERMISSION
from sd_training.config.check import check, warnings
from sd_training.config.fields import accepts, groups, is_below, option_of, options, place_of, shown
from sd_training.config.help import suggest_option, suggest_value
from sd_training.config.schema import Config
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
_ADAPTER = TypeAdapter(Config)
_STAND_INS = ("experiment.log_dir=.", "experiment.name=data", "model.pretrained=nobody/nothing")
"""What a run needs and its data does not."""
_LONG_RUN = 10**12
"""Stands in for a missing number, large enough for every rule about the length of a run."""

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

    def rules(config: Config) -> list[str]:
        return list(dict.fromkeys(check(config) + (further(config) if further else [])))

    problems, origins = Problems(), Origins()
    tree, is_complete = _gather(argv, origins, problems)
    try:
        values = _resolve(tree, "", problems)
    except RecursionError:
        raise ConfigError("configuration: nested too deeply, or an option contains itself by interpolation") from None
    problems |= fields.rename_old(values, origins)
    config = None
    try:
        config = _ADAPTER.validate_python(values)
    except ValidationError as error:
        for key, text in _wrong_values(error, values, origins):
            if is_complete or not text.startswith("is required"):  # an unreadable file may have given it
                problems.setdefault(key, text)
    if config is None or problems:
        others = _rules_that_hold_anyway(values, problems, rules) if is_complete else []
        raise ConfigError([*(f"{key}: {text}" for key, text in problems.items()), *others])
    if broken := rules(config):
        raise ConfigError(broken)
    note_secret(config.wandb.api_key)
    for warning in warnings(config):
        log.warning(warning)
    return config


def load_data_config(argv: Sequence[str]) -> Config:
    """As `load_config`, for tools that look at the data only: no model, folder, name or length need be given."""
    given = {item.partition("=")[0] for item in argv}
    return load_config([*(item for item in _STAND_INS if item.partition("=")[0] not in given), *argv])


def _gather(argv: Sequence[str], origins: Origins, problems: Problems) -> tuple[DictConfig, bool]:
    """Files and overrides laid over the schema's defaults; whether all files were read."""
    tree, is_complete = OmegaConf.create(fields.defaults()), True
    for name in (name.strip() for item in argv if item.startswith("config=") for name in item[7:].split(",")):
        try:
            values, lines = _read_file(name)
        except ConfigError as error:
            where, _, text = str(error).partition(": ")
            problems[where], is_complete = text, False
            continue
        for holder, key, place in _entries(values):
            # Wherever it stands: interpolation could move any mapping.
            if key == PERMISSION and holder[key] not in (False, None):
                remedy = f"this permission is given on the command line only ({place}=true)"
                problems[place] = f"is {shown(holder[key])} in {name}; {remedy}"
        tree.merge_with(OmegaConf.create(values))
        origins |= lines
    overrides = [item for item in argv if not item.startswith("config=")]
    for item in overrides:
        _override(tree, item, origins, problems)
    # An unquoted `{000..999}` reaches us as a thousand paths, of which the last would win silently.
    if (times := len({item for item in overrides if item.startswith(f"{_SHARDS}=")})) > 1:
        remedy = "give it once, and quote a pattern with braces"
        problems[_SHARDS] = f"is given {times} times with different values; {remedy}"
    return tree, is_complete


def _read_file(name: str) -> tuple[dict[Any, Any], Origins]:
    """The file's mapping and the line of every key.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    where = f"config={name}"
    try:
        with Path(name).open("rb") as file:  # or a pipe, as `config=<(…)` gives one
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
        reason = f"cannot read this file: {error.strerror}"
    except RecursionError:
        reason = "not readable as YAML: nested too deeply"
    except OmegaConfBaseException as error:
        reason = f"{error.full_key}: {_first_line(error)}"
    except yaml.MarkedYAMLError as error:
        where += f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        reason = f"not readable as YAML: {str(error.problem).partition('. ')[0]}"
    except (yaml.YAMLError, ValueError) as error:
        reason = f"not readable as YAML: {_first_line(error)}"
    raise ConfigError(f"{where}: {reason}")


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
    if any(secret in key for secret in fields.SECRETS):
        item = f"{key}=…"
    if not equals or not _KEY.fullmatch(key):
        rule = "an option is dotted names up to the first =, as in dataset.params.filters.width='>=512'"
        is_file = item.endswith((".yaml", ".yml"))
        problems[item] = f"not understood; {f'write config={item}' if is_file else f'write option=value; {rule}'}"
        return
    try:
        wrapped = {key: _parse_value(key, text)}
        OmegaConf.update(tree, key, wrapped[key], merge=True)
        for _, _, place in _entries(wrapped):
            origins[place.replace("[", ".").replace("]", "")] = "command line"
    except RecursionError:
        problems[f"{item[:60]}…"] = "cannot be set: nested too deeply"
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
    except (yaml.YAMLError, OmegaConfBaseException, ValueError):
        return text  # ValueError: a number of 5,000 digits, no UTF-8
    option = options().get(key)
    if option is None or value is None or isinstance(value, (str, list)):
        return value
    return text if accepts(option, text) and not accepts(option, value) else value


def _resolve(node: Any, path: str, problems: Problems) -> Any:
    """Plain containers with interpolations filled in, without the values that are missing (`???`)."""
    found = {}
    for key in range(len(node)) if isinstance(node, ListConfig) else node:
        place = f"{path}.{key}" if path else str(key)
        option = options().get(place)
        try:
            value = node[key]
        except MissingMandatoryValue:
            if option is None and place not in fields.OLD_NAMES:  # in a free mapping or a list, without a default
                problems.setdefault(place, "is required (it is ???)")
            continue
        except InterpolationToMissingValueError:
            continue  # reported where the value has to be filled in, or here where this one is required as well
        except OmegaConfBaseException as error:
            written, hint = _plain(node)[key], "only ${another.option} is read, nothing from outside the files"
            problems.setdefault(place, f"is {written}: {_first_line(error)}; {hint}")
            continue
        if isinstance(value, (DictConfig, ListConfig)):
            value = _resolve(value, place, problems)
        elif value is None and (
            place in groups() or (option and isinstance(option.default, (dict, list)) and not accepts(option, None))
        ):
            continue  # in YAML, a group or mapping with nothing but comments below it is null: its defaults
        found[key] = value
    return list(found.values()) if isinstance(node, ListConfig) else found


def _wrong_values(error: ValidationError, values: Any, origins: Origins) -> list[tuple[str, str]]:
    """Dotted name and sentence for each wrong value; pydantic reports every branch of a union, this reports once."""
    found: dict[str, str] = {}
    for item in error.errors(include_url=False):
        key, value = _locate(item["loc"], values)
        if item["type"] == "missing":
            key = ".".join(filter(None, (key, str(item["loc"][-1]))))
            option = options().get(key)
            found[key] = f"is required ({option.allowed}): {option.doc}" if option else "is required"
        elif item["type"] == "unexpected_keyword_argument":
            near = suggest_option(key)
            hint = f"did you mean {near}?" if near else "docs/config.md lists every option"
            found[key] = f"unknown option{_where(key, origins)}; {hint}"
        elif key in groups():
            member = next(name for name in (*options(), *groups()) if name.rpartition(".")[0] == key)
            found[key] = f"is {shown(value)}{_where(key, origins)}, but it is a group of options such as {member}"
        else:
            option, hint = option_of(key), ""
            if isinstance(value, (int, float)) and accepts(option, str(value)):
                hint = "; put it in quotes to make it a text"
            if isinstance(value, (str, int)) and (near := suggest_value(str(value), option)):
                hint = f"; did you mean {near}?"
            allowed = option.allowed if key == option.key else f"{option.allowed} for {option.key}"
            found[key] = f"is {shown(value, option.key)}{_where(key, origins)}; allowed: {allowed}{hint}"
    return [(key, text) for key, text in found.items() if not any(other.startswith(f"{key}.") for other in found)]


def _locate(location: Iterable[int | str], values: Any) -> tuple[str, Any]:
    """The part of pydantic's location that exists in the values: it also names union branches."""
    path: list[str] = []
    for step in location:
        if isinstance(values, dict):
            step = next((key for key in values if str(key) == str(step)), step)
            if step not in values:
                continue
        elif not (isinstance(values, list) and isinstance(step, int) and step < len(values)):
            continue
        values = values[step]
        path.append(str(step))
    return ".".join(path), values


def _where(key: str, origins: Origins) -> str:
    """The file and line (or the command line) that set a key, in brackets; empty when unknown."""
    while key and key not in origins:
        key = key.rpartition(".")[0]
    return f" ({origins[key]})" if key else ""


def _rules_that_hold_anyway(values: Any, problems: Problems, rules: Rules) -> list[str]:
    """Rules about options without a problem, so that whoever corrects one report does not meet a second one."""
    for key in problems:
        # The value that is wrong: of an option's part the whole option.
        group, name = place_of(values, option_of(key).key if is_below(key, options()) else key)
        group.pop(name, None)
    for key, option in options().items():
        if option.required:
            group, name = place_of(values, key)
            group.setdefault(name, _LONG_RUN if accepts(option, _LONG_RUN) else "stand-in")
    try:
        found = rules(_ADAPTER.validate_python(values))
    except ValidationError:
        return []
    return [rule for rule in found if not _mentions(rule, problems)]


def _mentions(rule: str, keys: Iterable[str]) -> bool:
    """Whether a sentence is about one of these options, or about a group above or below one of them."""
    about = rule.partition(":")[0]
    words = {word.strip(".,:;()'\"`") for word in rule.replace("=", " ").split()}
    return is_below(about, keys) or any(key in words or is_below(key, [about]) for key in keys)


def _plain(tree: Any) -> Any:
    return OmegaConf.to_container(tree, resolve=False)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
