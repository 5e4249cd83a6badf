"""A run on an S3 server that spoils a third of its answers sees what a run on local files sees."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sd_training.config.data_schema import RemoteConfig
from sd_training.config.plan import BatchPlan
from sd_training.data.datamodule import TrainingData
from sd_training.data.sources.choose import expand_shards
from sd_training.data.storage import files
from sd_training.errors import EXIT_STOPPED, OutageError
from tests import makers
from tests.integration.fault_proxy import FaultProxy, running
from tests.integration.s3_server import BUCKET, S3Server, s3_environment, s3_server
from tests.unit.data.making import equal_bits, joined, stream, training_data
from tests.unit.data.source_cases import CASES, make_sample

PLAN = BatchPlan(micro_batch=8, accumulation=1, processes=1, num_examples=64)
PATIENCE: dict[str, Any] = {"timeout_s": 0.4, "num_retries": 15}
"""On a busy machine an answer that nobody has spoilt may be late as well."""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return makers.caption_shards(tmp_path_factory.mktemp("local") / "set", shards=4, per_shard=10)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, local: Path) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log.txt") as running_server:
        running_server.put_folder(local, "set")
        yield running_server


@pytest.fixture
def proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    monkeypatch.setattr(files, "FIRST_WAIT_S", 0.01)
    with running(FaultProxy(server.url, seed=3, rate=0.35, delay_s=5)) as proxy:
        for name, value in s3_environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy


def data_at(path: str | Path, tmp_path: Path, workers: int = 0) -> TrainingData:
    remote = RemoteConfig(cache_dir=str(tmp_path / "c"), **PATIENCE)
    return training_data(
        path, PLAN, remote=remote, workers=workers, filters={"pwatermark": "<0.8"}, crop="random", lanes=4, window=3
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_the_stream_is_the_local_one(local: Path, proxy: FaultProxy, tmp_path: Path, workers: int) -> None:
    expected_data = data_at(local, tmp_path)
    remote_data = data_at(f"s3://{BUCKET}/set/{{000..003}}.tar", tmp_path, workers)
    assert equal_bits(joined(stream(remote_data)), joined(stream(expected_data)))
    assert remote_data.fingerprint() == expected_data.fingerprint()
    assert sum(proxy.counts.values()) >= 3
    again = joined(stream(data_at(f"s3://{BUCKET}/set/*.tar", tmp_path), first_step=5))
    assert equal_bits(again, joined(stream(expected_data, first_step=5)))


TABLES = {"parquet": "Parquet", "csv": "Table", "huggingface": "HuggingFace"}


@pytest.mark.parametrize("name", TABLES)
def test_tables_reads_the_same_there(server: S3Server, proxy: FaultProxy, tmp_path: Path, name: str) -> None:
    """Tables name images beside them; a saved data set is a folder of files."""
    (case,) = (case for case in CASES if case.name == name)
    folder = tmp_path / name
    folder.mkdir()
    case.write(folder, "unit", [make_sample(number) for number in range(12)])
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        server.put(f"{name}/{file.relative_to(folder).as_posix()}", file.read_bytes())
    inside = "unit" if name == "huggingface" else f"unit.{name}"
    streams = []
    for root in (str(folder), f"s3://{BUCKET}/{name}"):
        remote = RemoteConfig(cache_dir=str(tmp_path / "cache"), **PATIENCE)
        data = training_data(f"{root}/{inside}", PLAN, kind=TABLES[name], remote=remote)
        streams.append(joined(stream(data)))
    assert equal_bits(*streams)
    assert len(set(streams[0].sample_ids.tolist())) == 12
    assert sum(proxy.counts.values()) >= 1


def test_a_server_that_goes_away_asks_for_another_start(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by a loader process."""
    remote = RemoteConfig(cache_dir=str(tmp_path / "c"), timeout_s=20.0, num_retries=1)
    data = training_data(f"s3://{BUCKET}/set/{{000..003}}.tar", PLAN, remote=remote, workers=1)
    with running(FaultProxy(server.url, seed=3, rate=0.0, delay_s=0.6)) as proxy:
        for name, value in s3_environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        data.report()
    for kept in (tmp_path / "c").glob("*.data"):
        kept.unlink()
    with pytest.raises(OutageError, match="after 2 attempts") as error:
        stream(data)
    assert error.value.exit_status == EXIT_STOPPED


def test_a_listing_that_fails_is_never_an_empty_one(proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that is busy for a moment must not make the data set smaller."""
    proxy.rate = 0.5
    access = RemoteConfig(cache_gib=1.0, num_retries=20, timeout_s=0.2)
    for seed in range(20):
        proxy.seed = seed
        assert len(expand_shards(f"s3://{BUCKET}/s*t/*.tar", access)) == 4
    assert proxy.counts["status"] >= 5
