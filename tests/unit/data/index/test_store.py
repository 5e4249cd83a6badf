import json
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from sd_training.config.plan import BatchPlan
from sd_training.data.index import store as index_module
from sd_training.data.loader import worker_context
from sd_training.data.storage.files import cache_folder
from sd_training.errors import DataError
from tests import makers
from tests.integration.training import ROOT
from tests.unit.data.making import tar_index, training_data


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return sorted(makers.caption_shards(tmp_path / "data", shards=3, per_shard=4).glob("*.tar"))


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.parquet")}


def test_columns(shards: list[Path]) -> None:
    index = tar_index(shards, ["original_width", "uid"])
    assert len(index) == 12
    assert index.name(5) == (str(shards[1]), "000005")
    assert index.numbers("unit").tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert index.columns["number:original_width"].to_pylist() == [40.0 + i for i in range(12)]
    assert index.columns["text:uid"].to_pylist() == [f"u{i}" for i in range(12)]
    assert "number:pwatermark" not in index.columns.column_names
    assert index.fields == {"original_width", "pwatermark", "uid"}
    start, length = index.numbers("at:caption_offset")[5], index.numbers("caption_length")[5]
    assert shards[1].read_bytes()[start : start + length] == b"a blue picture"


def test_only_new_and_changed_shards_are_read_again(shards: list[Path]) -> None:
    tar_index(shards)
    before = files(cache_folder("index"))
    assert len(before) == 3
    makers.write_shard(shards[0], makers.caption_samples(5))
    index = tar_index(shards)
    after = files(cache_folder("index"))
    assert len(index) == 13
    assert len(after) == 4
    assert before.items() <= after.items()


def test_fingerprint_moves_with_the_data_and_changes_with_it(shards: list[Path], tmp_path: Path) -> None:
    first = tar_index(shards).fingerprint
    moved = [Path(shutil.copy(shard, tmp_path / shard.name)) for shard in shards]
    os.utime(moved[0], (1, 1))
    assert tar_index(moved).fingerprint == first
    assert tar_index(moved[::-1]).fingerprint != first
    assert tar_index(moved[:2]).fingerprint != first
    makers.write_shard(moved[0], makers.caption_samples(4, first=50))
    assert tar_index(moved).fingerprint != first


@pytest.mark.parametrize("member", ["txt", "json"])
def test_fingerprint_sees_texts_of_equal_length(tmp_path: Path, member: str) -> None:
    """Tar members are padded: another text of equal length leaves every size and offset as it was."""
    samples = makers.caption_samples(4)
    first = tar_index([makers.write_shard(tmp_path / "0.tar", samples)]).fingerprint
    value = samples[2][member]
    samples[2][member] = value.replace("blue", "BLUE") if member == "txt" else value.replace(b"u2", b"u9")
    assert samples[2][member] != value
    again = makers.write_shard(tmp_path / "again" / "0.tar", samples)
    assert again.stat().st_size == (tmp_path / "0.tar").stat().st_size
    index = tar_index([again])
    assert index.fingerprint != first
    assert not [name for name in index.columns.column_names if name.startswith("check:")]


def test_a_damaged_index_file_is_built_again(shards: list[Path]) -> None:
    tar_index(shards)
    next(cache_folder("index").glob("*.arrow")).unlink()
    for number, path in enumerate(sorted(cache_folder("index").glob("*.parquet"))):
        path.write_bytes([b"", b"PAR1garbagePAR1", path.read_bytes()[:-20]][number])
    assert len(tar_index(shards)) == 12


def test_field_names_with_dots_and_colons(tmp_path: Path) -> None:
    metadata = {"a.b": 1, "number:x": 2, "text:y": "z", "": 3}
    shard = makers.write_shard(
        tmp_path / "a.tar", [{"__key__": "0", "jpg": b"x", "json": json.dumps(metadata).encode()}]
    )
    index = tar_index([shard], ["a.b", "number:x", "text:y", ""])
    values = {
        name: index.columns[name].to_pylist()
        for name in index.columns.column_names
        if name.startswith(("number:", "text:"))
    }
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
        tar_index(shards, index_dir=tmp_path / "file" / "index")


