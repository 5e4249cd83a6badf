"""What every kind of data set promises to the rest of the data engine, for all of `source_cases.CASES`."""

import pickle
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from sd_training.config.data_schema import CaptionConfig, DatasetParams
from sd_training.config.filters import parse_filters
from sd_training.data import dataset
from sd_training.data.index.selection import select
from sd_training.data.index.store import load_index
from sd_training.data.loader import worker_context
from sd_training.data.order.buckets import training_sizes
from sd_training.data.samples.image import decode
from sd_training.data.sources.base import DatasetIndex, IndexedReader
from sd_training.errors import BadSample, DataError
from tests.unit.data.source_cases import CASES, Case, Sample, make_sample

every_source = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
UNITS = {"a": [make_sample(i) for i in range(5)], "b": [make_sample(i) for i in range(5, 9)]}
WRITTEN = [sample for samples in UNITS.values() for sample in samples]


@pytest.fixture
def folder(case: Case, tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    for unit, samples in UNITS.items():
        case.write(path, unit, samples)
    return path


def index_of(case: Case, folder: Path) -> DatasetIndex:
    return load_index(case.open(folder), folder.parent / "index", case.fields)


def read_all(reader: IndexedReader, count: int) -> list[tuple[bytes, str]]:
    return [(reader.image(i), reader.caption(i)) for i in range(count)]


def survivors(index: DatasetIndex, filters: dict[str, str]) -> list[int]:
    rules, problems = parse_filters(filters)
    assert problems == []
    return [int(sample) for sample in select(index, rules, None, CaptionConfig(), 10**9).selected]


@every_source
def test_units_are_stable(case: Case, folder: Path) -> None:
    source = case.open(folder)
    units = source.shards()
    assert len(units) == 2 and all(unit.size > 0 and unit.version for unit in units)
    assert source.shards() == units == pickle.loads(pickle.dumps(source)).shards()
    assert pickle.loads(pickle.dumps(source)).identity == source.identity == case.open(folder).identity


@every_source
def test_what_is_written_is_read(case: Case, folder: Path) -> None:
    index = index_of(case, folder)
    reader = IndexedReader(index, case.open(folder))
    assert len(index) == len(WRITTEN) and index.problems.total() == 0
    for i, sample in enumerate(WRITTEN):
        assert reader.image(i) == sample.image
        assert case.caption(reader.caption(i)) == sample.caption
        assert (index.numbers("width")[i], index.numbers("height")[i]) == sample.size
        assert sample.key in index.name(i)[1] or index.name(i)[1].startswith("row ")
        assert index.numbers("caption_length")[i] >= len(sample.caption.encode())
    keys = [index.name(i) for i in range(len(index))]
    assert len(set(keys)) == len(keys)


@every_source
def test_metadata_can_be_filtered(case: Case, folder: Path) -> None:
    index = index_of(case, folder)
    assert set(case.fields) == index.fields
    assert survivors(index, {"score": ">=6"}) == [6, 7, 8]
    if "style" in case.fields:
        assert survivors(index, {"style": "ink", "score": "<4"}) == [1, 3]
        assert index.metadata_text("style", 2) == "oil, thick"


@pytest.fixture(scope="module")
def other_processes() -> Iterator[list[ProcessPoolExecutor]]:
    pools = [ProcessPoolExecutor(1, mp_context=context) for context in (get_context("fork"), worker_context())]
    yield pools
    for pool in pools:
        pool.shutdown()


@every_source
def test_readers_work_in_other_processes(case: Case, folder: Path, other_processes: list[ProcessPoolExecutor]) -> None:
    index = index_of(case, folder)
    reader = IndexedReader(index, case.open(folder))
    here = read_all(reader, len(index))  # files are open now
    for pool in other_processes:
        assert pool.submit(read_all, reader, len(index)).result(timeout=900) == here


@every_source
def test_only_the_changed_unit_is_indexed_again(case: Case, folder: Path) -> None:
    before = index_of(case, folder)
    files = index_files(folder)
    assert len(files) == 2
    assert index_of(case, folder).fingerprint == before.fingerprint and index_files(folder) == files
    case.write(folder, "c", [make_sample(9)])
    assert len(index_of(case, folder)) == 10
    assert set(files.items()) < set(index_files(folder).items()) and len(index_files(folder)) == 3
    rewrite(case, folder, "b", [*UNITS["b"][:2], make_sample(11)])
    index = index_of(case, folder)
    assert set(files.items()) < set(index_files(folder).items()) and len(index_files(folder)) == 4
    assert index.numbers("width").tolist()[5:] == [
        s.size[0] for s in [*UNITS["b"][:2], make_sample(11), make_sample(9)]
    ]
    assert index.fingerprint != before.fingerprint


def rewrite(case: Case, folder: Path, unit: str, samples: Sequence[Sample]) -> None:
    """Writes a unit in the place of what is there."""
    for path in sorted(folder.rglob(f"{unit}*"), reverse=True):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    case.write(folder, unit, samples)


def index_files(folder: Path) -> dict[str, int]:
    """Each unit's index and when it was written [ns]."""
    return {path.name: path.stat().st_mtime_ns for path in (folder.parent / "index").glob("*.parquet")}


@every_source
def test_a_damaged_image_is_named_and_harms_no_other(case: Case, folder: Path) -> None:
    damaged = Sample("004", b"no image at all", (0, 0), "words", {"score": 4, "style": "ink"})
    rewrite(case, folder, "a", [*UNITS["a"][:4], damaged])
    index = index_of(case, folder)
    reader = IndexedReader(index, case.open(folder))
    assert index.numbers("width").tolist() == [s.size[0] for s in [*UNITS["a"][:4], damaged, *UNITS["b"]]]
    with pytest.raises(BadSample, match="not a readable"):
        decode(reader.image(4), 10**6)
    shard, key = index.name(4)
    assert shard == index.shards[0].location and ("004" in key or key == "row 4")
    assert reader.image(3) == UNITS["a"][3].image and reader.image(5) == UNITS["b"][0].image


@every_source
@pytest.mark.parametrize("units", [0, 1])
def test_nothing_to_train_on_is_an_error(
    case: Case, tmp_path: Path, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for _ in range(units):
        case.write(folder, "a", [])
    params = DatasetParams(path=str(folder), index_dir=str(tmp_path / "index"))
    monkeypatch.setattr(dataset, "make_source", lambda *_: case.open(folder))
    with pytest.raises(DataError, match=r"dataset\.params\.path"):
        dataset.open_dataset("Parquet", params, params, training_sizes(params), 1)


@every_source
def test_data_may_move(case: Case, folder: Path, tmp_path: Path) -> None:
    before = index_of(case, folder)
    moved = tmp_path / "elsewhere" / "data"
    moved.parent.mkdir()
    shutil.move(folder, moved)
    after = index_of(case, moved)
    assert after.fingerprint == before.fingerprint
    pairs = zip(read_all(IndexedReader(after, case.open(moved)), len(after)), WRITTEN, strict=True)
    assert all(image == sample.image for (image, _), sample in pairs)
