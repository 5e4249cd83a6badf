"""A folder of drawn pictures that can be completed later: every PNG carries the record of how it was made."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from sd_training.errors import DataError
from sd_training.export.pictures import picture_grid

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
    """Writes `metadata.jsonl` (a line for each picture that is there, also those of earlier calls) and `grid.png`.

    Args:
        folder: where the pictures are.
        pictures: those of this call, in order; missing ones are left out.
        columns: of the grid; None makes it square. It shows the first 100 pictures, each at most 256 pixels large.

    Returns:
        How many of `pictures` are there.
    """
    there = [picture for picture in pictures if _read_record(folder / picture.file) == asdict(picture)]
    new = {picture.file: asdict(picture) for picture in there}
    earlier = {name: record for name, record in _read_lines(folder).items() if name not in new}
    lines = {name: record for name, record in earlier.items() if (folder / name).exists()} | new
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in lines.values())
    (folder / ".metadata.jsonl.partial").write_text(text, encoding="utf-8")
    os.replace(folder / ".metadata.jsonl.partial", folder / "metadata.jsonl")
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


def _read_lines(folder: Path) -> dict[str, dict[str, Any]]:
    """Records of an earlier call by file name; lines that are not records are dropped."""
    path = folder / "metadata.jsonl"
    records: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
            records[Path(record["file"]).name] = record
        except (ValueError, KeyError, TypeError):
            continue
    return records
