"""The configuration of another trainer → a YAML file for `train.py config=…`, and what became of each of its keys.

    python scripts/convert_config.py --from kohya train.sh dataset.toml out=configs/mine.yaml devices=4 images=1200
    python scripts/convert_config.py --from maxdiffusion base14.yml run_name=mine per_device_batch_size=2 > mine.yaml

`--from` is maxdiffusion (YAML, then key=value), lunnova (its YAML files), kohya (TOML files, or a shell script with a
command) or simpletuner (config.json and the file of data backends). Files that such a file names are read too, if they
are there. `devices=` is the number of processes (1), `images=` that of training images with their repeats, for lengths
in epochs. Without `out=`, a new file, the YAML goes to stdout. It begins with the table of keys as comments; what has
no value there is ???. The exit status is 1 where a key is unknown (not with --ignore-unknown) or the options contradict
each other.

How a key is converted stands in scripts/convert/TRAINER.yaml, why it is not in docs/coming_from_TRAINER.md:

    max_train_steps: {to: experiment.num_examples_to_see, by: steps}

`to` is the option (or several), alone where the value is the same; `values` maps their words to ours or to several
options, `*` is any other word and `=` keeps it; `by` names a conversion below; `set` adds options; `when` limits it to
patterns of other keys' values; of a list the first entry whose `when` holds is taken. Keys are converted in the order
of the table, and of two that set one option the later one wins. `defaults` are values that keys have without being
given, `always` is what no key says, `by_hand` needs what the files do not have, and `whole` are mappings whose row in
the page explains all that they hold.
"""

import argparse
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from pydantic import ValidationError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sd_training.cli import print_error, run_cli
from sd_training.config.check import unread
from sd_training.config.data_schema import MixEntry
from sd_training.config.fields import is_below, options, shown
from sd_training.config.load import load_config
from sd_training.config.schema import Config
from sd_training.errors import EXIT_UNEXPECTED, ConfigError

TRAINERS = ("maxdiffusion", "lunnova", "kohya", "simpletuner")
FOLLOWED = ("config_file", "dataset_config", "data_backend_config")
"""Keys that name a file to read as well."""
MISSING = "???"
LENGTH = "experiment.num_examples_to_see"
REQUIRED = ("experiment.log_dir", "experiment.name", LENGTH, "model.pretrained", "dataset.params.path")
OFF = ("None", "none", "False", "", "[]", "{}")
CLASS_IMAGES = {"dataset.params.path": "dataset.prior.path", "dataset.params.captions.text": "dataset.prior.prompt"}
OF_KIND = {"image": {f"dataset.{key}": key for key in options(MixEntry)}, "class images": CLASS_IMAGES}
"""Kind of a further data set → options that it may have for itself, and their names there."""
_SECRET = re.compile(r"secret|password|api_key|access_key|(^|_)token$")
_NO_LINE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""What could end a comment of YAML."""

Tree = dict[str, Any]


# ---- reading theirs


def read(path: Path) -> Any:
    """What a TOML, JSON or YAML file holds, or the flags of the command in a shell script."""
    reader = {".toml": read_toml, ".json": json.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}
    try:
        return reader.get(path.suffix, flags)(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, ImportError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from None


def read_toml(text: str) -> Any:
    """Raises ConfigError under Python 3.10, which has no reader."""
    try:
        import tomllib
    except ImportError:
        raise ConfigError("--from kohya: TOML files need Python 3.11 for this command") from None
    return tomllib.loads(text)


def flags(script: str) -> Tree:
    """`--name value …` of the last command with a .py file; variables that the script sets are filled in."""
    settings = re.findall(r"^\s*(?:export )?(\w+)=(.*?)(?:\s+#.*)?$", script, re.M)
    variables = {name: value.strip("\"'") for name, value in settings}
    lines = re.sub(r"[\\^`][ \t]*\n", " ", script).splitlines()
    command = next((line for line in reversed(lines) if re.search(r"\.py\b", line.partition("#")[0])), "")
    words = shlex.split(Template(command).safe_substitute(variables), comments=True)
    found: Tree = {}
    name = ""
    for word in words[max((number for number, word in enumerate(words) if word.endswith(".py")), default=0) :]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = value if equals else True
        elif name:  # its value, or one more
            found[name] = word if found[name] is True else [*_listed(found[name]), word]
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _scalar(value: Any) -> Any:
    """Numbers and truth values that are written as text, as in flags; PyYAML takes `1e-4` for text."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?", value):
        return int(value) if re.fullmatch(r"[-+]?\d+", value) else float(value)
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def gather(files: Sequence[Path], words: Sequence[str] = ()) -> tuple[Tree, list[Tree]]:
    """All keys of a configuration, and the data sets that it has as entries of a list."""
    tree, sets = Tree(), list[Tree]()
    for file in files:
        own, more = _split(read(file))
        sections = [value for value in own.values() if isinstance(value, dict)]
        for key, name in reduce(lambda all, section: all | section, sections, own).items():
            folders = (Path(), *file.resolve().parents[:3]) if key in FOLLOWED and isinstance(name, str) else ()
            place = next(((folder / name).resolve() for folder in folders if (folder / name).is_file()), None)
            if place is not None and place not in [other.resolve() for other in files]:
                inner, further = gather([place])
                tree, sets = tree | inner, sets + further
        tree, sets = tree | own, sets + more
    return tree | {key: value for key, _, value in (word.partition("=") for word in words)}, sets


