"""Tag folders as LunNova's trainer reads them: `metadata/**.json` name an image, its score and its tags.

Which samples take part is decided when the folder is indexed (`tag_rules.judge`); the caption is put together anew at
every visit.

Rules of the tag metadata folder: which pictures are used, and how tags become captions.

Names, meanings and order of operations are those of LunNova's `lun.data.local.Local`. A file is judged once, when the
index is made: aspect ratio, own score, score tag, bonus scores, blacklist. A caption is made at every visit: score
tag, tags left out, shuffled or sorted, replacements, separators. What differs there, on purpose:

- `aspect_range` counts; the original reads it and uses 0.71..1.42 always.
- Prefixes in `non_caption_tag_prefixes` count alone; the original ignores them unless `non_caption_tags` is given.
- Shuffling is drawn at every visit; the original draws it once, when the data set is set up.
- Files are counted folder by folder, by name (`consider_every_nth`); the original takes the order of the disk.
- `caption_sorter` is a word, and there is no `custom_filter`: both name code to run.

A score tag is given from its threshold on (score >= threshold), as the original's code does; its description says >.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sd_training.config.data_schema import TagConfig
from sd_training.data.index.store import DatasetIndex
from sd_training.data.problems import Problems
from sd_training.data.samples.captions import with_score_tag
from sd_training.data.sources.base import Shard, ShardScan
from sd_training.data.sources.files import FileReader, FileSample, ImageInfo, SampleColumns, measure
from sd_training.data.storage.files import Access
from sd_training.data.storage.locations import entries_of, exists, folders_below, local_folders
from sd_training.errors import ConfigError, DataError

OPTION = "dataset.params.tags"
LIMIT_SEED = 1
"""Of the choice of `limit_images`: the same in every run, whatever `experiment.seed` is."""
_MAX_SCORE = 2**53
_MAX_ASPECT = 1e9
_NOT_JUDGED = {
    "consider_every_nth",
    "limit_images",
    "non_caption_tags",
    "non_caption_tag_prefixes",
    "replacements",
    "shuffle_tag_p",
    "caption_sorter",
    "tag_separator",
    "final_tag_separator",
    "skip_caption",
}


class TagRecord(NamedTuple):
    """One metadata file."""

    path: str
    """Of the image, relative to the root of the data set; never leads out of it."""
    aspect_ratio: float | None
    """Width / height; None when the file does not say."""
    score: int
    tags: list[str]


@dataclass(frozen=True)
class TagRules:
    """The options of `dataset.params.tags`, read by `tag_rules`; meanings are documented there."""

    consider_every_nth: int | None = None
    score_tags: tuple[int, ...] = ()
    abs_min_score: float = 25
    min_score: float = 50
    tag_bonus_scores: Mapping[str, float] = field(default_factory=dict)
    blacklist_tags: frozenset[str] = frozenset()
    non_caption_tags: frozenset[str] = frozenset()
    non_caption_tag_prefixes: tuple[str, ...] = ()
    replacements: Mapping[str, str] = field(default_factory=dict)
    shuffle_tag_p: float = 0.0
    caption_sorter: Literal["alphabetical", "as_written"] = "alphabetical"
    tag_separator: str = ", "
    final_tag_separator: bool = False
    skip_caption: bool = False
    aspect_range: tuple[float, float] = (0.71, 1.42)
    limit_images: int | None = None


def tag_rules(config: TagConfig, option: str = OPTION) -> TagRules:
    """The rules that a config asks for.

    Raises:
        ConfigError: every option whose value has no meaning.
    """
    if problems := _rule_problems(config, option):
        raise ConfigError(problems)
    low, high = config.aspect_range
    return TagRules(
        consider_every_nth=config.consider_every_nth,
        score_tags=tuple(config.score_tags),
        abs_min_score=config.abs_min_score,
        min_score=config.min_score,
        tag_bonus_scores=dict(config.tag_bonus_scores or {}),
        blacklist_tags=frozenset(config.blacklist_tags or ()),
        non_caption_tags=frozenset(config.non_caption_tags or ()),
        non_caption_tag_prefixes=tuple(config.non_caption_tag_prefixes or ()),
        replacements=dict(config.replacements or {}),
        shuffle_tag_p=config.shuffle_tag_p or 0.0,
        caption_sorter=config.caption_sorter,
        tag_separator=config.tag_separator,
        final_tag_separator=config.final_tag_separator,
        skip_caption=config.skip_caption,
        aspect_range=(low, high),
        limit_images=config.limit_images,
    )


def _rule_problems(config: TagConfig, option: str) -> list[str]:
    problems = []
    thresholds, sides = config.score_tags, config.aspect_range
    if any(one <= other for one, other in itertools.pairwise(thresholds)):
        problems.append(f"{option}.score_tags: {thresholds} must fall; the first one that is reached counts")
    if len(sides) != 2 or not 0 < sides[0] <= sides[1] < math.inf:
        problems.append(
            f"{option}.aspect_range: {sides} must be [lowest, highest] width / height, such as [0.71, 1.42]"
        )
    if "" in (config.replacements or {}):
        problems.append(f"{option}.replacements: '' cannot be replaced; write the text to look for")
    if "" in (config.non_caption_tag_prefixes or ()):
        problems.append(
            f"{option}.non_caption_tag_prefixes: every tag starts with ''; use skip_caption for no captions"
        )
    return problems


def judged_by(rules: TagRules) -> str:
    """The rules that decide what `judge` answers, as text: files are judged anew when it changes."""
    values = {name: value for name, value in dataclasses.asdict(rules).items() if name not in _NOT_JUDGED}
    return json.dumps(values, sort_keys=True, default=sorted)


def considered(names: Sequence[str], rules: TagRules, num_before: int = 0) -> list[str]:
    """Which `names` of a folder are files 0, n, 2n, … (`consider_every_nth`); `num_before` are in earlier folders."""
    step = rules.consider_every_nth or 1
    return sorted(names)[-num_before % step :: step]


def limited(keys: Sequence[str], limit: int, seed: int = LIMIT_SEED) -> NDArray[np.int64]:
    """A fixed random choice of `limit` samples (`limit_images`), as ascending places in `keys`.

    Each key has a place of its own in the draw: the choice depends neither on the order of the keys nor, but for the
    samples pushed out, on samples that were added; and a smaller choice is part of a larger one.
    """
    salt = seed.to_bytes(8, "little")
    hashes = (hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, salt=salt).digest() for key in keys)
    places = np.frombuffer(b"".join(hashes), dtype=">u8")
    return np.sort(np.argsort(places, kind="stable")[:limit])


def read_tag_record(text: str) -> TagRecord:
    """Reads a metadata file: `path`, `score`, `tags` and, if it is there, `aspect_ratio`; other keys are ignored.

    Raises:
        ValueError: the reason why the file cannot be used.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("metadata is not JSON") from error
    if not isinstance(value, dict):
        raise ValueError("metadata is no JSON object")
    for name in ("path", "score", "tags"):
        if value.get(name) is None:
            raise ValueError(f"metadata without {name}")
    return TagRecord(
        _path(value["path"]), _aspect(value.get("aspect_ratio")), _score(value["score"]), _tags(value["tags"])
    )


