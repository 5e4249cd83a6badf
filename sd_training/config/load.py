"""From the command line to a checked `Config`: OmegaConf merges files and overrides, pydantic validates, one report.

A file may come from somebody else: it is YAML without objects, of bounded size; `${another.option}` is the only thing
that is filled in, since a resolver such as `${oc.env:…}` reads the environment; and it cannot permit shell commands.
"""

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from pydantic import TypeAdapter, ValidationError

from sd_training.config.changes import PERMISSIONS
from sd_training.config.check import check, warnings
from sd_training.config.fields import (
    OLD_NAMES,
    SECRETS,
    Option,
    accepts,
    defaults,
    groups,
    is_below,
    option_of,
    options,
    place_of,
    rename_old,
    shown,
    words_of,
)
from sd_training.config.help import elsewhere, suggest, suggest_value
from sd_training.config.schema import Config
from sd_training.errors import ConfigError
from sd_training.log import get_logger
from sd_training.redaction import note_secret

log = get_logger(__name__)

MAX_FILE_BYTES = 32 * 2**20
"""Largest configuration file [bytes]."""
_MAX_NODES = 500_000
"""YAML nodes after alias expansion; a class list of a thousand classes with eighty prompts each fits."""
COMMAND_LINE = "command line"
_KEY = re.compile(r"[^\s<>!=.\[\]]+(\.[^\s<>!=.\[\]]+|\[\d+\])*")
_NOT_YAML = (">", "|", "!", "&", "*", "%", "@", "`")
"""A value that starts so is text: YAML would read `>5` as an empty block and `*a` as an alias."""
_RESOLVER = re.compile(r"\$\{\s*([^:}$]*)[:$]")
"""`${name:…}`, or an interpolation inside another one, whose name could come from a resolver."""
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


def load_config(argv: Sequence[str], further: Callable[[Config], list[str]] | None = None) -> Config:
    """Reads `config=a.yaml[,b.yaml]` and `a.b.c=value`.

    Args:
        argv: the arguments after the program's name; files are merged left to right, then overrides in order.
        further: checks of other layers whose problems belong to the same report; each starts with the option's name.

    Raises:
        ConfigError: with every problem of files, overrides, options and the rules between them.
    """
    problems: Problems = {}
    tree, origins, is_complete = _gather(argv, problems)
    try:
        values = _resolve(tree, "", problems)
    except RecursionError:
        raise ConfigError("configuration: nested too deeply, or an option contains itself by interpolation") from None
    problems |= rename_old(values, origins)
    origins |= {new: origins[old] for old, new in OLD_NAMES.items() if old in origins and new not in origins}
    try:
        config = _ADAPTER.validate_python(values)
    except ValidationError as error:
        config = None
        for key, text in _wrong_values(error, values, origins):
            if is_complete or not text.startswith("is required"):  # an unreadable file may have given it
                problems.setdefault(key, text)
    if config is None or problems:
        rules = _rules_that_hold_anyway(values, problems, further) if is_complete else []
        raise ConfigError([*(f"{key}: {text}" for key, text in problems.items()), *rules])
    if rules := _all_rules(config, further):
        raise ConfigError(rules)
    note_secret(config.wandb.api_key)
    for warning in warnings(config):
        log.warning(warning)
    return config


def load_data_config(argv: Sequence[str]) -> Config:
    """As `load_config`, for tools that look at the data only: no model, folder, name or length need be given."""
    given = {item.partition("=")[0] for item in argv}
    return load_config([*(item for item in _STAND_INS if item.partition("=")[0] not in given), *argv])


def _gather(argv: Sequence[str], problems: Problems) -> tuple[DictConfig, Origins, bool]:
    """Files and overrides laid over the schema's defaults; where each value comes from; whether all files were read."""
    tree, origins, is_complete = OmegaConf.create(defaults()), Origins(), True
    files = [name.strip() for item in argv if item.startswith("config=") for name in item[7:].split(",")]
    for name in files:
        try:
            values, lines = _read_file(name)
        except ConfigError as error:
            where, _, text = str(error).partition(": ")
            problems[where], is_complete = text, False
            continue
        found = {key: name for _, _, key in _entries(values)} | {k: f"{name}, line {n}" for k, n in lines.items()}
        _take_out_resolvers(values, problems)
        for holder, name_of_key, key in _entries(values):
            # Wherever it stands: interpolation could move any mapping.
            if name_of_key in PERMISSIONS and holder[name_of_key] not in (False, None):
                remedy = f"this permission is given on the command line only ({key}=true)"
                problems[key] = f"is {shown(holder[name_of_key])}{_where(key, found)}; {remedy}"
        tree.merge_with(OmegaConf.create(values))
        origins |= found
    overrides = [item for item in argv if not item.startswith("config=")]
    for item in overrides:
        _override(tree, item, origins, problems)
    # An unquoted `{000..999}` reaches us as a thousand paths, of which the last would win silently.
    if (times := len({item for item in overrides if item.startswith(f"{_SHARDS}=")})) > 1:
        problems[_SHARDS] = (
            f"is given {times} times with different values; give it once, and quote a pattern with braces"
        )
    return tree, origins, is_complete