def _split(content: Any) -> tuple[Tree, list[Tree]]:
    """Entries of a list are data sets; those of sd-scripts have what is general in common."""
    if isinstance(content, list):
        return {}, [entry for entry in content if isinstance(entry, dict)]
    if not isinstance(content, dict):
        raise ConfigError(f"{shown(content)}: is no mapping of keys")
    if isinstance(content.get("config"), dict):  # SimpleTuner's web page wraps it
        content = content["config"]
    tree = {str(key).removeprefix("--"): value for key, value in content.items()}
    if not isinstance(tree.get("datasets"), list):
        return tree, []
    general, sets = tree.pop("general", {}), []
    for entry in tree.pop("datasets"):
        shared = general | entry
        sets += [shared | one for one in shared.pop("subsets", [{}])]
    return tree, sets


# ---- converting


class Found(NamedTuple):
    """A key of theirs, and what becomes of it."""

    key: str
    """In table or page; empty where it is unknown."""
    name: str
    value: Any
    is_default: bool = False
    became: Any = ""
    """Options, or why there are none."""


class Converter:
    """The table of one trainer, and what has been converted with it."""

    def __init__(self, trainer: str, devices: int = 1, images: int = 0) -> None:
        table = yaml.safe_load((ROOT / "scripts" / "convert" / f"{trainer}.yaml").read_text(encoding="utf-8"))
        self.keys, self.defaults, self.always = table["keys"], table.get("defaults", {}), table.get("always", {})
        self.by_hand, self.whole = table.get("by_hand", []), table.get("whole", [])
        self.page = explained(ROOT / "docs" / f"coming_from_{trainer}.md")
        self.devices, self.images = devices, images
        self.options, self.given, self.rows = dict(self.always), Tree(), list[Found]()

    def convert(self, tree: Tree, sets: Sequence[Tree] = ()) -> None:
        """Converts a configuration and its data sets, the first of which is that of `dataset`."""
        kinds = [kind_of(entry) for entry in sets]
        number = kinds.index("image") if "image" in kinds else -1
        first = sets[number] if number >= 0 else {}
        self.rows = self._converted(tree | first, self.defaults)
        for other, entry in enumerate(sets):
            if other != number:
                self._add_set(f"datasets.{other}", kinds[other], entry, first)
        if "dataset.mix" not in self.options:
            self.options.pop("dataset.weight", None)
        if "dataset.prior.path" in self.options:  # class images are squares
            buckets = ["dataset.params.buckets"]
            self.options = {key: value for key, value in self.options.items() if not is_below(key, buckets)}
        self._drop_unread()

    def _converted(self, tree: Tree, defaults: Tree) -> list[Found]:
        found = list(self._walk(tree))
        self.given = {one.name.rpartition(".")[2]: one.value for one in found}
        silent = {key: value for key, value in defaults.items() if key not in self.given}
        self.given |= silent
        order, rows = list(self.keys), []
        found = [*found, *(Found(key, key, value, True) for key, value in silent.items())]
        for one in sorted(found, key=lambda one: order.index(one.key) if one.key in order else len(order)):
            rows.append(one := one._replace(became=self._became(one.key, one.value)))
            self.options |= one.became if isinstance(one.became, dict) else {}
        return rows

    def _walk(self, tree: Tree, path: tuple[str, ...] = (), whole: str = "") -> Iterator[Found]:
        for name, value in tree.items():
            if name == "params" and isinstance(value, dict):  # of LunNova's classes
                yield from self._walk(value, path, whole)
                continue
            inside = f"{whole}.{name}"
            key = self._key_of((*path, str(name))) if not whole else inside if inside in self.keys else whole
            if key or not isinstance(value, dict) or not value:
                yield Found(key, ".".join((*path, str(name))), _scalar(value))
            inner = _pairs(value) if key in self.whole else value
            entry = self.keys.get(key) or {}
            is_taken = "to" in entry or isinstance(entry, str) or self.page.get(key, "").startswith("not,")
            if isinstance(inner, dict) and not is_taken:
                yield from self._walk(inner, (*path, str(name)), key if key in self.whole else "")

    def _key_of(self, steps: tuple[str, ...]) -> str:
        """The longest known end of a dotted name, or a pattern that it has."""
        for known in (".".join(steps[start:]) for start in range(len(steps))):
            if known in self.keys or known in self.page:
                return known
        return next((key for key in self.page if "*" in key and fnmatchcase(steps[-1], key)), "") if steps else ""

    def _became(self, key: str, value: Any) -> Tree | str:
        """Options, or why there are none."""
        cell, entries = self.page.get(key) or self.page.get(key.rpartition(".")[0], ""), _listed(self.keys.get(key))
        if entries == [None]:
            return "off" if cell and str(value) in OFF else cell or "UNKNOWN"
        entries = [{"to": one} if isinstance(one, str) else one for one in entries]
        entry = next((one for one in entries if self._holds(one.get("when", {}))), None)
        if entry is None:
            return "not with " + ", ".join(f"{key}={shown(self.given.get(key))}" for key in entries[-1]["when"])
        words = {str(word).lower(): ours for word, ours in entry.get("values", {}).items()}
        ours = words.get(str(value).lower(), words.get("*")) if words else "="
        if ours is None or isinstance(ours, dict) or str(ours).startswith("not, "):
            return cell if ours is None else ours
        value = value if ours == "=" else ours
        if "to" not in entry or (not words and "by" not in entry and str(value) in OFF and value is not False):
            return entry.get("set", "off") if "to" not in entry else "off"
        try:
            value = CONVERSIONS[entry["by"]](value, self) if "by" in entry else value
        except (TypeError, ValueError, AttributeError):
            return f"not, because it is no value that is known; {cell}"
        if value is None:
            return "off"
        keys = _listed(entry["to"])
        values = value if len(keys) > 1 and isinstance(value, list) else [value] * len(keys)
        return dict(zip(keys, map(fitting, keys, values), strict=False)) | entry.get("set", {})

    def _holds(self, when: Tree) -> bool:
        given = {key: "" if self.given.get(key) is None else str(self.given[key]).lower() for key in when}
        return all(any(fnmatchcase(given[key], str(text).lower()) for text in when[key]) for key in when)

    def _add_set(self, place: str, kind: str, tree: Tree, first: Tree) -> None:
        """A further data set: an entry of `dataset.mix`, class images, or held-out ones."""
        before, self.options = self.options, {}
        rows = self._converted(tree, {})
        self.options, found, names = before, Tree(), OF_KIND.get(kind, {})
        for one in rows:
            became = one.became if names and isinstance(one.became, dict) else {}
            found |= (own := {names[key]: value for key, value in became.items() if key in names})
            if one.name not in first or one.value != first[one.name]:
                text = ", ".join(f"{key}={shown(value)}" for key, value in own.items())
                why = "not, because all data sets share it" if isinstance(one.became, dict) else one.became
                self.rows.append(one._replace(name=f"{place}.{one.name}", became=text or why))
        if kind == "image" and found:
            self.options.setdefault("dataset.mix", []).append(nested({"params.path": MISSING} | found))
        else:
            self.options |= ({"dataset.prior.prompt": MISSING} if kind == "class images" else {}) | found

    def _drop_unread(self) -> None:
        """Leaves out options of choices that are not made, which theirs ignores and ours refuses."""
        for is_refused in (True, True, False):
            known = {key: value for key, value in self.options.items() if value != MISSING}
            try:
                config = Config.model_validate(nested(dict.fromkeys(REQUIRED, "-") | {LENGTH: 1} | known))
            except ValidationError:
                return  # load_config describes it
            dropped = [sentence.partition(":")[0] for sentence in unread(config, is_refused=is_refused)]
            self.options = {key: value for key, value in self.options.items() if not is_below(key, dropped)}

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step, over all processes."""
        batch = self.options.get("system.batch_size", 1) * self.options.get("system.gradient_accumulation", 1)
        return int(batch * max(self.devices, self.options.get("trainer.devices", 1)))

    @property
    def steps(self) -> int:
        """Optimizer steps of the run; 0 where they are not known."""
        length = self.options.get(LENGTH, MISSING)
        return 0 if length == MISSING else length // self.global_batch


def kind_of(entry: Tree) -> str:
    """What an entry of a list of data sets is."""
    is_off = entry.get("disabled") or entry.get("disable")
    return "class images" if entry.get("is_reg") else "disabled" if is_off else entry.get("dataset_type", "image")


def fitting(key: str, value: Any) -> Any:
    """A number as text where the option is a text, such as a name."""
    option = options().get(key)
    return str(value) if option and not option.accepts(value) and option.accepts(str(value)) else value


def nested(values: Mapping[str, Any]) -> Tree:
    """Dotted names → groups."""
    tree: Tree = {}
    for key, value in values.items():
        *above, name = key.split(".")
        reduce(lambda group, step: group.setdefault(step, {}), above, tree)[name] = value
    return tree


def explained(page: Path) -> dict[str, str]:
    """Their keys and patterns of keys → the second cell of the row."""
    rows = [line.split("|") for line in page.read_text(encoding="utf-8").partition("## Intended")[0].splitlines()]
    return {key: row[2].strip() for row in rows if len(row) == 4 for key in re.findall(r"`([^`.][^`]*)`", row[1])}


def _pairs(value: Any) -> Tree | None:
    """A mapping, or texts such as `conv_dim=4`, as a mapping."""
    texts = re.split(r",(?=\s*\w+=)", value) if isinstance(value, str) else value
    if isinstance(texts, list) and all(isinstance(text, str) and "=" in text for text in texts):
        return {key.strip(): text.strip() for key, _, text in (text.partition("=") for text in texts)}
    return value if isinstance(value, dict) else None


def _hub(value: str, run: Converter) -> str | None:
    names = {"name": run.given.get("dataset_config_name"), "split": run.given.get("train_split")}
    query = "&".join(f"{name}={text}" for name, text in names.items() if text)
    return f"hf://datasets/{value}{'?' * bool(query)}{query}" if value else None


def _numbers(value: Any, run: Any) -> list[float]:
    """Of a list, or of a text such as `0.9,0.99`."""
    return [float(number) for number in re.findall(r"[\d.]+(?:[eE][-+]?\d+)?", str(value))]


def _side_and_area(value: Any) -> list[int]:
    """Of `768`, `512,768` or a list: the side of a square of that area, a multiple of 64 where it is none."""
    width, height = (int(side) for side in (_numbers(value, None) * 2)[:2])
    side = width if width == height else int((width * height) ** 0.5) // 64 * 64
    return [side, width * height]


CONVERSIONS: Mapping[str, Callable[[Any, Converter], Any]] = {
    "steps": lambda value, run: int(value) * run.global_batch if value and value > 0 else None,
    "epochs": lambda value, run: int(value * run.images) or MISSING if value and value > 0 else None,
    "share": lambda value, run: int(value) if value >= 1 or not value else int(value * run.steps) or MISSING,
    "over_batch": lambda value, run: max(1, value // run.global_batch) if value > 0 else None,
    "pairs": lambda value, run: 2 * value,
    "over_pairs": lambda value, run: max(1, 2 * value // run.global_batch) if value > 0 else None,
    "times_batch": lambda value, run: value * run.global_batch,
    "times_micro_batch": lambda value, run: int(value * run.options.get("system.batch_size", 1)),
    "over_rate": lambda value, run: round(min(1.0, value / run.options.get("optimizer.params.learning_rate", 1)), 12),
    "thousandth": lambda value, run: value / 1000,
    "sixty": lambda value, run: value * 60,
    "positive": lambda value, run: value if value and value > 0 else None,
    "at_least_one": lambda value, run: max(1.0, value),
    "at_least_two": lambda value, run: max(2, value) if value and value > 0 else None,
    "at_least": lambda value, run: f">={value}" if value else None,
    "listed": lambda value, run: _listed(value) if value else None,
    "first": lambda value, run: _listed(value)[0],
    "count": lambda value, run: value if isinstance(value, int) else len(_numbers(value, run)),
    "numbers": _numbers,
    "both": lambda value, run: (_numbers(value, run) * 2)[:2],
    "spaced": lambda value, run: f"{str(value).strip()} " if value else None,
    "before": lambda value, run: f" {str(value).strip()}" if value else None,
    "side": lambda value, run: _side_and_area(value)[0],
    "side_and_area": lambda value, run: _side_and_area(value),
    "megapixels": lambda value, run: round(value**0.5 * 16) * 64,
    "hub": _hub,
    "without_flax": lambda value, run: value.removeprefix("Flax"),
}


# ---- writing ours


def report(run: Converter) -> list[str]:
    """A line for each key: what it is here, or why not."""
    lines = [f"(always there) → {key}={shown(value)}" for key, value in run.always.items() if key in run.options]
    for one in run.rows:
        became = one.became
        if isinstance(became, dict):
            kept = [f"{key}={shown(value, key)}" for key, value in became.items() if run.options.get(key) == value]
            other = [
                f"{key}: another key decides" for key in became if run.options.get(key, became[key]) != became[key]
            ]
            lost = [f"{key}: not read with the rest" for key in became if key not in run.options]
            became = "" if one.is_default and not kept else ", ".join(kept + other + lost) or "as it is here"
        elif one.key in run.by_hand and became != "off":
            became = f"BY HAND: {became}"
        elif one.is_default:
            continue
        value = "(hidden)" if _SECRET.search(one.name) else shown(one.value)
        lines += [f"{one.name}{' (not given)' * one.is_default}={value} → {became}"] if became else []
    return [_NO_LINE.sub("?", line) for line in lines]


def completed(run: Converter) -> Tree:
    """The options, with ??? for those that a run needs."""
    is_named = any(re.fullmatch(r"model\.\w+\.(pretrained|target)", key) for key in run.options)
    needless = {"model.pretrained": is_named, "dataset.params.path": run.options.get("dataset.type") == "Synthetic"}
    return {key: MISSING for key in REQUIRED if not needless.get(key)} | run.options


def written(run: Converter, trainer: str) -> str:
    """The YAML file, with the table as comments."""
    values = completed(run)
    head = [f"Made by scripts/convert_config.py --from {trainer}. Its keys:", *report(run)]
    if empty := [key for key, value in values.items() if value == MISSING]:
        hint = f"; images=N, of the training data, gives {LENGTH}" if LENGTH in empty and not run.images else ""
        head.append(f"TO BE FILLED (???): {', '.join(empty)}{hint}")
    return "".join(f"# {line}\n" for line in head) + OmegaConf.to_yaml(OmegaConf.create(nested(values)))


def problems(run: Converter, text: str) -> list[str]:
    """What `load_config` refuses once the ??? are filled."""
    empty = [key for key, value in completed(run).items() if value == MISSING]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            load_config([f"config={file.name}", *(f"{key}={10**12 if key == LENGTH else 'filled'}" for key in empty)])
        except ConfigError as error:
            found = [problem.replace(file.name, "the result") for problem in error.problems]
            return [problem for problem in found if ": is required (it is ???)" not in problem]  # paths of further sets
    return []


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, convert, write, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="trainer", choices=TRAINERS, required=True, help="whose configuration it is")
    parser.add_argument("--ignore-unknown", action="store_true", help="exit with 0 although a key is unknown")
    parser.add_argument("words", nargs="+", metavar="FILE or key=value", help="their files; out=, devices=, images=")
    given = parser.parse_args(argv)
    pairs = [word.partition("=")[::2] for word in given.words if "=" in word]
    own: Tree = {"out": "", "devices": 1, "images": 0}
    theirs = [f"{key}={value}" for key, value in pairs if key not in own]
    own |= {key: value if key == "out" else _scalar(value) for key, value in pairs if key in own}
    if theirs and given.trainer != "maxdiffusion":
        raise ConfigError(f"{theirs[0]}: is not known; key=value are out=, devices= and images=")
    for name, least in (("devices", 1), ("images", 0)):
        if not isinstance(own[name], int) or own[name] < least:
            raise ConfigError(f"{name}: {own[name]!r} is no whole number of at least {least}")
    run = Converter(given.trainer, own["devices"], own["images"])
    run.convert(*gather([Path(word) for word in given.words if "=" not in word], theirs))
    text = written(run, given.trainer)
    try:
        if own["out"]:
            with open(own["out"], "x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"out: {own['out']} cannot be written: {error.strerror}; give another name") from None
    print("\n".join([*report(run), f"written: {own['out']}"]) if own["out"] else text.rstrip())
    strangers = [] if given.ignore_unknown else [one.name for one in run.rows if not one.key]
    if found := [*(f"{name}: is no key that is known of {given.trainer}" for name in strangers), *problems(run, text)]:
        print_error(ConfigError(found))
        raise SystemExit(EXIT_UNEXPECTED)


if __name__ == "__main__":
    run_cli(main)
