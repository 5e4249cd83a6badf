"""Pictures for folders of Arrow files, and what the index and the reader of such a folder say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sd_training.data.index.store import DatasetIndex, load_index
from sd_training.data.samples.captions import captions_in
from sd_training.data.sources.saved_dataset import HuggingFaceSource
from tests import makers
from tests.unit.data.making import ACCESS

IMAGES = [makers.encode(makers.picture(number, 40 + number, 32)) for number in range(6)]


def cells(images: Sequence[bytes | None]) -> list[dict[str, Any] | None]:
    return [None if image is None else {"bytes": image, "path": "name.jpg"} for image in images]


def index_of(folder: Path, fields: Sequence[str] = (), **columns: str) -> DatasetIndex:
    return load_index(HuggingFaceSource([str(folder)], ACCESS, **columns), folder.parent / "index", fields)


def image_and_caption(index: DatasetIndex, sample: int) -> tuple[bytes, list[str]]:
    reader = HuggingFaceSource([], ACCESS).reader(index)
    return reader.image(sample), captions_in(reader.caption(sample))


def named(index: DatasetIndex) -> set[tuple[str, str]]:
    return {(problem.key, problem.reason) for problem in index.problems.named()}