def _read_file(name: str) -> tuple[dict[Any, Any], dict[str, int]]:
    """The file's mapping and the line of every key.

    Raises:
        ConfigError: it cannot be read, or is no mapping.
    """
    line = ""
    try:
        with Path(name).open("rb") as file:  # or a pipe, as `config=<(…)` gives one
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"larger than {MAX_FILE_BYTES:,} bytes")
        text = content.decode("utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader) or yaml.MappingNode("", [])
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"config={name}: must be a mapping of options, such as `experiment:` with `name: …`")
        return dict(_plain(OmegaConf.create(text, max_yaml_expanded_nodes=_MAX_NODES))), _lines(node)
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot read this file: {getattr(error, 'strerror', None) or 'not a UTF-8 text'}"
    except RecursionError:
        problem = "not readable as YAML: nested too deeply"
    except OmegaConfBaseException as error:
        problem = f"{error.full_key}: {_first_line(error)}"
    except (yaml.YAMLError, ValueError) as error:
        reason = _first_line(error)
        if isinstance(error, yaml.MarkedYAMLError):
            reason = str(error.problem)
            line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        many = f"more than {_MAX_NODES:,} values after expanding its aliases"
        problem = many if "EXPANDED_NODES" in reason else f"not readable as YAML: {reason}"
    raise ConfigError(f"config={name}{line}: {problem}")


def _lines(node: yaml.MappingNode, prefix: str = "") -> dict[str, int]:
    found: dict[str, int] = {}
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        found[dotted] = key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode) and dotted not in options():
            found |= _lines(value, f"{dotted}.")
    return found


