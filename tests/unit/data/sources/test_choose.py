from pathlib import Path

import pytest

from sd_training.config.data_schema import RemoteConfig, SourceParams
from sd_training.data.sources.choose import expand_shards, make_source
from sd_training.errors import ConfigError, DataError
from tests.unit.data.locked_folder import locked


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("000.tar", "001.tar", "002.tar", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    return tmp_path


ACCESS = RemoteConfig(num_retries=0, timeout_s=5)


def names(shards: list[str]) -> list[str]:
    assert all(Path(shard).is_absolute() for shard in shards)
    return [Path(shard).name for shard in shards]


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
    assert names(expand_shards(f"{folder}/{pattern}", ACCESS)) == expected


def test_list_keeps_its_order_and_duplicates_are_read_once(folder: Path) -> None:
    shards = expand_shards([f"{folder}/002.tar", f"{folder}/*.tar"], ACCESS)
    assert names(shards) == ["002.tar", "000.tar", "001.tar"]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("none.tar", "does not exist"),
        ("x*.tar", "matches no file"),
        ("00{2..9}.tar", "003.tar' does not exist"),
        ("{000..00", "cannot be expanded"),
    ],
)
def test_what_is_missing_is_named(folder: Path, pattern: str, said: str) -> None:
    with pytest.raises(DataError) as error:
        expand_shards(f"{folder}/{pattern}", ACCESS)
    assert said in str(error.value)
    assert pattern in str(error.value)
    assert "dataset.params.path" in str(error.value)


def test_empty_folder_and_empty_list(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no"):
        expand_shards(str(tmp_path), ACCESS)
    for path in ([], ""):
        with pytest.raises(DataError, match="is empty"):
            make_source("WebDataset", SourceParams(path=path), ACCESS)


def test_the_kind_of_files_in_a_folder(folder: Path) -> None:
    assert names(expand_shards(str(folder), ACCESS, extensions=(".txt", ".csv"))) == ["notes.txt"]
    with pytest.raises(DataError, match=r"holds no \*\.csv or \*\.tsv file"):
        expand_shards(str(folder), ACCESS, extensions=(".csv", ".tsv"))


def test_file_urls_are_local(folder: Path) -> None:
    assert names(expand_shards(f"file://{folder}/00{{0..1}}.tar", ACCESS)) == ["000.tar", "001.tar"]
    with pytest.raises(DataError, match="does not exist"):
        expand_shards(f"file://{folder}/x.tar", ACCESS)


def test_pipes_are_refused_unless_allowed_and_never_run_here(tmp_path: Path) -> None:
    entry = f"pipe:touch {tmp_path}/canary; echo s3://{{1..2}}"
    with pytest.raises(DataError, match=r"dataset\.params\.path.*dataset\.params\.allow_pipe=true"):
        expand_shards(entry, ACCESS)
    commands = [entry.replace("{1..2}", number) for number in "12"]
    assert expand_shards(entry, ACCESS, allow_pipe=True) == commands
    assert not (tmp_path / "canary").exists()


def test_backslashes_of_a_command_are_the_shells() -> None:
    entry = r"pipe:sed 's/\./,/' {a,b}\ c.tar"
    assert expand_shards(entry, ACCESS, allow_pipe=True) == [rf"pipe:sed 's/\./,/' {name}\ c.tar" for name in "ab"]


@pytest.mark.parametrize("path", ["ftp://host/a.tar", "simplecache::s3://bucket/a.tar"])
def test_other_protocols_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.params\.path.*is not read"):
        expand_shards(path, ACCESS)


def test_remote_names_need_no_request() -> None:
    # Nobody answers at this address.
    braces = expand_shards(["s3://bucket/{00..02}.tar", "http://127.0.0.1:9/x.tar", "s3://bucket/01.tar"], ACCESS)
    assert braces == [*(f"s3://bucket/0{number}.tar" for number in range(3)), "http://127.0.0.1:9/x.tar"]
    assert expand_shards("http://127.0.0.1:9/a?name=[b]*", ACCESS) == ["http://127.0.0.1:9/a?name=[b]*"]


@pytest.mark.parametrize("path", ["http://127.0.0.1:9/d/", "https://127.0.0.1:9/d/[abn].*"])
def test_web_servers_are_not_asked_for_their_files(path: str) -> None:
    with pytest.raises(DataError, match=r"web servers do not list files; name them by braces"):
        expand_shards(path, ACCESS)


def test_a_folder_gives_no_hidden_files_and_any_case(folder: Path) -> None:
    for name in ("._000.tar", "003.TAR"):
        (folder / name).write_bytes(b"")
    (folder / "itself").symlink_to(folder / "itself")
    (folder / "gone.tar").symlink_to(folder / "nowhere")  # found missing when it is looked at, not left out
    expected = ["000.tar", "001.tar", "002.tar", "003.TAR", "gone.tar"]
    assert names(expand_shards(str(folder), ACCESS)) == expected


def test_shards_in_folders_below_are_named_by_a_pattern(folder: Path) -> None:
    (folder / "below" / "part").mkdir(parents=True)
    (folder / "below" / "part" / "1.tar").write_bytes(b"")
    one_below = r"; folders below it hold 1, such as '.*part/1\.tar'; write '.*/below/\*\.tar' or '.*/below/\*/\*\.tar'"
    with pytest.raises(DataError, match=rf"below' holds no \*\.tar file{one_below}"):
        expand_shards(f"{folder}/below", ACCESS)
    assert names(expand_shards(f"{folder}/below/*/*.tar", ACCESS)) == ["1.tar"]
    (folder / "below" / "0.tar").write_bytes(b"")  # beside them, they would be left out silently
    with pytest.raises(DataError, match=rf"below' holds 1 files of \*\.tar{one_below}"):
        expand_shards(f"{folder}/below", ACCESS)
    assert names(expand_shards(f"{folder}/below/*.tar", ACCESS)) == ["0.tar"]


@pytest.mark.parametrize("pattern", ["{}/locked", "{}/*/*.tar", "{}/loc*/x", "{}/locked/*"])
def test_what_may_not_be_listed_is_an_error(folder: Path, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "open").mkdir()
    (folder / "open" / "1.tar").write_bytes(b"")
    locked(folder / "locked", monkeypatch)
    with pytest.raises(DataError, match=r"dataset\.params\.path: '.*/locked.*' cannot be read: Permission denied"):
        expand_shards(pattern.format(folder), ACCESS)
    assert names(expand_shards(f"{folder}/*.tar", ACCESS)) == ["000.tar", "001.tar", "002.tar"]
