"""Images in files of their own: image folders with captions, CSV, TSV and JSON-lines tables that name image files, and
tag folders.

A file, folder entry or row that cannot be used is reported, not an error.
"""

import csv
import hashlib
import io
import json
import math
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from sd_training.config.data_schema import RemoteConfig, TagConfig
from sd_training.data.samples.captions import with_score_tag
from sd_training.data.sources import base
from sd_training.data.sources.arrow import IMAGE_COLUMNS, PATH_COLUMNS, Columns, pick_columns
from sd_training.data.sources.base import Report, Row, Shard, read_scalars
from sd_training.data.storage.files import entries_of, folders_below, open_bytes, shown
from sd_training.errors import BadSample, ConfigError, DataError

IMAGE_SUFFIXES = tuple(f".{extension}" for extension in base.IMAGE_EXTENSIONS)
_OTHER_IMAGE_SUFFIXES = (".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".jxl")
"""Images that training cannot read; they are reported."""
_PARTNERS = {"images": "captions", "img": "txt"}
"""A folder of images → the folder beside it that holds their captions."""
_SUFFIXES = (*IMAGE_SUFFIXES, *_OTHER_IMAGE_SUFFIXES, ".txt", ".json")
TABLE_EXTENSIONS = (".csv", ".tsv", ".jsonl", ".ndjson")
_MAX_CELL = 1 << 24
_ROWS_FOR_NAMES = 1_000
"""Objects of JSON lines that are searched for names of columns: not every row need have every column."""
_NOT_UTF8 = re.compile("[\ud800-\udfff]")


# --- Image folders ---


class FolderSource(base.Source):
    """The source of image folders at any depth; one shard per folder that holds images.

    The caption of `x.jpg` is `x.txt` and its metadata `x.json`: beside it, or in the partner folder, where a folder
    `images` of the path is replaced by `captions`, or `img` by `txt`. Hidden files and folders are left out. Only files
    found below `paths` are read; links are followed, each folder once.

    Args:
        paths: absolute paths of folders.
    """

    identity, shard_noun = "folder", "folder"

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(list(map(os.path.normpath, paths)), RemoteConfig())

    def image_root(self, shard: Shard) -> str:
        """As `Source.image_root`."""
        return shard.location

    def shards(self) -> list[Shard]:
        """As `Source.shards`."""
        shards: dict[str, Shard] = {}
        for root in self.paths:
            listings = {folder: files_in(folder, _SUFFIXES) for folder in folders_below(root)}
            for folder, files in listings.items():
                if folder not in shards and any(_parts(file.name)[1] in IMAGE_SUFFIXES for file in files):
                    partner = next((listings[p] for p in partner_folders(root, folder) if p in listings), [])
                    shards[folder] = folder_state(folder, [*files, *partner])
        if not shards:
            names = ", ".join(sorted(IMAGE_SUFFIXES))
            raise DataError(f"dataset.params.path: no image file ({names}) in or below {', '.join(self.paths)}")
        return list(shards.values())

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """As `Source.rows`."""
        folder, images, texts = shard.location, list[tuple[str, str, str]](), dict[str, os.DirEntry[str]]()
        root = next(root for root in self.paths if f"{folder}/".startswith(root.rstrip("/") + "/"))
        partner = next(filter(os.path.isdir, partner_folders(root, folder)), None)
        # What is beside the image wins: it comes last.
        for file in [*(files_in(partner, (".txt", ".json")) if partner else ()), *files_in(folder, _SUFFIXES)]:
            stem, suffix = _parts(file.name)
            if base.UNSTORABLE.search(file.name):
                report(file.name, "file name is not UTF-8")
            elif suffix in (".txt", ".json"):
                texts[stem + suffix] = file
            elif suffix in IMAGE_SUFFIXES:
                images.append((file.name, stem, file.name))
            else:
                report(file.name, f"image format is not read: {suffix}")
        for name, stem, columns in self.measured(shard, images, report):
            columns |= {"key": name, "caption_length": -1}
            if text := texts.get(f"{stem}.txt"):
                size = text.stat().st_size
                if size > base.MAX_TEXT_BYTES:
                    report(name, f"caption file has too many bytes: {size}")
                else:
                    columns |= {"at:caption": os.path.relpath(text.path, folder), "caption_length": size}
            if described := texts.get(f"{stem}.json"):
                columns["metadata"] = base.metadata_of(name, Path(described.path).read_bytes(), report)
            yield columns


def files_in(folder: str, suffixes: tuple[str, ...]) -> list[os.DirEntry[str]]:
    """The files of these endings in a folder, by name, without hidden ones. Raises DataError when it cannot be read."""
    return [entry for entry in entries_of(folder) if entry.name.lower().endswith(suffixes) and entry.is_file()]


def folder_state(folder: str, files: Sequence[os.DirEntry[str]]) -> Shard:
    """A folder as a shard, which changes with any of its files."""
    states = [(file.path, file.stat()) for file in files]
    lines = "".join(f"{path}\0{state.st_size}\0{state.st_mtime_ns}\n" for path, state in states)
    version = hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()
    return Shard(folder, sum(state.st_size for _, state in states), version)


def partner_folders(root: str, folder: str) -> Iterator[str]:
    """Where captions may be: `root/images/a` → `root/captions/a`; the innermost `images` first, none above the root."""
    parts = os.path.relpath(folder, root).split("/")
    for i in reversed(range(len(parts))):
        if parts[i] in _PARTNERS:
            yield os.path.join(root, *parts[:i], _PARTNERS[parts[i]], *parts[i + 1 :])


def _parts(name: str) -> tuple[str, str]:
    """Stem, and suffix in lower case."""
    stem, suffix = os.path.splitext(name)
    return stem, suffix.lower()


# --- Tables ---


class TableSource(base.Source):
    """The source of tables; one shard per table.

    A row is a sample: an image file (which paths are read: see `checked_path`), a caption, and metadata in all columns
    but the image's. Rows that cannot be used are reported by their line. A table is indexed again when it changes, not
    when only the files that it names do: after adding missing images, save or `touch` it.

    Args:
        paths: tables: absolute paths and URLs.
        access: how remote files are read.
        wanted: columns; that of the image has paths.
    """

    shard_noun = "table"

    def __init__(self, paths: Sequence[str], access: RemoteConfig, wanted: Columns = (None, None)) -> None:
        super().__init__(paths, access)
        self.wanted, self.identity = wanted, json.dumps(["table with paths by ..", *wanted])

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """As `Source.rows`."""
        name, root, seen = shown(shard.location), self.image_root(shard), set[str]()
        with closing(open_bytes(shard.location, self.access)) as file:
            names, rows = _read_table(name, file.stream)
            image, caption = pick_columns(name, names, PATH_COLUMNS + IMAGE_COLUMNS, self.wanted)

            def with_image() -> Iterator[tuple[str, Mapping[str, Any], str]]:
                number = 0
                for number, values in rows:
                    try:
                        if isinstance(values, str):
                            raise BadSample(values)
                        path = values.get(image)
                        if not isinstance(path, str):
                            raise BadSample(f"image is no path: {type(path).__name__}")
                        yield f"line {number}", values, base.checked_path(root, path.strip())
                    except BadSample as error:
                        report(f"line {number}", str(error))
                    except DataError as error:
                        raise DataError(f"line {number}: {error}") from error
                if not number:
                    report("", "table has no rows")

            for line, values, columns in self.measured(shard, with_image(), report):
                text, path = base.caption_of(values.get(caption)), columns["at:image"]
                cells = {key: value for key, value in values.items() if key != image and key and value != ""}
                key = f"{path} {line}" if path in seen else path  # named again, for example with another caption
                seen.add(path)
                yield {**columns, "key": key, "metadata": read_scalars(cells), "caption": text}


_TableRows = Iterator[tuple[int, Mapping[str, Any] | str]]
"""First line of a row, counted from 1, and column → value (texts in CSV and TSV), or why there are no values."""


def _read_table(name: str, file: BinaryIO) -> tuple[list[str], _TableRows]:
    """The columns of a table and its rows, which are read lazily.

    Args:
        name: path or URL, which gives the format and is used in messages.
        file: its content.

    Raises:
        DataError: the format is not known, or the header cannot be read.
    """
    extension = PurePosixPath(name.partition("?")[0] if "://" in name else name).suffix.lower()
    if extension not in TABLE_EXTENSIONS:
        raise DataError(f"{name}: is not a table; {', '.join(TABLE_EXTENSIONS)} files are read")
    is_json = extension not in (".csv", ".tsv")
    # Bytes that are not UTF-8 become surrogates, by which their rows are found.
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="\n" if is_json else "")
    if not is_json:
        return _delimited(name, text, "\t" if extension == ".tsv" else ",")
    rows = ((number, _json_row(line)) for number, line in enumerate(text, 1) if line.strip())
    first = list(islice(rows, _ROWS_FOR_NAMES))
    names = dict.fromkeys(column for _, row in first if not isinstance(row, str) for column in row)
    return list(names), chain(first, rows)


