"""The command line read into one tree: YAML files merged left to right, then dot overrides.

How much a configuration grows when its interpolations are replaced, told before any of them is.

Thirty lines in which each names the one before twice stand for a billion copies of the first: OmegaConf would work on
them for ever. Here sizes are added up, each value once.
"""

import errno
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sd_training.config.changes import not_permitted, plain_keys
from sd_training.config.fields import SECRETS, accepts, accepts_as_typed, defaults, options
from sd_training.config.problems import COMMAND_LINE, Problem

MAX_REPLACEMENTS = 10_000
"""Interpolations that are replaced in all [count]; OmegaConf does some thousand per second."""
MAX_CHARACTERS = 64 * 2**20
"""Text of all values together, after replacing [characters]."""
_VALUE = 64
"""A value counts as so many characters besides its text: a million of them are a gigabyte of Python objects."""
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_INDEX = re.compile(r"\[([^\[\]]*)\]")
_Path = tuple[str, ...]


def expansion_problem(tree: DictConfig) -> str | None:
    """Why this tree is not resolved; None where it may be.

    Raises:
        RecursionError: values are nested, or name one another, too deeply.
    """
    replacements, characters = _Sizes(OmegaConf.to_container(tree, resolve=False)).of(())
    if replacements > MAX_REPLACEMENTS:
        return f"interpolations multiply: {_count(replacements)} have to be replaced, at most {MAX_REPLACEMENTS:,} are"
    if characters > MAX_CHARACTERS:
        return f"interpolations make it {_count(characters)} characters long, at most {MAX_CHARACTERS:,} are read"
    return None


class _Sizes:
    """Replacements and characters below each path; a value that contains itself counts as nothing, resolving names it.

    Args:
        values: plain containers, not resolved.
    """

    def __init__(self, values: Any) -> None:
        self.values = values
        self._known: dict[_Path, tuple[int, int]] = {}

    def of(self, path: _Path) -> tuple[int, int]:
        """Of the value at `path` and everything below it."""
        return self._known[path] if path in self._known else self._of(path, self._at(path))

    def _of(self, path: _Path, value: Any) -> tuple[int, int]:
        if path not in self._known:
            self._known[path] = (0, 0)
            self._known[path] = self._measure(path, value)
        return self._known[path]

    def _measure(self, path: _Path, value: Any) -> tuple[int, int]:
        if isinstance(value, str):
            targets = [self.of(_target(path, name)) for name in _REFERENCE.findall(value)]
            own = (len(targets), _VALUE + len(value))
        else:
            entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            targets = [self._of((*path, str(key)), entry) for key, entry in entries]
            own = (0, _VALUE)
        return own[0] + sum(t[0] for t in targets), own[1] + sum(t[1] for t in targets)

    def _at(self, path: _Path) -> Any:
        value = self.values
        for step in path:
            if isinstance(value, dict):
                value = value[step] if step in value else next((v for k, v in value.items() if str(k) == step), None)
            elif isinstance(value, list) and step.isdecimal() and len(step) < 10 and int(step) < len(value):
                value = value[int(step)]
            elif isinstance(value, str) and (found := _REFERENCE.fullmatch(value)):
                value = self._below(found[1], step)
            else:
                return None
        return value

    def _below(self, name: str, step: str) -> Any:
        """The value `step` of what `${name}` means."""
        return None if name.startswith(".") else self._at((*_target((), name), step))


def _target(path: _Path, name: str) -> _Path:
    """The path that `${name}` at `path` means; each dot in front goes up by one."""
    steps = tuple(step for step in _INDEX.sub(r".\1", name.strip()).split(".") if step)
    up = len(name.strip()) - len(name.strip().lstrip("."))
    return (*path[: max(0, len(path) - up)], *steps) if up else steps


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**12 else "more than 10^12"


_MAX_FILE_BYTES = 32 * 2**20
"""Largest configuration file [bytes]."""
_MAX_NODES = 500_000
"""YAML nodes after alias expansion; a class list of a thousand classes with eighty prompts each fits."""
_KEY = re.compile(r"[^\s<>!=.\[\]]+(\.[^\s<>!=.\[\]]+|\[\d+\])*")
_NOT_YAML = (">", "|", "!", "&", "*", "%", "@", "`")
"""A value that starts so is text: YAML would read `>5` as an empty block and `*a` as an alias."""


