"""Loose samples → numbered WebDataset shards, written by several threads, each shard whole or absent.

Samples that are not in shards yet: a folder of images with captions beside them, a CSV or TSV table, Parquet.
"""

import io
import json
import math
import os
import random
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import Image
from pyarrow import ArrowException
from webdataset import TarWriter

from sd_training.data.problems import BadSample, SkippedSample
from sd_training.data.samples.image import FORMATS, ImageRules, decode
from sd_training.data.sources.arrow_cells import IMAGE_COLUMNS, PATH_COLUMNS, ColumnOptions, Columns, pick_columns
from sd_training.data.sources.files import tidy
from sd_training.data.sources.folder import partner_folders
from sd_training.data.sources.table import TableRow, read_table
from sd_training.data.storage.locations import entries_of, folders_below
from sd_training.errors import DataError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
"""Files of a folder that are meant as samples; those that training cannot read are named as skipped."""
_OPTIONS = ColumnOptions("--image-column", "--caption-column")


@dataclass(frozen=True)
class LooseSample:
    """Where the parts of one sample are."""

    name: str
    """What a report calls it: its path in the folder, or table and line."""
    image: Path | bytes | None
    """A file, or the content of one."""
    caption: Path | str | None
    """A text file, or the text."""
    metadata: Path | dict[str, Any]
    """A JSON file that may be missing, or the other columns."""
    problem: str | None = None
    """Why it cannot be used, when that is known already."""


@dataclass(frozen=True)
class LooseSource:
    """All samples of an input."""

    count: int
    samples: Iterator[LooseSample]
    """`count` samples in a fixed order."""


def open_source(path: Path, columns: Columns, shuffle_seed: int | None = None) -> LooseSource:
    """Finds the samples of a folder, CSV, TSV or Parquet file, or a folder of Parquet files.

    Args:
        path: what to read.
        columns: of a table.
        shuffle_seed: None keeps the order of the files' names and rows. Otherwise a fixed random order; Parquet is
            shuffled by row groups and inside each, so that no more than one of them is in memory.

    Raises:
        DataError: missing or unreadable input, or no samples in it.
        ConfigError: a table does not have the columns.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    chance = None if shuffle_seed is None else random.Random(shuffle_seed)
    if path.is_dir() and (files := sorted(path.rglob("*.parquet"))):
        source = _parquet(files, columns, chance)
    elif path.suffix.lower() == ".parquet":
        source = _parquet([path], columns, chance)
    elif path.is_dir() or path.suffix.lower() in {".csv", ".tsv"}:
        found = _folder(path) if path.is_dir() else _table(path, columns)
        if chance is not None:
            chance.shuffle(found)
        source = LooseSource(len(found), iter(found))
    else:
        raise DataError(f"{path}: is not a folder, .csv, .tsv or .parquet file")
    if not source.count:
        raise DataError(f"{path}: has no samples" + (", no image files below it" if path.is_dir() else ""))
    return source


def _folder(folder: Path) -> list[LooseSample]:
    """As `FolderSource` finds them: without hidden files, through links, described beside or in a partner folder."""
    root, found = str(folder), list[LooseSample]()
    for below in folders_below(root):
        partner = next(filter(os.path.isdir, partner_folders(root, below)), None)
        described: dict[str, Path] = {}
        for entry in [*(entries_of(partner) if partner else ()), *entries_of(below)]:  # beside wins
            stem, suffix = os.path.splitext(entry.name)
            described[stem + suffix.lower()] = Path(entry.path)
        for entry in entries_of(below):
            stem, suffix = os.path.splitext(entry.name)
            if suffix.lower() in IMAGE_SUFFIXES and entry.is_file():
                image = Path(entry.path)
                caption, metadata = (described.get(stem + end, image.with_suffix(end)) for end in (".txt", ".json"))
                found.append(LooseSample(image.relative_to(folder).as_posix(), image, caption, metadata))
    return sorted(found, key=lambda sample: sample.name)


def _pick_both(path: Path, names: Sequence[str], columns: Columns, image_names: Sequence[str]) -> tuple[str, str]:
    return pick_columns(str(path), names, columns, image_names, _OPTIONS)


def _number(cell: str) -> str | int | float:
    """A CSV cell as a number when it is one, so that filters can compare it; "007" stays text."""
    plain = cell.lstrip("-")
    if plain.isascii() and plain.isdigit() and len(cell) - len(plain) <= 1:
        return cell if len(plain) > 1 and plain.startswith("0") else int(cell)
    try:
        return float(cell) if "." in cell and "_" not in cell else cell
    except ValueError:
        return cell


def _table(path: Path, columns: Columns) -> list[LooseSample]:
    try:
        with path.open("rb") as file:
            table = read_table(str(path), file)
            image, caption = _pick_both(path, table.names, columns, PATH_COLUMNS + IMAGE_COLUMNS)
            return [_from_table_row(path, row, image, caption) for row in table.rows]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _from_table_row(path: Path, row: TableRow, image: str, caption: str) -> LooseSample:
    name = f"{path.name} line {row.line}"
    if row.problem:
        return LooseSample(name, None, None, {}, row.problem)
    cells = dict(row.values)
    text = cells.pop(caption)
    return _from_row(name, path.parent, cells.pop(image), text, {k: _number(v) for k, v in cells.items() if v != ""})


def _from_row(name: str, base: Path, image: Any, caption: Any, metadata: dict[str, Any]) -> LooseSample:
    """A table's row; an image cell is bytes, a path relative to the table, or a struct of both."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    problem = None
    if isinstance(image, str) and "://" in image:
        problem = f"image is a URL: download it first, {image}"
    elif not isinstance(image, (str, bytes)) or not image:
        problem = "image cell is empty"
    elif not isinstance(caption, str):
        problem = f"caption is no text: {type(caption).__name__}"
    if problem is not None:
        return LooseSample(name, None, None, {}, problem)
    return LooseSample(name, image if isinstance(image, bytes) else base / image, caption, metadata)


