from pathlib import Path

import pytest

from sd_training.data.shards import expand_shards
from sd_training.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("000.tar", "001.tar", "002.tar", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    return tmp_path


def names(shards: list[Path]) -> list[str]:
    assert all(shard.is_absolute() for shard in shards)
    return [shard.name for shard in shards]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("001.tar", ["001.tar"]),
        ("", ["000.tar", "001.tar", "002.tar"]),
        ("*.tar", ["000.tar", "001.tar", "002.tar"]),
        ("00[02].tar", ["000.tar", "002.tar"]),
        ("{000..002}.tar", ["000.tar", "001.tar", "002.tar"]),
        ("{002,000}.tar", ["002.tar", "000.tar"]),
        ("00{0..1}*", ["000.tar", "001.tar"]),
    ],
)
def test_every_form(folder: Path, pattern: str, expected: list[str]) -> None:
    assert names(expand_shards(f"{folder}/{pattern}")) == expected


def test_list_keeps_its_order_and_duplicates_are_read_once(folder: Path) -> None:
    shards = expand_shards([f"{folder}/002.tar", f"{folder}/*.tar"])
    assert names(shards) == ["002.tar", "000.tar", "001.tar"]


def test_a_name_with_braces_that_exists_is_a_name(folder: Path) -> None:
    (folder / "{a,b}.tar").write_bytes(b"")
    assert names(expand_shards(f"{folder}/{{a,b}}.tar")) == ["{a,b}.tar"]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("none.tar", "does not exist"),
        ("x*.tar", "matches no file"),
        ("{100..120}.tar", "stands for 21 files and none exists"),
        ("{000..009}.tar", "7 files of the pattern"),
        ("{000..00", "cannot be expanded"),
    ],
)
def test_what_is_missing_is_named(folder: Path, pattern: str, said: str) -> None:
    with pytest.raises(DataError) as error:
        expand_shards(f"{folder}/{pattern}")
    assert said in str(error.value)
    assert pattern in str(error.value)
    assert "dataset.params.path" in str(error.value)


def test_first_missing_files_are_listed(folder: Path) -> None:
    with pytest.raises(DataError, match=r"003\.tar.*004\.tar.*005\.tar, …"):
        expand_shards(f"{folder}/{{000..009}}.tar")


def test_empty_folder_and_empty_list(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no"):
        expand_shards(str(tmp_path))
    with pytest.raises(DataError, match="list is empty"):
        expand_shards([])


@pytest.mark.parametrize("path", ["pipe:touch {canary}", "s3://bucket/{{000..010}}.tar", "https://example.com/a.tar"])
def test_pipes_and_urls_are_refused(tmp_path: Path, path: str) -> None:
    canary = tmp_path / "canary"
    with pytest.raises(DataError, match=r"dataset\.params\.path"):
        expand_shards(path.format(canary=canary))
    assert not canary.exists()