def test_many_shards_are_indexed_by_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "FEW_SHARDS", 2)
    shards = sorted(makers.caption_shards(tmp_path / "data", shards=5, per_shard=2).glob("*.tar"))
    assert len(tar_index(shards, index_dir=tmp_path / "index")) == 10
    assert len(files(tmp_path / "index")) == 5


def test_two_jobs_may_build_at_once(shards: list[Path], tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=worker_context()) as pool:
        jobs = [pool.submit(tar_index, shards, (), tmp_path / "index") for _ in range(2)]
        first, second = [job.result().fingerprint for job in jobs]
    assert first == second
    assert sorted(path.suffix for path in (tmp_path / "index").iterdir()) == [".arrow"] + [".parquet"] * 3


def test_jobs_that_begin_together_scan_a_shard_once(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    begin, build, built = Barrier(3), index_module._build, []
    monkeypatch.setattr(index_module, "_build", lambda *job: (built.append(job[2].name), build(*job)))

    def job(_: int) -> str:
        begin.wait()
        return tar_index(shards).fingerprint

    with ThreadPoolExecutor(3) as threads:
        assert len({*threads.map(job, range(3))}) == 1
    assert len(built) == len({*built}) == 3


def test_image_sizes_and_blocks(tmp_path: Path) -> None:
    samples = [*makers.caption_samples(2, width=50, height=20), {"__key__": "x", "jpg": b"no image", "txt": b"a"}]
    index = tar_index([makers.write_shard(tmp_path / f"{i}.tar", samples) for i in range(2)])
    assert index.numbers("width").tolist() == [50, 50, 0] * 2
    assert index.numbers("height").tolist() == [20, 20, 0] * 2
    assert index.numbers("block").tolist() == [0] * 3 + [1] * 3


def test_a_damaged_join_is_made_again(shards: list[Path]) -> None:
    fingerprint = tar_index(shards).fingerprint
    (joined,) = cache_folder("index").glob("*.arrow")
    for damage in (b"", b"ARROW1garbage", joined.read_bytes()[:-40]):
        joined.write_bytes(damage)
        assert tar_index(shards).fingerprint == fingerprint


def test_the_index_travels_to_other_processes(shards: list[Path]) -> None:
    index = pickle.loads(pickle.dumps(tar_index(shards, ["uid"])))
    assert (len(index), index.metadata_text("uid", 4)) == (12, "u4")


def test_reading_samples_does_not_import_pandas(shards: list[Path], tmp_path: Path) -> None:
    """pyarrow imports it at the first `to_numpy`, in every loader process."""
    pytest.importorskip("pandas")
    samples = training_data(shards[0].parent, BatchPlan(4, 1, 1, 8)).samples()
    (tmp_path / "samples").write_bytes(pickle.dumps(samples))
    script = (
        "import pickle, sys; from sd_training.data.samples.sample import SampleRequest;"
        f"samples = pickle.load(open({str(tmp_path / 'samples')!r}, 'rb'));"
        "print(samples[[SampleRequest(0, 0, 3, 0)]].batch.sample_ids.item(), 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "False"]


def test_what_killed_processes_left_is_removed(shards: list[Path]) -> None:
    tar_index(shards)
    old, young = (cache_folder("index") / f"{name}.partial" for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    tar_index(shards[:2])
    assert not old.exists() and young.exists()


def test_a_join_unused_for_long_is_removed(shards: list[Path], tmp_path: Path) -> None:
    tar_index(shards)
    (old,) = cache_folder("index").glob("*.arrow")
    os.utime(old, (1, 1))
    tar_index(shards)  # opening it counts as use
    tar_index(shards[:2])
    assert old.exists()
    os.utime(old, (1, 1))
    tar_index(shards[1:])
    assert not old.exists()
    assert len(tar_index(shards)) == 12
