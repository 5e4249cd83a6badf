import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from sd_training.config.data_schema import RemoteConfig
from sd_training.data.storage import files as files_module
from sd_training.data.storage.files import GIB, ByteFile, FileMissing, ShardCache
from sd_training.errors import DataError

KIB = 1024 / GIB
FORK = multiprocessing.get_context("fork")


def writing(size: int, fill: bytes = b"x") -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(fill * size)

    return write


def refusing(path: Path) -> None:
    raise AssertionError("the file was there already")


def get(cache: ShardCache, key: str, produce: Callable[[Path], None], size: int | None = None) -> Path:
    """The path of a file, which may be deleted at any time."""
    with closing(cache.open(key, produce, key, size)) as opened:
        return Path(opened.stream.name)


def files(folder: Path) -> list[str]:
    """Endings, without those of the empty lock files."""
    return sorted(path.suffix for path in folder.iterdir() if path.suffix != ".lock")


def size_now(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return 0


def age(path: Path, seconds: int) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_made_once_and_found_again(tmp_path: Path) -> None:
    cache = ShardCache(RemoteConfig(cache_dir=str(tmp_path / "new" / "folder"), cache_gib=1))
    path = get(cache, "key", writing(100), 100)
    assert path.read_bytes() == b"x" * 100
    assert get(cache, "key", refusing) == path
    assert get(cache, "other key", writing(5)) != path
    assert files(tmp_path / "new" / "folder") == [".data", ".data"]  # no partial files stay


def test_what_was_not_used_for_longest_goes(tmp_path: Path) -> None:
    cache = ShardCache(RemoteConfig(cache_dir=str(tmp_path), cache_gib=10 * KIB))
    paths = [get(cache, str(number), writing(3000), 3000) for number in range(3)]
    for path, seconds in zip(paths, (30, 20, 10), strict=True):
        age(path, seconds)
    with paths[1].open("rb") as still_open:
        get(cache, "0", refusing)  # used now, so the second is the oldest
        get(cache, "3", writing(3000), 3000)
        assert [path.exists() for path in paths] == [True, False, True]
        assert len(still_open.read()) == 3000
    get(cache, "4", writing(9000))  # of a size that nobody knew
    assert files(tmp_path) == [".data"]


@pytest.mark.parametrize("size", [None, 20_000])
def test_larger_than_the_whole_cache(tmp_path: Path, size: int | None) -> None:
    cache = ShardCache(RemoteConfig(cache_dir=str(tmp_path), cache_gib=10 * KIB))
    kept = get(cache, "kept", writing(3000))
    with pytest.raises(DataError, match=r"does not fit.*cache_gib"):
        get(cache, "key", writing(20_000), size)
    assert kept.exists() and files(tmp_path) == [".data"]


def test_another_size_than_announced_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="99 bytes instead of 100"):
        get(ShardCache(RemoteConfig(cache_dir=str(tmp_path), cache_gib=1)), "key", writing(99), 100)
    assert files(tmp_path) == []


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise DataError("the reason")

    with pytest.raises(DataError, match="the reason"):
        get(ShardCache(RemoteConfig(cache_dir=str(tmp_path), cache_gib=1)), "key", fail)
    assert files(tmp_path) == []


def test_a_missing_source_is_named_at_once(tmp_path: Path) -> None:
    tries = []

    def fail(path: Path) -> None:
        tries.append(path)
        raise FileMissing("the shard is not allowed")

    with pytest.raises(FileMissing, match="not allowed"):
        ShardCache(RemoteConfig(cache_dir=str(tmp_path), cache_gib=1)).open("key", fail, "name")
    assert len(tries) == 1


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"shard cache.*file/cache.*cannot be used"):
        get(ShardCache(RemoteConfig(cache_dir=str(tmp_path / "file" / "cache"), cache_gib=1)), "key", writing(1))


def test_a_crash_leaves_what_the_next_process_removes(tmp_path: Path) -> None:
    cache = ShardCache(RemoteConfig(cache_dir=str(tmp_path), cache_gib=1))

    def crash(path: Path) -> None:
        path.write_bytes(b"half")
        os._exit(9)

    process = FORK.Process(target=get, args=(cache, "key", crash))
    process.start()
    process.join()
    assert files(tmp_path) == [".partial"]
    get(cache, "another key", writing(3))
    assert files(tmp_path) == [".data"]
    assert get(cache, "key", writing(7)).read_bytes() == b"x" * 7


