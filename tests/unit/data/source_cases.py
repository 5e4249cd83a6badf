"""Data sets of every kind with the same samples, for tests of what all kinds promise. A new kind is a line of CASES."""

import csv
import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sd_training.config.data_schema import TagConfig
from sd_training.data.sources.arrow import ArrowSource
from sd_training.data.sources.base import Source
from sd_training.data.sources.choose import expand_shards
from sd_training.data.sources.files import TABLE_EXTENSIONS, FolderSource, TableSource, TagSource
from sd_training.data.sources.tar import TarSource
from tests import makers
from tests.unit.data.making import ACCESS

_ORIENTATION = 0x0112


@dataclass
class Sample:
    """One sample as it is written."""

    key: str
    image: bytes
    size: tuple[int, int]
    """Upright width and height [pixels]; 0 when the image is damaged."""
    caption: str
    metadata: Mapping[str, Any]
    extension: str = "jpg"


def make_sample(number: int) -> Sample:
    size, extension = (40 + number, 32), "jpg"
    image = makers.encode(makers.picture(number, *size))
    if number % 4 == 1:
        size, image = (24, 50), turned(makers.picture(number, 50, 24))
    elif number % 4 == 2:
        image, extension = makers.encode(makers.picture(number, *size), "PNG"), "png"
    metadata = {"score": number, "style": "ink" if number % 2 else "oil, thick"}
    return Sample(
        f"{number:03d}", image, size, f'a "{makers.COLOURS[number % 3]}" picture, ü{number}', metadata, extension
    )


def turned(picture: Image.Image) -> bytes:
    """A JPEG that is stored lying on its side."""
    exif, stream = Image.Exif(), io.BytesIO()
    exif[_ORIENTATION] = 6
    picture.save(stream, "JPEG", exif=exif)
    return stream.getvalue()


def write_tar(folder: Path, unit: str, samples: Sequence[Sample]) -> None:
    members = [{s.extension: s.image, "txt": s.caption, "json": json.dumps(s.metadata).encode()} for s in samples]
    pairs = zip(samples, members, strict=True)
    makers.write_shard(folder / f"{unit}.tar", [{"__key__": sample.key, **member} for sample, member in pairs])


