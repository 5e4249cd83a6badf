"""Reading from a real S3-protocol server through a proxy that spoils a third of the answers."""

import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sd_training.config.data_schema import RemoteConfig
from sd_training.data.sources.choose import expand_shards
from sd_training.data.storage import files
from sd_training.data.storage.files import FileMissing, file_state, open_bytes
from sd_training.errors import DataError
from tests.integration.fault_proxy import FAULTS, FaultProxy, running
from tests.integration.s3_server import BUCKET, S3Server, s3_environment, s3_server

CONTENT = {f"{number:03d}.tar": random.Random(number).randbytes(200_000 + number) for number in range(4)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log.txt") as running_server:
        for name, content in CONTENT.items():
            running_server.put(f"set/{name}", content)
        running_server.put("set/notes.txt", b"no shard")
        yield running_server


@pytest.fixture
def proxy(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    monkeypatch.setattr(files, "FIRST_WAIT_S", 0.01)
    with running(FaultProxy(server.url, seed=5, delay_s=5.0)) as proxy:
        for name, value in s3_environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy


def access(tmp_path: Path, num_retries: int = 15, timeout_s: float = 0.5) -> RemoteConfig:
    """On a busy machine an answer that nobody has spoilt may be late as well."""
    return RemoteConfig(cache_dir=str(tmp_path / "cache"), cache_gib=1.0, num_retries=num_retries, timeout_s=timeout_s)


def url(name: str) -> str:
    return f"s3://{BUCKET}/set/{name}"


def is_right(name: str, options: RemoteConfig) -> bool:
    return open_bytes(url(name), options).pread(len(CONTENT[name]), 0) == CONTENT[name]


def test_downloads_through_faults(proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.rate = 0.35
    folders = [tmp_path / str(number) for number in range(12)]  # a cache each
    with ThreadPoolExecutor(4) as pool:
        for name in CONTENT:
            assert all(pool.map(lambda folder, name=name: is_right(name, access(folder)), folders))
    assert proxy.num_requests > 96 and all(proxy.counts[fault] >= 2 for fault in FAULTS)


def read_all(folder: Path, results: "multiprocessing.SimpleQueue[list[bool]]") -> None:
    """In another process."""
    files.FIRST_WAIT_S = 0.01
    results.put([is_right(name, access(folder)) for name in CONTENT])


def test_many_processes_fill_one_cache_through_faults(proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.rate = 0.35
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    children = [context.Process(target=read_all, args=(tmp_path, results)) for _ in range(3)]
    for process in children:
        process.start()
    for process in children:
        process.join(300)
    assert [results.get() for _ in children] == [[True] * 4] * 3
    assert sorted(path.stat().st_size for path in (tmp_path / "cache").glob("*.data")) == sorted(
        len(content) for content in CONTENT.values()
    )
    downloads = sum(
        count for request, count in proxy.requests.items() if request.startswith("GET") and "=0-0" not in request
    )
    assert downloads - sum(proxy.counts.values()) <= 4  # each once, by one process, and faults again
    assert sum(proxy.counts.values()) >= 2


def test_listing(proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.rate = 0.35
    every = [url(name) for name in CONTENT]
    for pattern in (f"s3://{BUCKET}/set", f"s3://{BUCKET}/set/", url("*.tar"), url("{000..003}.tar"), url("00?.tar")):
        assert expand_shards(pattern, access(tmp_path)) == every
    assert expand_shards(url("00[13]*"), access(tmp_path)) == [every[1], every[3]]
    for pattern, said in [(url("x*.tar"), "matches no file"), (f"s3://{BUCKET}/other/", "holds no")]:
        with pytest.raises(DataError, match=said):
            expand_shards(pattern, access(tmp_path))
    with pytest.raises(DataError, match=r"holds no \*\.csv file"):
        expand_shards(f"s3://{BUCKET}/set", access(tmp_path), extensions=(".csv",))


def test_what_is_wrong_for_good_is_told_at_once(proxy: FaultProxy, tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match=rf"'s3://{BUCKET}/set/none\.tar' cannot be read: does not exist"):
        file_state(url("none.tar"), access(tmp_path, timeout_s=20))
    with pytest.raises(FileMissing, match="does not exist"):
        open_bytes("s3://no-such-bucket/a.tar", access(tmp_path, timeout_s=20))
    assert max(proxy.requests.values()) == 1


def test_an_outage_ends_in_an_error_that_names_the_file(proxy: FaultProxy, tmp_path: Path) -> None:
    state = file_state(url("000.tar"), access(tmp_path, timeout_s=20))
    proxy.rate, proxy.faults, proxy.longest_row = 1, ("status",), 99
    with pytest.raises(DataError, match=rf"'s3://{BUCKET}/set/000\.tar' cannot be read after 3 attempts.*503"):
        open_bytes(state, access(tmp_path, num_retries=2, timeout_s=20))
    assert proxy.counts == {"status": 3}


def test_a_replaced_object_is_noticed(server: S3Server, proxy: FaultProxy, tmp_path: Path) -> None:
    server.put("replaced.tar", b"a" * 1000)
    location, options = f"s3://{BUCKET}/replaced.tar", access(tmp_path)
    state = file_state(location, options)
    server.put("replaced.tar", b"b" * 1000)
    with pytest.raises(DataError, match="has changed since it was indexed"):
        open_bytes(state, options).pread(10, 0)
    assert open_bytes(location, options).pread(10, 0) == b"b" * 10


def test_without_credentials(proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")  # where a cloud's machine would get some
    with pytest.raises(DataError, match="credentials"):
        file_state(url("000.tar"), access(tmp_path))
    assert proxy.num_requests == 0