def _json_row(text: str) -> Mapping[str, Any] | str:
    if _NOT_UTF8.search(text):
        return "row is not UTF-8 text"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"row is malformed: {error}"
    return values if isinstance(values, dict) else "row is no JSON object"


def _delimited(name: str, text: Iterable[str], delimiter: str) -> tuple[list[str], _TableRows]:
    csv.field_size_limit(_MAX_CELL)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{name}: is not a table ({error})") from error
    if any(map(_NOT_UTF8.search, names)):
        raise DataError(f"{name}: is not UTF-8 text; save it as UTF-8")
    if twice := [column for column, count in Counter(names).items() if column and count > 1]:
        raise DataError(f"{name}: has two columns named '{twice[0]}'; rename one")

    def rows() -> _TableRows:
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                # A quote that is not closed takes all lines up to the next quote with it.
                yield from ((lost, f"row is malformed: {error}") for lost in range(line, reader.line_num + 1))
                continue
            if cells and len(cells) != len(names):
                yield line, f"row has {len(cells)} cells where the header has {len(names)}"
            elif any(map(_NOT_UTF8.search, cells)):
                yield line, "row is not UTF-8 text"
            elif cells:
                yield line, dict(zip(names, cells, strict=True))

    return names, rows()


# --- Tag folders ---

