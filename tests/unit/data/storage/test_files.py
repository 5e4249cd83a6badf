import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sd_training.config.data_schema import RemoteConfig
from sd_training.data.storage import files
from sd_training.data.storage.files import FileMissing, FileState, ShardCache, file_state, open_bytes
from sd_training.errors import DataError, OutageError
from tests.integration.fault_proxy import FaultProxy, running
from tests.integration.http_files import WebFiles, web_files

CONTENT = random.Random(1).randbytes(300_000)
ACCESS = RemoteConfig(num_retries=4, timeout_s=5)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FIRST_WAIT_S", 0.005)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def web() -> Iterator[WebFiles]:
    with web_files() as server:
        server.files["/a.tar"] = CONTENT
        yield server


@pytest.fixture
def cached(tmp_path: Path) -> RemoteConfig:
    return RemoteConfig(cache_dir=str(tmp_path / "shards"), cache_gib=1, num_retries=4, timeout_s=5)


def test_cached_once(web: WebFiles, cached: RemoteConfig) -> None:
    state = file_state(f"{web.url}/a.tar", cached)
    for _ in range(2):
        file = open_bytes(state, cached)
        assert file.pread(len(CONTENT), 0) == CONTENT
    assert web.counts["/a.tar"] == 2  # the look and the download
    with pytest.raises(DataError, match=rf"{web.url}/a\.tar.*expected"):
        file.pread(1, len(CONTENT))


def test_larger_than_the_cache(web: WebFiles, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not fit.*raise dataset\.params\.remote\.cache_gib"):
        open_bytes(f"{web.url}/a.tar", RemoteConfig(cache_dir=str(tmp_path), cache_gib=1e-4))
    assert web.counts["/a.tar"] == 1  # nothing was downloaded in vain


def test_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert ShardCache(RemoteConfig()).folder == Path("/somewhere/sd_training/shards")


def test_a_changed_file_is_noticed(web: WebFiles, cached: RemoteConfig) -> None:
    state = file_state(f"{web.url}/a.tar", cached)
    web.files["/a.tar"] = CONTENT[::-1]  # as long as before
    with pytest.raises(DataError, match=r"a\.tar' has changed since it was indexed"):
        open_bytes(state, cached)
    assert file_state(f"{web.url}/a.tar", cached).version != state.version


def test_a_server_without_ranges(web: WebFiles, cached: RemoteConfig) -> None:
    web.has_ranges = False
    state = file_state(f"{web.url}/a.tar", cached)
    assert state.size == len(CONTENT)
    assert open_bytes(state, cached).pread(10, 5) == CONTENT[5:15]


def test_a_cached_file_of_a_wrong_size_is_loaded_again(web: WebFiles, cached: RemoteConfig) -> None:
    """As a full disk or a crash of the machine may leave one."""
    state = file_state(f"{web.url}/a.tar", cached)
    open_bytes(state, cached).close()
    assert cached.cache_dir is not None
    folder = Path(cached.cache_dir)
    (kept,) = folder.glob("*.data")
    for damaged in (CONTENT[:-1], CONTENT + b"x"):
        kept.write_bytes(damaged)
        assert open_bytes(state, cached).pread(len(CONTENT), 0) == CONTENT
    assert list(folder.glob("*.data")) == [kept]


def test_missing_and_forbidden_files_are_told_at_once(web: WebFiles) -> None:
    with pytest.raises(FileMissing, match=r"none\.tar' cannot be read: does not exist"):
        file_state(f"{web.url}/none.tar", ACCESS)
    web.secret = "key=abc"
    assert file_state(f"{web.url}/a.tar?key=abc", ACCESS).size == len(CONTENT)
    with pytest.raises(FileMissing, match="not allowed") as error:
        file_state(f"{web.url}/a.tar?key=wrong", ACCESS)
    assert "wrong" not in str(error.value)
    assert web.counts == {"/none.tar": 1, "/a.tar": 2}


def test_nobody_answers() -> None:
    with pytest.raises(OutageError, match=r"after 2 attempts: .*error sending request") as error:
        file_state("http://me:word@127.0.0.1:9/a.tar?key=secret", RemoteConfig(num_retries=1, timeout_s=5))
    assert "word" not in str(error.value) and "secret" not in str(error.value)


def proxy_of(web: WebFiles, fault: str, longest_row: int) -> FaultProxy:
    return FaultProxy(web.url, rate=1, faults=(fault,), delay_s=5, longest_row=longest_row)


def patience_s(fault: str) -> float:
    """Every late answer costs as much; at the other faults a busy machine may take its time."""
    return 0.5 if fault == "delay" else 20


@pytest.mark.parametrize("fault", ["status", "reset", "truncated", "short", "delay"])
def test_every_fault_is_overcome(web: WebFiles, tmp_path: Path, fault: str) -> None:
    access = RemoteConfig(cache_dir=str(tmp_path), num_retries=2, timeout_s=patience_s(fault))
    proxy = proxy_of(web, fault, longest_row=2)
    state = file_state(f"{web.url}/a.tar", access)
    with running(proxy):
        file = open_bytes(FileState(f"{proxy.url}/a.tar", state.size, state.version), access)
        assert file.pread(len(CONTENT), 0) == CONTENT
    assert proxy.counts == {fault: 2}  # the download failed twice, then came


@pytest.mark.parametrize(
    ("fault", "message"),
    [("short", "bytes instead of 300000"), ("truncated", "body error"), ("status", "503"), ("delay", "HTTP error")],
)
def test_a_fault_that_stays_ends_in_an_error(web: WebFiles, fault: str, message: str) -> None:
    access = RemoteConfig(num_retries=1, timeout_s=patience_s(fault))
    state = file_state(f"{web.url}/a.tar", access)
    proxy = proxy_of(web, fault, longest_row=99)
    with running(proxy):
        at_proxy = FileState(f"{proxy.url}/a.tar", state.size, state.version)
        with pytest.raises(DataError, match=rf"a\.tar' cannot be read after 2 attempts: .*{message}") as error:
            open_bytes(at_proxy, access)
    assert isinstance(error.value, OutageError) == (fault != "short")  # a wrong length may be the server's defect


def test_threads_share_one_file(web: WebFiles) -> None:
    file = open_bytes(f"{web.url}/a.tar", ACCESS)
    offsets = [number * 1009 for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(lambda offset: file.pread(50, offset), offsets))
    assert pieces == [CONTENT[offset : offset + 50] for offset in offsets]


def read_all(location: str, folder: Path, results: "multiprocessing.SimpleQueue[bool]") -> None:
    """In another process."""
    file = open_bytes(location, RemoteConfig(cache_dir=str(folder), num_retries=4, timeout_s=5))
    results.put(file.pread(len(CONTENT), 0) == CONTENT)


def test_loader_processes_read_beside_their_parent(web: WebFiles, tmp_path: Path) -> None:
    """They come from a server that has read nothing, as in `data/loader.py`."""
    context = multiprocessing.get_context("forkserver")
    open_bytes(f"{web.url}/a.tar", ACCESS)
    results = context.SimpleQueue()
    children = [
        context.Process(target=read_all, args=(f"{web.url}/a.tar", tmp_path / str(i), results)) for i in range(2)
    ]
    for process in children:
        process.start()
    for process in children:
        process.join(200)
    assert [process.exitcode for process in children] == [0, 0]
    assert [results.get() for _ in children] == [True] * 2