def _parquet(files: Sequence[Path], columns: Columns, chance: random.Random | None) -> LooseSource:
    groups: list[tuple[Path, int]] = []
    count = 0
    try:
        for path in files:
            with pq.ParquetFile(path) as table:
                _pick_both(path, table.schema_arrow.names, columns, IMAGE_COLUMNS + PATH_COLUMNS)
                groups += [(path, group) for group in range(table.num_row_groups)]
                count += table.metadata.num_rows
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: is not a readable Parquet file ({error})") from error
    if chance is not None:
        chance.shuffle(groups)
    return LooseSource(count, _parquet_rows(groups, columns, chance))


def _parquet_rows(
    groups: Sequence[tuple[Path, int]], columns: Columns, chance: random.Random | None
) -> Iterator[LooseSample]:
    """Rows of one row group after the other. Raises DataError when one cannot be read."""
    for path, group in groups:
        try:
            with pq.ParquetFile(path) as table:
                image, caption = _pick_both(path, table.schema_arrow.names, columns, IMAGE_COLUMNS + PATH_COLUMNS)
                rows = table.read_row_group(group)
        except (OSError, ArrowException) as error:
            raise DataError(f"{path}: row group {group} cannot be read ({error})") from error
        order = list(range(rows.num_rows))
        if chance is not None:
            chance.shuffle(order)
        for i in order:
            row = {name: rows.column(name)[i].as_py() for name in rows.column_names}
            name = f"{path.name} group {group} row {i}"
            text = row.pop(caption)
            yield _from_row(name, path.parent, row.pop(image), text, row)


_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
_MAX_PIXELS = 178_956_970
_QUALITY = 95


@dataclass
class ShardReport:
    """What became of the samples of one shard."""

    shard: str
    written: int = 0
    skipped: list[SkippedSample] = field(default_factory=list)