METADATA = "metadata"
_SALT = (1).to_bytes(8, "little")
"""Of the choice of `limit_images`."""
_MAX_SCORE = 2**53
_MAX_ASPECT = 1e9
_FILTER_OPTIONS = {"score_tags", "abs_min_score", "min_score", "tag_bonus_scores", "blacklist_tags", "aspect_range"}
"""What `rejection_reason` depends on: files are filtered again when one of them changes."""


def _inside(path: str) -> str:
    path = posixpath.normpath(path)
    if "\0" in path or posixpath.isabs(path) or path.split("/")[0] in (".", ".."):
        raise ValueError("leads out of the data set")
    return path


class TagRecord(BaseModel, strict=True, allow_inf_nan=False):
    """One metadata file; other keys are ignored."""

    path: Annotated[str, AfterValidator(_inside)]
    """Of the image, relative to the root of the data set; never leads out of it."""
    score: Annotated[float, Field(multiple_of=1, ge=-_MAX_SCORE, le=_MAX_SCORE), AfterValidator(int)]
    """A whole number, which may be written as `7.0`."""
    tags: list[str]
    aspect_ratio: Annotated[float, Field(gt=0, lt=_MAX_ASPECT)] | None = None
    """Width / height; None when the file does not give it."""


class TagSource(base.Source):
    """The source of tag folders as LunNova's trainer reads them: `metadata/**.json` name an image, its score and its
    tags. One shard per folder of JSON files.

    Hidden files and folders are left out, links are followed, and a folder that cannot be read is an error.

    Names, meanings and order of operations are those of LunNova's `lun.data.local.Local`. A file is filtered once, when
    the index is made: aspect ratio, own score, score tag, bonus scores, blacklist. A caption is made at each read:
    score tag, tags left out, shuffled or sorted, replacements, separators. What differs there, on purpose:

    - `aspect_range` counts; the original reads it and uses 0.71..1.42 always.
    - Prefixes in `non_caption_tag_prefixes` count alone; the original ignores them unless `non_caption_tags` is given.
    - Shuffling is drawn each time a sample is read; the original draws it once, when the data set is set up.
    - Files are counted folder by folder, by name (`consider_every_nth`); the original takes the order of the disk.
    - `caption_sorter` is a word, and there is no `custom_filter`: both name code to run.

    A score tag is given from its threshold on (score >= threshold), as the original's code does; its description
    says >.

    Args:
        folders: absolute paths of roots, each with a folder `metadata`; paths in the JSON files start there.
        rules: which samples take part.

    Raises:
        ConfigError: `aspect_range` is none.
    """

    shard_noun = "folder"

    def __init__(self, folders: Sequence[str], rules: TagConfig) -> None:
        super().__init__(list(dict.fromkeys(map(os.path.normpath, folders))), RemoteConfig())
        sides = rules.aspect_range
        if len(sides) != 2 or not 0 < sides[0] <= sides[1] < math.inf:
            raise ConfigError(
                f"dataset.params.tags.aspect_range: {sides} must be [lowest, highest] width / height, such as "
                "[0.71, 1.42]"
            )
        self.rules = rules
        self.identity = json.dumps(["tags", self.paths, json.dumps(rules.model_dump(include=_FILTER_OPTIONS))])

    def image_root(self, shard: Shard) -> str:
        """As `Source.image_root`."""
        return next(root for root in self.paths if Path(shard.location).is_relative_to(f"{root}/{METADATA}"))

    def shards(self) -> list[Shard]:
        """As `Source.shards`."""
        shards, step = dict[str, Shard](), self.rules.consider_every_nth or 1
        for metadata in (f"{root}/{METADATA}" for root in self.paths):
            num_before = 0
            for folder in folders_below(metadata) if os.path.exists(metadata) else ():
                if files := files_in(folder, (".json",)):
                    # Which files are counted (`consider_every_nth`) depends on the other folders too.
                    state = folder_state(folder, files)
                    shards[folder] = state._replace(version=f"{state.version} {num_before % step} of {step}")
                    num_before += len(files)
            if not num_before:
                raise DataError(f"dataset.params.path: there is no .json file below '{metadata}'")
        return list(shards.values())

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """As `Source.rows`."""
        names = [file.name for file in files_in(shard.location, (".json",))]

        def candidates() -> Iterator[tuple[str, TagRecord, str]]:
            for name in every_nth(names, self.rules, int(shard.version.split(" ")[1])):
                path = Path(shard.location, name)
                try:
                    record = read_tag_record(path.read_text(encoding="utf-8-sig", errors="replace"))
                    if (reason := rejection_reason(record, self.rules)) is not None:
                        raise ValueError(reason)
                    yield os.path.relpath(path, self.image_root(shard)), record, record.path
                except ValueError as error:
                    report(name, str(error))

        for key, record, columns in self.measured(shard, candidates(), report):
            if record.aspect_ratio is None and columns["height"]:
                record.aspect_ratio = columns["width"] / columns["height"]
            if (reason := rejection_reason(record, self.rules)) is not None:
                report(key, reason)
            else:
                yield {**columns, "key": key, "metadata": {"score": float(record.score)}, "caption": write_tags(record)}