@dataclass
class Sources:
    """Everything that was asked for, not yet resolved or checked."""

    tree: DictConfig
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted key → "file, line n" or "command line"."""
    problems: list[Problem] = field(default_factory=list)
    given_by_files: list[Problem] = field(default_factory=list)
    """Permissions that a file gives; those that the command line also gives or takes are no problem."""
    complete: bool = True
    """False when a file could not be read, so that missing options say nothing."""


_SHARDS = "dataset.params.path="


def gather(argv: Sequence[str]) -> Sources:
    """Merges `config=a.yaml,b.yaml` over the schema's defaults, then applies `a.b.c=value` in order."""
    sources = Sources(OmegaConf.create(defaults()))
    for item in argv:
        if item.startswith("config="):
            for name in item.removeprefix("config=").split(","):
                _merge_file(sources, name.strip())
    overrides = [item for item in argv if not item.startswith("config=")]
    sources.problems += _given_twice(overrides)
    for item in overrides:
        _apply_override(sources, item)
    set_here = {key for key, origin in plain_keys(sources.origins).items() if origin == COMMAND_LINE}
    sources.problems += [problem for problem in sources.given_by_files if problem.key not in set_here]
    _refuse_multiplying(sources)
    return sources


def _refuse_multiplying(sources: Sources) -> None:
    try:
        problem = expansion_problem(sources.tree)
    except RecursionError:
        problem = "nested too deeply"
    if problem:
        sources.problems.append(Problem("configuration", problem, is_option=False))
        sources.complete, sources.tree = False, OmegaConf.create({})


def _given_twice(overrides: Sequence[str]) -> list[Problem]:
    """An unquoted `{000..999}` reaches us as a thousand paths, of which the last would win silently.

    For every other option the last one wins, as OmegaConf users expect.
    """
    counts = Counter(item.partition("=")[0] for item in dict.fromkeys(overrides) if item.startswith(_SHARDS))
    text = "is given {} times with different values; give it once, and quote a pattern with braces"
    return [Problem(key, text.format(count)) for key, count in counts.items() if count > 1]


def _merge_file(sources: Sources, name: str) -> None:
    try:
        values, lines = _parse_file(name, _read(name))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a UTF-8 text"
        values, lines = _file_problem(name, f"cannot read this file: {reason}"), {}
    if isinstance(values, Problem):
        sources.problems.append(values)
        sources.complete = False
        return
    origins = {key: f"{name}, line {line}" for key, line in lines.items()}
    sources.given_by_files += not_permitted(values, dict.fromkeys(map(str, values), name) | origins)
    sources.problems += _refuse_resolvers(values)
    merged = OmegaConf.merge(sources.tree, OmegaConf.create(values))
    assert isinstance(merged, DictConfig), "two mappings merge to a mapping"
    sources.tree = merged
    sources.origins |= origins


def _read(name: str) -> str:
    """The text of a file, or of a pipe, as `config=<(…)` gives one."""
    with Path(name).open("rb") as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"larger than {_MAX_FILE_BYTES:,} bytes")
    return content.decode("utf-8")


