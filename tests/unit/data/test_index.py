import json
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from sd_training.data import index as index_module
from sd_training.data.index import default_index_dir, load_index
from sd_training.errors import DataError
from tests import makers


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return sorted(makers.caption_shards(tmp_path / "data", shards=3, per_shard=4).glob("*.tar"))


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_columns(shards: list[Path]) -> None:
    index = load_index(shards, None, ["original_width", "uid"])
    assert len(index) == 12
    assert index.name(5) == (str(shards[1]), "000005")
    assert index.shard_of.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert index.metadata["number:original_width"].to_pylist() == [40.0 + i for i in range(12)]
    assert index.metadata["text:uid"].to_pylist() == [f"u{i}" for i in range(12)]
    assert "number:pwatermark" not in index.metadata.column_names
    assert index.fields == {"original_width", "pwatermark", "uid"}
    start, length = int(index.caption_offset[5]), int(index.caption_length[5])
    assert shards[1].read_bytes()[start : start + length] == b"a blue picture"


def test_only_new_and_changed_shards_are_read_again(shards: list[Path]) -> None:
    load_index(shards, None)
    before = files(default_index_dir())
    assert len(before) == 3
    makers.write_shard(shards[0], makers.caption_samples(5))
    index = load_index(shards, None)
    after = files(default_index_dir())
    assert len(index) == 13
    assert len(after) == 4
    assert before.items() <= after.items()


def test_fingerprint_moves_with_the_data_and_changes_with_it(shards: list[Path], tmp_path: Path) -> None:
    first = load_index(shards, None).fingerprint
    moved = [Path(shutil.copy(shard, tmp_path / shard.name)) for shard in shards]
    os.utime(moved[0], (1, 1))
    assert load_index(moved, None).fingerprint == first
    assert load_index(moved[::-1], None).fingerprint != first
    assert load_index(moved[:2], None).fingerprint != first
    makers.write_shard(moved[0], makers.caption_samples(4, first=50))
    assert load_index(moved, None).fingerprint != first


def test_a_damaged_index_file_is_built_again(shards: list[Path]) -> None:
    load_index(shards, None)
    for number, path in enumerate(sorted(default_index_dir().iterdir())):
        path.write_bytes([b"", b"PAR1garbagePAR1", path.read_bytes()[:-20]][number])
    assert len(load_index(shards, None)) == 12


def test_field_names_with_dots_and_colons(tmp_path: Path) -> None:
    metadata = {"a.b": 1, "number:x": 2, "text:y": "z", "": 3}
    shard = makers.write_shard(
        tmp_path / "a.tar", [{"__key__": "0", "jpg": b"x", "json": json.dumps(metadata).encode()}]
    )
    index = load_index([shard], None, ["a.b", "number:x", "text:y", ""])
    values = {name: index.metadata[name].to_pylist() for name in index.metadata.column_names}
    assert values == {
        "number:a.b": [1.0],
        "number:number:x": [2.0],
        "number:text:y": [None],
        "text:text:y": ["z"],
        "number:": [3.0],
    }
    assert index.fields == set(metadata)


def test_unwritable_folder_is_a_data_error(shards: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"dataset\.params\.index_dir"):
        load_index(shards, tmp_path / "file" / "index")


def test_many_shards_are_indexed_by_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "FEW_SHARDS", 2)
    shards = sorted(makers.caption_shards(tmp_path / "data", shards=5, per_shard=2).glob("*.tar"))
    assert len(load_index(shards, tmp_path / "index")) == 10
    assert len(files(tmp_path / "index")) == 5


def test_two_jobs_may_build_at_once(shards: list[Path], tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(load_index, shards, tmp_path / "index") for _ in range(2)]
        first, second = [job.result().fingerprint for job in jobs]
    assert first == second
    assert all(name.endswith(".parquet") for name in files(tmp_path / "index"))
    assert len(files(tmp_path / "index")) == 3