def every_nth(names: Sequence[str], rules: TagConfig, num_before: int = 0) -> list[str]:
    """Which `names` of a folder are files 0, n, 2n, … (`consider_every_nth`); `num_before` are in earlier folders."""
    step = rules.consider_every_nth or 1
    return sorted(names)[-num_before % step :: step]


def limited(keys: Sequence[str], limit: int) -> NDArray[np.int64]:
    """A fixed random choice of `limit` samples (`limit_images`), as ascending places in `keys`; the same in every run,
    whatever `experiment.seed` is.

    Each key has a place of its own in the draw: the choice depends neither on the order of the keys nor, but for the
    samples pushed out, on samples that were added; and a smaller choice is part of a larger one.
    """
    hashes = (hashlib.blake2b(k.encode("utf-8", "surrogatepass"), digest_size=8, salt=_SALT).digest() for k in keys)
    return np.sort(np.argsort(np.frombuffer(b"".join(hashes), dtype=">u8"), kind="stable")[:limit])


def read_tag_record(text: str) -> TagRecord:
    """Reads a metadata file. Raises ValueError: the reason why it cannot be used."""
    try:
        return TagRecord.model_validate_json(text.encode("utf-8", "surrogatepass"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise ValueError(f"metadata {where}: {first['msg']}") from error


def rejection_reason(record: TagRecord, rules: TagConfig) -> str | None:
    """Why the picture is not used, or None when it is; reasons are counted by their part before the colon.

    An `aspect_ratio` of None is not checked; both ends of the range belong to it.
    """
    (low, high), aspect_ratio = rules.aspect_range, record.aspect_ratio
    if aspect_ratio is not None and not low <= aspect_ratio <= high:
        return f"aspect ratio outside aspect_range: {aspect_ratio:.3g}"
    if record.score < rules.abs_min_score:
        return f"score below abs_min_score: {record.score}"
    tags = with_score_tag(record.tags, int(record.score), rules.score_tags)
    score = record.score + sum(bonus for tag, bonus in (rules.tag_bonus_scores or {}).items() if tag in tags)
    if score < rules.min_score:
        return f"score with bonuses below min_score: {score:g}"
    blacklisted = next((tag for tag in tags if tag in (rules.blacklist_tags or ())), None)
    return None if blacklisted is None else f"blacklisted tag: {blacklisted}"


def write_tags(record: TagRecord) -> str:
    """The text that the index keeps for `captions.tag_folder_caption`: a JSON list of the score and the tags."""
    return json.dumps([record.score, *record.tags], ensure_ascii=False, separators=(",", ":"))
