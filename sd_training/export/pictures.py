"""Caption tables, safe file names, grids, and a folder of drawn pictures that can be completed later: every PNG carries
the record of how it was made.
"""

import csv
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image, PngImagePlugin

from sd_training.checkpoint.atomic_io import replace_text
from sd_training.errors import DataError

_SAFE_IN_NAMES = " !#$&'()+,;=@[]^{}"
_MAX_NAME_BYTES = 200


def picture_grid(images: Sequence[Image.Image], columns: int) -> Image.Image:
    """Pastes pictures row by row into one RGB picture.

    Args:
        images: at least one; a cell is as large as the largest of them, smaller ones sit in its top left corner.
        columns: cells per row; the last row may stay partly black.
    """
    columns = min(columns, len(images))
    width, height = max(i.width for i in images), max(i.height for i in images)
    rows = -(-len(images) // columns)
    grid = Image.new("RGB", (columns * width, rows * height))
    for cell, image in enumerate(images):
        grid.paste(image.convert("RGB"), (cell % columns * width, cell // columns * height))
    return grid


def file_stem(uid: str) -> str:
    """`uid` as one safe file name without extension: "a/b" becomes "a%2Fb"; different uids stay different.

    Raises:
        DataError: the uid is empty or longer than 200 bytes when written safely.
    """
    stem = quote(uid, safe=_SAFE_IN_NAMES)
    if not stem.strip() or len(stem) > _MAX_NAME_BYTES:
        raise DataError(f"uid {uid[:60]!r} cannot be a file name: use 1 to {_MAX_NAME_BYTES} letters or digits")
    return "%2E" + stem[1:] if stem.startswith(".") else stem


def read_captions(
    path: Path, *, caption_columns: Sequence[str] = ("caption",), needs_uid: bool = True
) -> list[tuple[str, str]]:
    """Reads a CSV file with a header into (file stem, caption) pairs, in the order of the file.

    Args:
        path: UTF-8, comma-separated; column names in any case, further columns are ignored.
        caption_columns: names of the caption column, the first one present is used.
        needs_uid: False numbers the rows 000000, 000001, ... where there is no column `uid`.

    Returns:
        Pairs whose first part is the uid made safe by `file_stem`.

    Raises:
        DataError: unreadable file, a missing column, a row of another length, a uid twice or unusable as a name.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, strict=True)
            header = [name.strip().lower() for name in next(reader, [])]
            rows = [(f"{path}, line {reader.line_num}", cells) for cells in reader if cells]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a CSV file in UTF-8 ({error})") from error
    caption = next((name for name in caption_columns if name in header), None)
    if caption is None or (needs_uid and "uid" not in header):
        wanted = " and ".join((["uid"] if needs_uid else []) + [" or ".join(caption_columns)])
        raise DataError(f"{path}: the first line must name the columns {wanted}; it has {', '.join(header) or 'none'}")
    pairs: dict[str, str] = {}
    for where, cells in rows:
        if len(cells) != len(header):
            raise DataError(
                f"{where}: {len(cells)} cells where the header has {len(header)}; put text with commas in double quotes"
            )
        row = dict(zip(header, cells, strict=True))
        try:
            stem = file_stem(row["uid"]) if "uid" in row else f"{len(pairs):06d}"
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        if stem in pairs:
            raise DataError(f"{where}: uid {row['uid']!r} appears twice; uids name files")
        pairs[stem] = row[caption]
    return list(pairs.items())


_RECORD_KEY = "sd_training"
_GRID_PICTURES = 100
_GRID_CELL = 256


@dataclass(frozen=True)
class Picture:
    """One line of `metadata.jsonl`: everything that decides how a picture looks."""

    file: str
    """Name in the folder."""
    prompt: str
    """Text it is drawn from."""
    seed: int
    """Seed of its noise."""
    scheduler: str
    """Class name of the sampler."""
    guidance: float
    """Classifier-free guidance scale, 1 is off."""
    steps: int
    """Denoising steps."""
    height: int | None
    """[pixels]; None is the pipeline's own."""
    width: int | None
    """[pixels]; None is the pipeline's own."""
    dtype: str
    """Type of the weights."""
    weights: str
    """Fingerprint of the pipeline."""


def save_picture(folder: Path, picture: Picture, image: Image.Image) -> None:
    """Writes the PNG with its record; under its name there is a whole file or none."""
    info = PngImagePlugin.PngInfo()
    info.add_itxt(_RECORD_KEY, json.dumps(asdict(picture)))
    partial = folder / f".{picture.file}.partial"  # a fixed name: an interrupted one is overwritten next time
    image.save(partial, format="PNG", pnginfo=info)
    os.replace(partial, folder / picture.file)


def is_drawn(folder: Path, picture: Picture) -> bool:
    """Whether the folder has this very picture. A damaged file counts as missing.

    Raises:
        DataError: a whole picture with this name was made in another way; it is not overwritten.
    """
    path = folder / picture.file
    if not path.exists():
        return False
    record, wanted = _read_record(path), asdict(picture)
    if record is None or record == wanted:
        return record is not None
    changed = [key for key in wanted if record.get(key) != wanted[key]]
    differs = "; ".join(f"{key} {record.get(key)!r} instead of {wanted[key]!r}" for key in changed)
    raise DataError(f"{path}: is there already, made with {differs}. Choose another --out, or remove it")


def _read_record(path: Path) -> dict[str, Any] | None:
    """The record in a whole PNG, {} for a picture of unknown origin, None for a damaged file."""
    try:
        with Image.open(path) as image:
            text = image.info.get(_RECORD_KEY, "{}")
            image.verify()
        record = json.loads(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else {}


def finish_folder(folder: Path, pictures: Sequence[Picture], columns: int | None = None) -> int:
    """Writes `metadata.jsonl` (a line for each picture in the folder, those of this call first) and `grid.png`.

    Args:
        folder: where the pictures are.
        pictures: of this call, in order; missing ones are skipped.
        columns: of the grid; None makes it square. It shows the first 100 pictures, each at most 256 pixels large.

    Returns:
        How many of `pictures` exist.
    """
    records = {path.name: record for path in sorted(folder.glob("*.png")) if (record := _read_record(path))}
    there = [picture for picture in pictures if records.get(picture.file) == asdict(picture)]
    lines = {picture.file: asdict(picture) for picture in there} | records
    replace_text(
        folder / "metadata.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines.values())
    )
    if there:
        shown = there[:_GRID_PICTURES]
        grid = picture_grid([_thumbnail(folder / p.file) for p in shown], columns or max(1, round(len(shown) ** 0.5)))
        grid.save(folder / ".grid.png.partial", format="PNG")
        os.replace(folder / ".grid.png.partial", folder / "grid.png")
    return len(there)


def _thumbnail(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.thumbnail((_GRID_CELL, _GRID_CELL))
        return image.copy()