def encode_sample(sample: LooseSample, resize: int | None) -> dict[str, Any]:
    """The members of one sample by extension: image, `txt` and `json`.

    The image's bytes are kept as they are. With `resize` an image whose short side is longer is made smaller, upright
    and RGB, in its own format. The metadata get `original_width` and `original_height` [pixels, upright] unless they
    have them.

    Raises:
        BadSample: a part is missing or damaged; the message is the reason.
    """
    if sample.problem is not None or sample.image is None:
        raise BadSample(sample.problem or "image is missing")
    data = sample.image if isinstance(sample.image, bytes) else _read(sample.image, "image")
    caption, metadata = _caption(sample.caption), _metadata(sample.metadata)
    image = Image.fromarray(decode(data, ImageRules(_MAX_PIXELS)).pixels)
    kind = str(Image.open(io.BytesIO(data), formats=FORMATS).format)
    metadata = {"original_width": image.width, "original_height": image.height, **metadata}
    if resize is not None and min(image.size) > resize:
        data = _smaller(image, resize, kind)
    text = json.dumps(_plain(metadata), ensure_ascii=False, allow_nan=False)
    return {_EXTENSIONS[kind]: data, "txt": caption.encode(), "json": text.encode()}


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise BadSample(f"{what} is missing: {path.name}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadSample(f"{what} cannot be read: {path.name}, {error}") from error


def _caption(caption: Path | str | None) -> str:
    """As training on the files themselves takes it: an empty text file is the empty caption, an empty cell is none."""
    try:
        if isinstance(caption, Path):
            return tidy(_read(caption, "caption").decode("utf-8-sig"))
        text = (caption or "").strip()
        text.encode()  # a lone surrogate from a table would fail later
    except UnicodeError:
        raise BadSample("caption is not UTF-8 text") from None
    if not text:
        raise BadSample("caption is empty")
    return text


def _metadata(metadata: Path | dict[str, Any]) -> dict[str, Any]:
    if isinstance(metadata, dict):
        return metadata
    if not metadata.exists():
        return {}
    try:
        value = json.loads(_read(metadata, "metadata"))
    except (ValueError, RecursionError):
        raise BadSample("metadata is not JSON") from None
    if not isinstance(value, dict):
        raise BadSample("metadata is not a JSON object")
    return value


def _plain(value: Any) -> Any:
    """JSON can hold it: bytes are left out, what is not a number becomes null, dates and decimals become text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if not isinstance(v, (bytes, bytearray))}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value if not isinstance(v, (bytes, bytearray))]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _smaller(image: Image.Image, short_side: int, kind: str) -> bytes:
    scale = short_side / min(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    stream = io.BytesIO()
    image.resize(size, Image.Resampling.LANCZOS).save(stream, format=kind, quality=_QUALITY)
    return stream.getvalue()


def write_shard(path: Path, samples: Sequence[tuple[int, LooseSample]], resize: int | None) -> ShardReport:
    """Writes one tar of (number, sample) pairs; keys are the numbers, so they are unique over all shards.

    The file appears under its name when it is complete; a shard without a usable sample is not written. The same
    samples give the same bytes.
    """
    report = ShardReport(path.name)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as stream:
        with TarWriter(stream, mtime=0) as sink:
            for number, sample in samples:
                try:
                    members = encode_sample(sample, resize)
                except BadSample as error:
                    report.skipped.append(SkippedSample(path.name, sample.name, str(error)))
                    continue
                sink.write({"__key__": f"{number:09d}", **members})
                report.written += 1
        stream.flush()
        os.fsync(stream.fileno())
    if report.written:
        os.replace(partial, path)
    else:
        partial.unlink()
    return report


def write_shards(
    folder: Path, samples: Iterator[LooseSample], *, per_shard: int, workers: int, resize: int | None
) -> Iterator[ShardReport]:
    """Writes `folder/00000.tar`, `00001.tar`, ... of `per_shard` samples each, and reports them in order.

    Which sample goes where does not depend on `workers`. The samples of at most `workers` + 1 shards are in memory.
    """
    numbered = enumerate(samples)
    with ThreadPoolExecutor(workers) as pool:
        running: deque[Future[ShardReport]] = deque()
        for shard, chunk in enumerate(iter(lambda: list(islice(numbered, per_shard)), [])):
            if len(running) >= workers:
                yield running.popleft().result()
            running.append(pool.submit(write_shard, folder / f"{shard:05d}.tar", chunk, resize))
        while running:
            yield running.popleft().result()