def _path(value: object) -> str:
    if not isinstance(value, str) or not _is_text(value) or "\0" in value:
        raise ValueError("metadata has a path that is no text")
    path = posixpath.normpath(value)
    if posixpath.isabs(path) or path.split("/")[0] in (".", ".."):
        raise ValueError("metadata has a path that leads out of the data set")
    return path


def _aspect(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _MAX_ASPECT:
        raise ValueError("metadata has an aspect_ratio that is no number above 0")
    return float(value)


def _score(value: object) -> int:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _MAX_SCORE or value != int(value):  # type: ignore[arg-type, call-overload]
        raise ValueError("metadata has a score that is no whole number")
    return int(value)  # type: ignore[call-overload]


def _tags(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(tag, str) and _is_text(tag) for tag in value):
        raise ValueError("metadata has tags that are no list of texts")
    return value


def _is_text(value: str) -> bool:
    """JSON can spell halves of characters, which no file name and no index can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def judge(record: TagRecord, rules: TagRules) -> str | None:
    """Why the picture is not used, or None when it is; reasons are counted by their part before the colon.

    An `aspect_ratio` of None is not judged: call `judge_aspect` when the picture's size is known.
    """
    if record.aspect_ratio is not None and (reason := judge_aspect(record.aspect_ratio, rules)):
        return reason
    if record.score < rules.abs_min_score:
        return f"score below abs_min_score: {record.score}"
    tags = with_score_tag(record.tags, record.score, rules.score_tags)
    present = frozenset(tags)
    score = record.score + sum(bonus for tag, bonus in rules.tag_bonus_scores.items() if tag in present)
    if score < rules.min_score:
        return f"score with bonuses below min_score: {score:g}"
    blacklisted = next((tag for tag in tags if tag in rules.blacklist_tags), None)
    return None if blacklisted is None else f"blacklisted tag: {blacklisted}"


def judge_aspect(aspect_ratio: float, rules: TagRules) -> str | None:
    """As `judge`, for width / height alone; both ends of the range belong to it."""
    low, high = rules.aspect_range
    return None if low <= aspect_ratio <= high else f"aspect ratio outside aspect_range: {aspect_ratio:.3g}"


def write_tags(record: TagRecord) -> str:
    """The text that the index keeps for `captions.tag_folder_caption`: a JSON list of the score and the tags."""
    return json.dumps([record.score, *record.tags], ensure_ascii=False, separators=(",", ":"))


METADATA = "metadata"


class TagSource:
    """The source of tag folders; one unit per folder of JSON files.

    Hidden files and folders are left out, links are followed, and a folder that cannot be read is an error.

    Args:
        folders: roots, each with a folder `metadata`; paths in the JSON files start there.
        access: of the images.
        rules: which samples take part.
    """

    def __init__(self, folders: Sequence[str], access: Access, rules: TagRules) -> None:
        self.roots = [Path(folder) for folder in dict.fromkeys(local_folders(folders))]
        self.access, self.rules = access, rules

    @property
    def identity(self) -> str:
        return json.dumps(["tags", list(map(str, self.roots)), judged_by(self.rules)])

    def shards(self) -> list[Shard]:
        """As `Source.units`."""
        units: dict[str, Shard] = {}
        for root in self.roots:
            below = {unit.location: unit for unit in self._units_below(root)}
            if not below:
                raise DataError(f"dataset.params.path: there is no .json file below '{root / METADATA}'")
            units |= below
        return list(units.values())

    def _units_below(self, root: Path) -> Iterator[Shard]:
        """Units whose version tells which of their files are counted, because that depends on the other folders too."""
        step, num_before = self.rules.consider_every_nth or 1, 0
        for folder in folders_below(str(root / METADATA)) if exists(str(root / METADATA)) else ():
            if files := _json_files(folder):
                states = [(path.name, path.stat()) for path in files]
                lines = "".join(f"{name}\n{state.st_size} {state.st_mtime_ns}\n" for name, state in states)
                digest = hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()
                version = digest if step == 1 else f"{digest} {num_before % step} of {step}"
                yield Shard(folder, sum(state.st_size for _, state in states), version)
                num_before += len(files)

    def scan(self, unit: Shard) -> ShardScan:
        """As `Source.scan`."""
        folder, problems = Path(unit.location), Problems()
        root, columns = self._root_of(folder), SampleColumns(unit.location, problems)
        records = []
        for path in (folder / name for name in self._considered(unit)):
            record = self._judged(path, columns)
            records += [] if record is None else [(path.relative_to(root).as_posix(), record)]
        infos = measure([str(root / record.path) for _, record in records], self.access)
        pairs = zip(records, infos, strict=True)
        columns.add([s for (key, record), info in pairs if (s := self._sample(key, record, info, columns)) is not None])
        return ShardScan(columns.columns(), problems)

    def _considered(self, unit: Shard) -> list[str]:
        num_before = int((unit.version.split(" ")[1:] or ["0"])[0])
        return considered([path.name for path in _json_files(unit.location)], self.rules, num_before)

    def _root_of(self, folder: Path) -> Path:
        return next(root for root in self.roots if folder.is_relative_to(root / METADATA))

    def _judged(self, path: Path, columns: SampleColumns) -> TagRecord | None:
        try:
            record = read_tag_record(path.read_text(encoding="utf-8-sig", errors="replace"))
            reason = judge(record, self.rules)
        except ValueError as error:
            reason = str(error)
        if reason is None:
            return record
        columns.name(path.name, reason)
        return None

    def _sample(self, key: str, record: TagRecord, info: ImageInfo | None, columns: SampleColumns) -> FileSample | None:
        """Judges by the image itself where the file does not tell the aspect ratio."""
        reason = f"image missing: {record.path}" if info is None else None
        if info is not None and record.aspect_ratio is None and info.height:
            reason = judge_aspect(info.width / info.height, self.rules)
        if reason is not None or info is None:
            columns.name(key, reason or "")
            return None
        tags = write_tags(record)
        score = {"score": float(record.score)}
        return FileSample(
            key, record.path, info, caption=tags, caption_length=len(tags.encode("utf-8", "replace")), metadata=score
        )

    def reader(self, index: DatasetIndex) -> FileReader:
        roots = [str(self._root_of(Path(unit.location))) for unit in index.shards]
        return FileReader(index, self.access, roots, named_by="metadata file")


def _json_files(folder: str) -> list[os.DirEntry[str]]:
    return [entry for entry in entries_of(folder) if entry.name.lower().endswith(".json") and entry.is_file()]
