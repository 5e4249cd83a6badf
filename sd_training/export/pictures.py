"""Captions in, picture files out: caption tables, file names that are safe, grids."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from sd_training.errors import DataError

_SAFE_IN_NAMES = " !#$&'()+,;=@[]^{}"
_MAX_NAME_BYTES = 200


def picture_grid(images: Sequence[Image.Image], columns: int) -> Image.Image:
    """Pastes pictures row by row into one RGB picture.

    Args:
        images: at least one; a cell is as large as the largest of them, smaller ones sit in its top left corner.
        columns: cells per row; the last row may stay partly black.

    Raises:
        ValueError: no images, or fewer than one column.
    """
    if not images or columns < 1:
        raise ValueError(f"a grid needs pictures and columns, got {len(images)} and {columns}")
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


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, cells by lower-case column name) of each row; every row has exactly the header's cells."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, strict=True)
            columns = [name.strip().lower() for name in next(reader, [])]
            yield 1, dict.fromkeys(columns, "")
            for cells in reader:
                if cells and len(cells) != len(columns):
                    raise DataError(
                        f"{path}, line {reader.line_num}: {len(cells)} cells where the header has {len(columns)}; "
                        "put text with commas in double quotes"
                    )
                if cells:
                    yield reader.line_num, dict(zip(columns, cells, strict=True))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except csv.Error as error:
        raise DataError(f"{path}: is not a CSV file ({error})") from error


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
    rows = _rows(path)
    _, header = next(rows)
    caption = next((name for name in caption_columns if name in header), None)
    if caption is None or (needs_uid and "uid" not in header):
        wanted = " and ".join((["uid"] if needs_uid else []) + [" or ".join(caption_columns)])
        raise DataError(f"{path}: the first line must name the columns {wanted}; it has {', '.join(header) or 'none'}")
    pairs: dict[str, str] = {}
    for line, cells in rows:
        try:
            stem = file_stem(cells["uid"]) if "uid" in cells else f"{len(pairs):06d}"
        except DataError as error:
            raise DataError(f"{path}, line {line}: {error}") from None
        if stem in pairs:
            raise DataError(f"{path}, line {line}: uid {cells['uid']!r} appears twice; uids name files")
        pairs[stem] = cells[caption]
    return list(pairs.items())
