"""Caption tables, grids, and a folder of drawn pictures that can be completed later."""

import csv
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image

from sd_training.checkpoint.folder import replace_text
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


def read_captions(
    path: Path, *, caption_columns: Sequence[str] = ("caption",), needs_uid: bool = True
) -> list[tuple[str, str]]:
    """Reads a CSV file with a header into (file stem, caption) pairs, in the order of the file.

    Args:
        path: UTF-8, comma-separated; column names in any case, further columns are ignored. The column `uid` names the
            files: "a/b" becomes "a%2Fb", and different uids stay different.
        caption_columns: names of the caption column, the first one present is used.
        needs_uid: False numbers the rows 000000, 000001, ... where there is no column `uid`.

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
        uid = row.get("uid", f"{len(pairs):06d}")
        stem = re.sub(r"^\.", "%2E", quote(uid, safe=_SAFE_IN_NAMES))
        if not stem.strip() or len(stem) > _MAX_NAME_BYTES:
            raise DataError(
                f"{where}: uid {uid[:60]!r} cannot be a file name: use 1 to {_MAX_NAME_BYTES} letters or digits"
            )
        if stem in pairs:
            raise DataError(f"{where}: uid {uid!r} appears twice; uids name files")
        pairs[stem] = row[caption]
    return list(pairs.items())


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


def begin_folder(folder: Path, pictures: Sequence[Picture]) -> None:
    """Writes `metadata.jsonl`: a line for each of these pictures, whether it is drawn already or not, and then those of
    earlier calls.

    Raises:
        DataError: the folder has one of them, made in another way; nothing is written then.
    """
    path, lines = folder / "metadata.jsonl", {picture.file: asdict(picture) for picture in pictures}
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        before: dict[str, dict[str, Any]] = {record["file"]: record for record in map(json.loads, text.splitlines())}
    except (ValueError, TypeError, LookupError) as error:
        raise DataError(f"{path}: is not what this command writes ({error}); choose another --out") from error
    for file, wanted in lines.items():
        record = before.get(file, {})
        if record != wanted and is_drawn(folder, file):
            changed = [key for key in wanted if record.get(key) != wanted[key]]
            differs = "; ".join(f"{key} {record.get(key)!r} instead of {wanted[key]!r}" for key in changed)
            raise DataError(
                f"{folder / file}: is there already, made with {differs}; choose another --out, or remove it"
            )
    lines |= {file: record for file, record in before.items() if file not in lines}
    replace_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines.values()))


def is_drawn(folder: Path, file: str) -> bool:
    """Whether the folder has this picture. A damaged file counts as missing."""
    try:
        with Image.open(folder / file) as image:
            image.verify()
    except (OSError, SyntaxError, ValueError):
        return False
    return True


def save_picture(folder: Path, picture: Picture, image: Image.Image) -> None:
    """Writes a PNG; under its name there is a whole file or none."""
    partial = folder / f".{picture.file}.partial"  # a fixed name: an interrupted one is overwritten next time
    image.save(partial, format="PNG")
    os.replace(partial, folder / picture.file)


def write_grid(folder: Path, pictures: Sequence[Picture], columns: int | None = None) -> int:
    """Writes `grid.png` of the first 100 pictures that are there, each at most 256 pixels large.

    Args:
        folder: where the pictures are.
        pictures: of this call, in order.
        columns: of the grid; None makes it square.

    Returns:
        How many of `pictures` exist.
    """
    there = [folder / picture.file for picture in pictures if is_drawn(folder, picture.file)]
    shown = [Image.open(path) for path in there[:_GRID_PICTURES]]
    for image in shown:
        image.thumbnail((_GRID_CELL, _GRID_CELL))  # reads the file and closes it
    if shown:
        grid = picture_grid(shown, columns or max(1, round(len(shown) ** 0.5)))
        grid.save(folder / ".grid.png.partial", format="PNG")
        os.replace(folder / ".grid.png.partial", folder / "grid.png")
    return len(there)
