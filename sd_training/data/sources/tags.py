"""Tag folders as LunNova's trainer reads them: `metadata/**.json` name an image, its score and its tags.

Names, meanings and order of operations are those of LunNova's `lun.data.local.Local`. A file is filtered once, when the
index is made: aspect ratio, own score, score tag, bonus scores, blacklist. A caption is made at each read: score
tag, tags left out, shuffled or sorted, replacements, separators. What differs there, on purpose:

- `aspect_range` counts; the original reads it and uses 0.71..1.42 always.
- Prefixes in `non_caption_tag_prefixes` count alone; the original ignores them unless `non_caption_tags` is given.
- Shuffling is drawn each time a sample is read; the original draws it once, when the data set is set up.
- Files are counted folder by folder, by name (`consider_every_nth`); the original takes the order of the disk.
- `caption_sorter` is a word, and there is no `custom_filter`: both name code to run.

A score tag is given from its threshold on (score >= threshold), as the original's code does; its description says >.
"""

import hashlib
import json
import math
import os
import posixpath
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from sd_training.config.data_schema import TagConfig
from sd_training.data.samples.captions import with_score_tag
from sd_training.data.sources.base import Report, Row, Shard
from sd_training.data.sources.files import FileSource
from sd_training.data.storage.byte_file import Access
from sd_training.data.storage.locations import entries_of, folders_below
from sd_training.errors import ConfigError, DataError

METADATA = "metadata"
LIMIT_SEED = 1
"""Of the choice of `limit_images`: the same in every run, whatever `experiment.seed` is."""
_MAX_SCORE = 2**53
_MAX_ASPECT = 1e9
_FILTER_OPTIONS = ("score_tags", "abs_min_score", "min_score", "tag_bonus_scores", "blacklist_tags", "aspect_range")


class TagRecord(NamedTuple):
    """One metadata file."""

    path: str
    """Of the image, relative to the root of the data set; never leads out of it."""
    aspect_ratio: float | None
    """Width / height; None when the file does not give it."""
    score: int
    tags: list[str]


class TagSource(FileSource):
    """The source of tag folders; one shard per folder of JSON files.

    Hidden files and folders are left out, links are followed, and a folder that cannot be read is an error.

    Args:
        folders: absolute paths of roots, each with a folder `metadata`; paths in the JSON files start there.
        rules: which samples take part.

    Raises:
        ConfigError: `aspect_range` is none.
    """

    def __init__(self, folders: Sequence[str], rules: TagConfig) -> None:
        super().__init__(Access())
        self.roots = list(dict.fromkeys(map(Path, folders)))
        sides = rules.aspect_range
        if len(sides) != 2 or not 0 < sides[0] <= sides[1] < math.inf:
            raise ConfigError(
                f"dataset.params.tags.aspect_range: {sides} must be [lowest, highest] width / height, such as "
                "[0.71, 1.42]"
            )
        self.rules = rules

    @property
    def identity(self) -> str:
        return json.dumps(["tags", list(map(str, self.roots)), rules_identity(self.rules)])

    def image_root(self, shard: Shard) -> str:
        """As `FileSource.image_root`."""
        return str(next(root for root in self.roots if Path(shard.location).is_relative_to(root / METADATA)))

    def shards(self) -> list[Shard]:
        """As `Source.shards`."""
        shards, step = dict[str, Shard](), self.rules.consider_every_nth or 1
        for metadata in (str(root / METADATA) for root in self.roots):
            num_before = 0
            for folder in folders_below(metadata) if os.path.exists(metadata) else ():
                if files := _json_files(folder):
                    states = [(file.name, file.stat()) for file in files]
                    lines = "".join(f"{name}\n{state.st_size} {state.st_mtime_ns}\n" for name, state in states)
                    version = hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()
                    if step > 1:  # which files are counted (`consider_every_nth`) depends on the other folders too
                        version = f"{version} {num_before % step} of {step}"
                    shards[folder] = Shard(folder, sum(state.st_size for _, state in states), version)
                    num_before += len(files)
            if not num_before:
                raise DataError(f"dataset.params.path: there is no .json file below '{metadata}'")
        return list(shards.values())

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """As `FileSource.rows`."""
        root, num_before = Path(self.image_root(shard)), int((shard.version.split(" ")[1:] or ["0"])[0])
        names = every_nth([file.name for file in _json_files(shard.location)], self.rules, num_before)

        def candidates() -> Iterator[tuple[str, TagRecord, str]]:
            for path in (Path(shard.location, name) for name in names):
                try:
                    record = read_tag_record(path.read_text(encoding="utf-8-sig", errors="replace"))
                    if (reason := rejection_reason(record, self.rules)) is not None:
                        raise ValueError(reason)
                    yield path.relative_to(root).as_posix(), record, record.path
                except ValueError as error:
                    report(path.name, str(error))

        for key, record, path, info in self.measured(shard, candidates(), report):
            reason = None
            if record.aspect_ratio is None and info.height:
                reason = aspect_rejection(info.width / info.height, self.rules)
            if reason is not None:
                report(key, reason)
            else:
                yield Row(key, info, {"score": float(record.score)}, path, caption=write_tags(record))