def test_many_processes_one_producer_per_key(tmp_path: Path) -> None:
    made, right = tmp_path / "made", FORK.Value("i", 0)

    def produce(key: str, path: Path) -> None:
        with made.open("a") as log:
            log.write(f"{key}\n")
        time.sleep(0.05)
        path.write_bytes(key.encode() * 10)

    def use() -> None:
        cache = ShardCache(RemoteConfig(cache_dir=str(tmp_path / "cache"), cache_gib=1))
        got = [get(cache, key, lambda path, key=key: produce(key, path)).read_bytes() for key in "abc"]  # type: ignore[misc]
        with right.get_lock():
            right.value += got == [b"a" * 10, b"b" * 10, b"c" * 10]

    processes = [FORK.Process(target=use) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert right.value == 6
    assert sorted(made.read_text().split()) == ["a", "b", "c"]


def test_threads_of_one_process_too(tmp_path: Path) -> None:
    cache, made = ShardCache(RemoteConfig(cache_dir=str(tmp_path), cache_gib=1)), []

    def produce(path: Path) -> None:
        made.append(path)
        time.sleep(0.05)
        path.write_bytes(b"abc")

    threads = [threading.Thread(target=get, args=(cache, "key", produce)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_never_two_producers_of_one_key_at_a_time(tmp_path: Path) -> None:
    """Files are deleted while others wait for the lock."""
    cache, inside, most = ShardCache(RemoteConfig(cache_dir=str(tmp_path), cache_gib=1)), [], [0]

    def produce(path: Path) -> None:
        inside.append(path)
        most[0] = max(most[0], len(inside))
        time.sleep(0.001)
        inside.pop()

    def use() -> None:
        for _ in range(15):
            get(cache, "key", produce).unlink(missing_ok=True)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_what_the_next_one_has_begun_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may begin, and take its lock, as soon as the file that was made has its final name."""
    rename = Path.rename

    def rename_and_begin(partial: Path, target: Path) -> Path:
        made = rename(partial, target)
        partial.write_bytes(b"of the next one")
        return made

    monkeypatch.setattr(Path, "rename", rename_and_begin)
    path = get(
        ShardCache(RemoteConfig(cache_dir=str(tmp_path), cache_gib=1)),
        "key",
        lambda partial: partial.write_bytes(b"abc") and None,
    )
    assert path.read_bytes() == b"abc"
    assert b"of the next one" in [file.read_bytes() for file in path.parent.iterdir()]


def test_files_being_made_count_and_are_left_alone(tmp_path: Path) -> None:
    cache, half, go_on = (
        ShardCache(RemoteConfig(cache_dir=str(tmp_path), cache_gib=10 * KIB)),
        threading.Event(),
        threading.Event(),
    )

    def slowly(path: Path) -> None:
        half.set()
        assert go_on.wait(100)
        path.write_bytes(b"s" * 6000)

    slow = threading.Thread(target=get, args=(cache, "slow", slowly, 6000))
    slow.start()
    assert half.wait(100)
    first = get(cache, "first", writing(3000), 3000)
    get(cache, "second", writing(3000), 3000)  # with the one that is being made there is room for one of them
    assert not first.exists() and files(tmp_path) == [".data", ".partial"]
    go_on.set()
    slow.join()
    assert get(cache, "slow", refusing).read_bytes() == b"s" * 6000


def test_the_folder_does_not_grow_far_beyond_its_limit(tmp_path: Path) -> None:
    def use(seed: int) -> None:
        cache = ShardCache(RemoteConfig(cache_dir=str(tmp_path), cache_gib=20 * KIB))
        for number in range(25):
            key = str((seed * 7 + number * number) % 12)
            opened = cache.open(key, writing(4000, key[-1].encode()), key, 4000)
            assert opened.pread(4000, 0) == key[-1].encode() * 4000

    processes = [FORK.Process(target=use, args=(seed,)) for seed in range(4)]
    for process in processes:
        process.start()
    largest = 0
    while any(process.is_alive() for process in processes):
        largest = max(largest, sum(map(size_now, os.scandir(tmp_path))))
    assert [process.exitcode for process in processes] == [0] * 4
    assert 0 < largest <= 20 * 1024 + 4 * 4000  # each process may add one before another has made room
    assert set(files(tmp_path)) == {".data"}


def test_open_gets_a_deleted_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, tries = ShardCache(RemoteConfig(cache_dir=str(tmp_path), cache_gib=1)), []

    def opened(path: Path, name: str) -> ByteFile:
        tries.append(path)
        if len(tries) == 1:
            path.unlink()  # as another process that needs room does
        return ByteFile(path, name)

    monkeypatch.setattr(files_module, "ByteFile", opened)
    assert cache.open("key", writing(4), "name").pread(4, 0) == b"xxxx"
    assert len(tries) == 2


def test_a_file_that_is_deleted_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(path: Path, name: str) -> ByteFile:
        path.unlink()
        return ByteFile(path, name)

    monkeypatch.setattr(files_module, "ByteFile", opened)
    with pytest.raises(DataError, match=r"too small: raise dataset\.params\.remote\.cache_gib"):
        ShardCache(RemoteConfig(cache_dir=str(tmp_path), cache_gib=1)).open("key", writing(4), "name")