def _parse_file(name: str, text: str) -> tuple[dict[Any, Any] | Problem, dict[str, int]]:
    """The file's mapping and the line of every key."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            return _file_problem(name, "must be a mapping of options, such as `experiment:` with `name: …`"), {}
        loaded = OmegaConf.create(text, max_yaml_expanded_nodes=_MAX_NODES)
        return dict(_plain(loaded)), _lines(node)
    except yaml.MarkedYAMLError as error:
        if "EXPANDED_NODES" in str(error):
            return _file_problem(name, f"more than {_MAX_NODES:,} values after its aliases are expanded"), {}
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        return _file_problem(name + line, f"not readable as YAML: {error.problem}"), {}
    except OmegaConfBaseException as error:
        return _file_problem(name, f"{getattr(error, 'full_key', '')}: {_first_line(error)}"), {}
    except (yaml.YAMLError, ValueError) as error:
        return _file_problem(name, f"not readable as YAML: {_first_line(error)}"), {}
    except RecursionError:
        return _file_problem(name, "not readable as YAML: nested too deeply"), {}


def _file_problem(name: str, text: str) -> Problem:
    return Problem(f"config={name}", text, is_option=False)


def _lines(node: yaml.MappingNode, prefix: str = "") -> dict[str, int]:
    found: dict[str, int] = {}
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        found[dotted] = key.start_mark.line + 1
        if isinstance(value, yaml.MappingNode) and dotted not in options():
            found |= _lines(value, f"{dotted}.")
    return found


def _apply_override(sources: Sources, item: str) -> None:
    key, equals, text = item.partition("=")
    if any(secret in key for secret in SECRETS):
        item = f"{key}=…"
    if not equals:
        hint = f"config={item}" if item.endswith((".yaml", ".yml")) else "option=value, such as experiment.name=first"
        sources.problems.append(Problem(item, f"not understood; write {hint}", is_option=False))
        return
    if not _KEY.fullmatch(key) or key.startswith("-"):
        hint = _key_hint(key, item.partition("=")[2])
        sources.problems.append(Problem(item, f"not understood: {hint}", is_option=False))
        return
    try:
        # Wrapped in one key, so that a refused resolver can be taken out as in a file.
        wrapped = {key: parse_value(key, text)}
        sources.problems += _refuse_resolvers(wrapped)
        OmegaConf.update(sources.tree, key, wrapped[key], merge=True)
        sources.origins[key] = COMMAND_LINE
    except RecursionError:
        sources.problems.append(Problem(f"{item[:60]}…", "cannot be set: nested too deeply", is_option=False))
    except (OmegaConfBaseException, ValueError) as error:
        sources.problems.append(Problem(item, f"cannot be set: {_first_line(error)}", is_option=False))


def _key_hint(key: str, text: str) -> str:
    stem = key.rstrip("<>!= ")
    if stem != key and _KEY.fullmatch(stem):
        return f"the option's name ends at the first =; write {stem}={key[len(stem) :].strip()}={text}"
    if key.startswith("-"):
        return f"options are written without dashes: {key.lstrip('-')}={text}"
    return "an option is dotted names, such as dataset.params.path"


def parse_value(key: str, text: str) -> Any:
    """The value of an override: YAML as OmegaConf reads it, or the text itself where YAML cannot read it.

    An option that holds text keeps it as it was typed, so that `experiment.name=007` is not seven.
    """
    if text.startswith(_NOT_YAML):
        return text
    try:
        value = _plain(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError):  # ValueError: a number of 5,000 digits, no UTF-8
        return text
    option = options().get(key)
    if option is None or value is None or isinstance(value, (str, list)):
        return value
    is_text = accepts_as_typed(option.annotation, text) and not accepts(option.annotation, type(value))
    return text if is_text else value


def _refuse_resolvers(values: dict[Any, Any]) -> list[Problem]:
    """Takes out every `${name:…}`: a resolver could read the environment or run a function.

    The value becomes `???` in place, so that nothing is computed while files are merged.
    """
    problems: list[Problem] = []

    def visit(holder: Any, path: str) -> None:
        """All texts in `holder`, which is at the dotted `path`."""
        for key in range(len(holder)) if isinstance(holder, list) else list(holder):
            value, dotted = holder[key], f"{path}.{key}" if path else str(key)
            if isinstance(value, (dict, list)):
                visit(value, dotted)
            elif isinstance(value, str) and (refused := _refused_in(value)):
                holder[key] = "???"
                text = f"{refused} is not allowed: only ${{another.option}} is read, nothing from outside the files"
                problems.append(Problem(dotted, text))

    visit(values, "")
    return problems


def _refused_in(text: str) -> str | None:
    """The first `${name:…}` at any depth, else an interpolation inside another one: what it names is not to be told."""
    opened: list[int] = []
    is_nested = False
    for token in re.finditer(r"\$\{|\}|:", text):
        if token[0] == "${":
            is_nested |= bool(opened)
            opened.append(token.end())
        elif opened and token[0] == ":":
            return f"${{{text[opened[-1] : token.start()].strip()}:…}}"
        elif opened:
            opened.pop()
    return "${…${…}…}" if is_nested else None


def _plain(tree: Any) -> Any:
    return OmegaConf.to_container(tree, resolve=False)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