def _json_files(folder: str) -> list[os.DirEntry[str]]:
    return [entry for entry in entries_of(folder) if entry.name.lower().endswith(".json") and entry.is_file()]


def rules_identity(rules: TagConfig) -> str:
    """The rules that `rejection_reason` depends on, as text: files are filtered anew when it changes."""
    return json.dumps({name: value for name, value in rules.model_dump().items() if name in _FILTER_OPTIONS})


def every_nth(names: Sequence[str], rules: TagConfig, num_before: int = 0) -> list[str]:
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


class _MetadataFile(BaseModel, strict=True, allow_inf_nan=False):
    """Other keys are ignored."""

    path: str
    score: Annotated[float, Field(multiple_of=1, ge=-_MAX_SCORE, le=_MAX_SCORE)]
    tags: list[str]
    aspect_ratio: Annotated[float, Field(gt=0, lt=_MAX_ASPECT)] | None = None


def read_tag_record(text: str) -> TagRecord:
    """Reads a metadata file. Raises ValueError: the reason why it cannot be used."""
    try:
        read = _MetadataFile.model_validate_json(text.encode("utf-8", "surrogatepass"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise ValueError(f"metadata {where}: {first['msg']}") from error
    path = posixpath.normpath(read.path)
    if "\0" in path or posixpath.isabs(path) or path.split("/")[0] in (".", ".."):
        raise ValueError("metadata path: leads out of the data set")
    return TagRecord(path, read.aspect_ratio, int(read.score), read.tags)


def rejection_reason(record: TagRecord, rules: TagConfig) -> str | None:
    """Why the picture is not used, or None when it is; reasons are counted by their part before the colon.

    An `aspect_ratio` of None is not checked: call `aspect_rejection` when the picture's size is known.
    """
    if record.aspect_ratio is not None and (reason := aspect_rejection(record.aspect_ratio, rules)):
        return reason
    if record.score < rules.abs_min_score:
        return f"score below abs_min_score: {record.score}"
    tags = with_score_tag(record.tags, record.score, rules.score_tags)
    score = record.score + sum(bonus for tag, bonus in (rules.tag_bonus_scores or {}).items() if tag in tags)
    if score < rules.min_score:
        return f"score with bonuses below min_score: {score:g}"
    blacklisted = next((tag for tag in tags if tag in (rules.blacklist_tags or ())), None)
    return None if blacklisted is None else f"blacklisted tag: {blacklisted}"


def aspect_rejection(aspect_ratio: float, rules: TagConfig) -> str | None:
    """As `rejection_reason`, for width / height alone; both ends of the range belong to it."""
    low, high = rules.aspect_range
    return None if low <= aspect_ratio <= high else f"aspect ratio outside aspect_range: {aspect_ratio:.3g}"


def write_tags(record: TagRecord) -> str:
    """The text that the index keeps for `captions.tag_folder_caption`: a JSON list of the score and the tags."""
    return json.dumps([record.score, *record.tags], ensure_ascii=False, separators=(",", ":"))