def _entries(holder: Any, prefix: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Every entry of nested containers: the container, the key in it, and the dotted name."""
    for key in range(len(holder)) if isinstance(holder, list) else list(holder):
        yield holder, key, f"{prefix}{key}"
        if isinstance(holder[key], (dict, list)):
            yield from _entries(holder[key], f"{prefix}{key}.")


def _take_out_resolvers(values: dict[Any, Any], problems: Problems) -> None:
    """Replaces every text with a resolver by `???`, so that merging files computes nothing."""
    for holder, key, place in _entries(values):
        if isinstance(holder[key], str) and (found := _RESOLVER.search(holder[key])):
            refused = f"${{{found[1].strip()}:…}}" if found[0].endswith(":") else "${…${…}…}"
            holder[key] = "???"
            problems[place] = (
                f"{refused} is not allowed: only ${{another.option}} is read, nothing from outside the files"
            )


def _override(tree: DictConfig, item: str, origins: Origins, problems: Problems) -> None:
    key, equals, text = item.partition("=")
    if any(secret in key for secret in SECRETS):
        item = f"{key}=…"
    if not equals:
        hint = f"config={item}" if item.endswith((".yaml", ".yml")) else "option=value, such as experiment.name=first"
        problems[item] = f"not understood; write {hint}"
    elif key.startswith("-"):
        problems[item] = f"not understood: options are written without dashes: {item.lstrip('-')}"
    elif not _KEY.fullmatch(key):
        rule = "an option is dotted names, such as dataset.params.path, and its name ends at the first ="
        stem = key.rstrip("<>!= ")
        hint = f"; write {stem}={key[len(stem) :].strip()}={text}" if stem != key else ""
        problems[item] = f"not understood: {rule}{hint}"
    else:
        try:
            wrapped = {key: parse_value(key, text)}
            _take_out_resolvers(wrapped, problems)
            OmegaConf.update(tree, key, wrapped[key], merge=True)
            for _, _, place in _entries(wrapped):
                origins[place.replace("[", ".").replace("]", "")] = COMMAND_LINE
        except RecursionError:
            problems[f"{item[:60]}…"] = "cannot be set: nested too deeply"
        except (OmegaConfBaseException, ValueError) as error:
            problems[item] = f"cannot be set: {_first_line(error)}"


def parse_value(key: str, text: str) -> Any:
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
        try:
            value = node[key]
        except MissingMandatoryValue:
            if place not in options() and place not in OLD_NAMES:  # in a free mapping or a list, without a default
                problems.setdefault(place, "is required (it is ???)")
            continue
        except InterpolationToMissingValueError:
            continue  # reported where the value has to be filled in, or here where this one is required as well
        except OmegaConfBaseException as error:
            written = str(_plain(node)[key])
            is_key = isinstance(error, InterpolationKeyError)
            text = f"but there is no such option{_near(written)}" if is_key else f"which fails: {_first_line(error)}"
            problems.setdefault(place, f"is {written}, {text}")
            continue
        if isinstance(value, (DictConfig, ListConfig)):
            value = _resolve(value, place, problems)
        elif value is None and (place in groups() or _is_emptied(options().get(place))):
            continue  # in YAML, a group or mapping with nothing but comments below it is null: its defaults
        found[key] = value
    return list(found.values()) if isinstance(node, ListConfig) else found


def _is_emptied(option: Option | None) -> bool:
    """Whether null is an empty mapping or list of an option."""
    return option is not None and isinstance(option.default, (dict, list)) and not accepts(option, None)


def _near(written: str) -> str:
    if variable := re.search(r"\$\{([A-Z][A-Z0-9_]*)\}", written):
        return f"; a variable of the environment is written ${variable[1]}, in names of output folders only"
    near = suggest(written.strip("${} "), [*options(), *groups()])
    return f"; did you mean ${{{near}}}?" if near else ""


def _wrong_values(error: ValidationError, values: Any, origins: Origins) -> list[tuple[str, str]]:
    """Dotted name and sentence for each wrong value; pydantic reports every branch of a union, this reports once."""
    found: dict[str, str] = {}
    for item in error.errors(include_url=False):
        kind = item["type"]
        key, value = _locate(item["loc"], values)
        if kind == "missing":
            key = ".".join(filter(None, (key, str(item["loc"][-1]))))
            option = options().get(key)
            found[key] = f"is required ({option.allowed}): {option.doc}" if option else "is required"
        elif kind == "unexpected_keyword_argument":
            near = elsewhere(key) or suggest(key, [*options(), *groups()])
            hint = f"did you mean {near}?" if near else "docs/config.md lists every option"
            found[key] = f"unknown option{_where(key, origins)}; {hint}"
        elif key in groups():
            member = next(name for name in (*options(), *groups()) if name.rpartition(".")[0] == key)
            found[key] = f"is {shown(value)}{_where(key, origins)}, but it is a group of options such as {member}"
        else:
            found[key] = _wrong_value(key, option_of(key), value, origins)
    return [(key, text) for key, text in found.items() if not any(other.startswith(f"{key}.") for other in found)]


def _wrong_value(key: str, option: Option, value: Any, origins: Origins) -> str:
    hint = ""
    if isinstance(value, (int, float)) and accepts(option, str(value)):
        hint = "; put it in quotes to make it a text"
    if isinstance(value, (str, int)) and (near := suggest_value(str(value), words_of(option.annotation))):
        hint = f"; did you mean {near}?"
    allowed = option.allowed if key == option.key else f"{option.allowed} for {option.key}"
    return f"is {shown(value, option.key)}{_where(key, origins)}; allowed: {allowed}{hint}"


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


def _all_rules(config: Config, further: Callable[[Config], list[str]] | None) -> list[str]:
    return list(dict.fromkeys(check(config) + (further(config) if further else [])))


def _rules_that_hold_anyway(
    values: Any, problems: Problems, further: Callable[[Config], list[str]] | None
) -> list[str]:
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
        rules = _all_rules(_ADAPTER.validate_python(values), further)
    except ValidationError:
        return []
    return [rule for rule in rules if not _mentions(rule, problems)]


def _mentions(rule: str, keys: Iterable[str]) -> bool:
    """Whether a sentence is about one of these options, or about a group above or below one of them."""
    about = rule.partition(":")[0]
    words = {word.strip(".,:;()'\"`") for word in rule.replace("=", " ").split()}
    return is_below(about, keys) or any(key in words or is_below(key, [about]) for key in keys)


def _plain(tree: Any) -> Any:
    return OmegaConf.to_container(tree, resolve=False)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
