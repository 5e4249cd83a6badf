import os
import pickle
from pathlib import Path

import pytest

from sd_training.config.data_schema import RemoteConfig
from sd_training.data.storage.files import FileMissing, FileState, file_state, open_bytes
from sd_training.errors import ConfigError, DataError

ACCESS = RemoteConfig()
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "a b.bin"
    file.write_bytes(CONTENT)
    return file


def test_exactly_the_bytes_asked_for(path: Path) -> None:
    file = open_bytes(str(path), ACCESS)
    assert file.size == len(CONTENT)
    assert file.pread(10, 250) == CONTENT[250:260]
    assert file.pread(0, len(CONTENT)) == b""
    assert file.pread(len(CONTENT), 0) == CONTENT
    file.close()


def test_a_file_url_is_a_local_file(path: Path) -> None:
    url = path.as_uri()
    assert "%20" in url
    assert open_bytes(url, ACCESS).pread(3, 1) == CONTENT[1:4]
    assert file_state(url, ACCESS).size == len(CONTENT)


@pytest.mark.parametrize(("length", "offset"), [(11, len(CONTENT) - 10), (1, len(CONTENT)), (5, len(CONTENT) + 99)])
def test_fewer_bytes_are_an_error_that_names_the_file(path: Path, length: int, offset: int) -> None:
    with pytest.raises(DataError, match=r"a b\.bin.*were expected"):
        open_bytes(str(path), ACCESS).pread(length, offset)


def test_what_is_missing(tmp_path: Path, path: Path) -> None:
    with pytest.raises(FileMissing, match=r"none\.bin.*No such file"):
        file_state(str(tmp_path / "none.bin"), ACCESS)
    with pytest.raises(FileMissing, match=r"none\.bin"):
        open_bytes(str(tmp_path / "none.bin"), ACCESS)
    with pytest.raises(FileMissing, match="Is a directory"):
        file_state(str(tmp_path), ACCESS)


def test_a_changed_file_is_noticed(path: Path) -> None:
    state = file_state(str(path), ACCESS)
    assert open_bytes(state, ACCESS).pread(4, 0) == CONTENT[:4]
    os.utime(path, ns=(1, 1))  # same size, another time
    with pytest.raises(DataError, match="has changed since it was indexed"):
        open_bytes(state, ACCESS)
    assert file_state(str(path), ACCESS) == FileState(str(path), len(CONTENT), "1")


@pytest.mark.parametrize("url", ["ftp://user:word@host/a.tar?key=1", "simplecache::s3://bucket/a.tar"])
def test_other_protocols_are_refused_without_secrets(url: str) -> None:
    for use in (file_state, open_bytes):
        with pytest.raises(ConfigError, match="s3://, gs://, http:// or https://") as error:
            use(url, ACCESS)
        assert "word" not in str(error.value) and "key=" not in str(error.value)


def test_access_travels() -> None:
    access = RemoteConfig(cache_dir="/x", cache_gib=1.5, num_retries=3, timeout_s=2.0)
    assert pickle.loads(pickle.dumps(access)) == access