def write_images(folder: Path, samples: Sequence[Sample]) -> list[str]:
    """Returns the names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{sample.key}.{sample.extension}" for sample in samples]
    for name, sample in zip(names, samples, strict=True):
        (folder / name).write_bytes(sample.image)
    return names


def table_rows(folder: Path, unit: str, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    names = write_images(folder / f"{unit}_files", samples)
    pairs = zip(names, samples, strict=True)
    return [{"path": f"{unit}_files/{name}", "caption": s.caption, **s.metadata} for name, s in pairs]


def write_csv(folder: Path, unit: str, samples: Sequence[Sample], extension: str = "csv", delimiter: str = ",") -> None:
    rows = table_rows(folder, unit, samples)
    with (folder / f"{unit}.{extension}").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["path", "caption", "score", "style"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def write_tsv(folder: Path, unit: str, samples: Sequence[Sample]) -> None:
    write_csv(folder, unit, samples, "tsv", "\t")


def write_jsonl(folder: Path, unit: str, samples: Sequence[Sample]) -> None:
    rows = table_rows(folder, unit, samples)
    header = {"path": "", "caption": ""} if not rows else None
    (folder / f"{unit}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or [header]))


def write_descriptions(folder: Path, captions: Path, samples: Sequence[Sample]) -> None:
    captions.mkdir(parents=True, exist_ok=True)
    for sample in samples:
        (captions / f"{sample.key}.txt").write_text(sample.caption, encoding="utf-8")
        (folder / f"{sample.key}.json").write_text(json.dumps(sample.metadata))


def write_beside(folder: Path, unit: str, samples: Sequence[Sample]) -> None:
    write_images(folder / unit, samples)
    write_descriptions(folder / unit, folder / unit, samples)


def write_images_and_captions(folder: Path, unit: str, samples: Sequence[Sample]) -> None:
    write_images(folder / "images" / unit, samples)
    write_descriptions(folder / "images" / unit, folder / "captions" / unit, samples)


def write_img_and_txt(folder: Path, unit: str, samples: Sequence[Sample]) -> None:
    write_images(folder / unit / "img", samples)
    write_descriptions(folder / unit / "img", folder / unit / "txt", samples)


def write_tags(folder: Path, unit: str, samples: Sequence[Sample]) -> None:
    names = write_images(folder / "pictures" / unit, samples)
    (folder / "metadata" / unit).mkdir(parents=True)
    for name, sample in zip(names, samples, strict=True):
        record = {"path": f"pictures/{unit}/{name}", "tags": [sample.caption], "score": sample.metadata["score"]}
        (folder / "metadata" / unit / f"{sample.key}.json").write_text(json.dumps(record))


def write_huggingface(folder: Path, unit: str, samples: Sequence[Sample]) -> None:
    datasets = pytest.importorskip("datasets")
    kinds = {"caption": "string", "score": "int64", "style": "string"}
    features = datasets.Features({"image": datasets.Image(), **{k: datasets.Value(v) for k, v in kinds.items()}})
    rows = [{"image": {"bytes": s.image, "path": None}, "caption": s.caption, **s.metadata} for s in samples]
    dataset = datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in features}, features=features)
    shutil.rmtree(folder / unit, ignore_errors=True)
    dataset.save_to_disk(str(folder / unit))


def write_parquet(folder: Path, unit: str, samples: Sequence[Sample]) -> None:
    kinds = {"image": pa.binary(), "caption": pa.string(), "score": pa.int64(), "style": pa.string()}
    rows = [{"image": s.image, "caption": s.caption, **s.metadata} for s in samples]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(kinds)), folder / f"{unit}.parquet", row_group_size=2)


def open_parquet(folder: Path) -> Source:
    access = ACCESS.replace(cache_dir=str(folder.parent / "cache"))
    return ArrowSource(expand_shards(str(folder), access, extensions=(".parquet",)), access)


def open_table(folder: Path) -> Source:
    return TableSource(expand_shards(str(folder), ACCESS, extensions=TABLE_EXTENSIONS), ACCESS)


def open_folder(folder: Path) -> Source:
    return FolderSource([str(folder)])


def open_huggingface(folder: Path) -> Source:
    return ArrowSource(sorted(map(str, folder.iterdir())), ACCESS, saved=True)


def open_tags(folder: Path) -> Source:
    rules = TagConfig(abs_min_score=-1, min_score=-1, aspect_range=[0.1, 10])
    return TagSource([str(folder)], rules)


@dataclass
class Case:
    """One kind of data set in one layout."""

    name: str
    write: Callable[[Path, str, Sequence[Sample]], None]
    """Writes one unit into the folder, anew if it is there."""
    open: Callable[[Path], Source]
    """The source of all units in the folder, by name."""
    fields: Sequence[str] = ("score", "style")
    """Metadata that it keeps."""
    caption: Callable[[str], str] = field(default=str)
    """Stored caption → caption."""


def caption_in_tags(text: str) -> str:
    _, tag = json.loads(text)
    return str(tag)


_COLUMNS = ("score", "style", "caption")
CASES = [
    Case("tar", write_tar, lambda folder: TarSource(expand_shards(str(folder), ACCESS), ACCESS)),
    Case("parquet", write_parquet, open_parquet, _COLUMNS),
    Case("csv", write_csv, open_table, _COLUMNS),
    Case("tsv", write_tsv, open_table, _COLUMNS),
    Case("jsonl", write_jsonl, open_table, _COLUMNS),
    Case("beside", write_beside, open_folder),
    Case("images_captions", write_images_and_captions, open_folder),
    Case("img_txt", write_img_and_txt, open_folder),
    Case("tags", write_tags, open_tags, ("score",), caption_in_tags),
    Case("huggingface", write_huggingface, open_huggingface, _COLUMNS),
]
