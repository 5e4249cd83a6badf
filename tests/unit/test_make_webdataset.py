import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from scripts.make_webdataset import main, open_input
from sd_training.config.data_schema import RemoteConfig
from sd_training.data.sources.arrow import ArrowSource
from sd_training.errors import ConfigError
from tests import makers
from tests.unit.data.making import scanned, training_data


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Seven pictures with captions; the third and the fifth cannot be used."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(7):
        (folder / f"{number}.jpg").write_bytes(b"broken" if number == 2 else makers.encode(makers.picture(number)))
        (folder / f"{number}.txt").write_text(f"number\n {number}")
    (folder / "4.txt").unlink()
    return folder


def make(source: Path, out: Path, *words: object) -> dict[str, bytes]:
    """The members of all shards."""
    main([str(source), "--out", str(out), *map(str, words)])
    members = {}
    for path in sorted(out.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                stream = tar.extractfile(member)
                assert stream is not None and member.name not in members
                members[member.name] = stream.read()
    return members


def keys(members: dict[str, bytes]) -> list[int]:
    return sorted({int(name.split(".")[0]) for name in members})


def test_shards_are_whole_numbered_and_the_same_for_any_workers(photos: Path, tmp_path: Path) -> None:
    one = make(photos, tmp_path / "1", "--samples-per-shard", 2, "--workers", 1)
    assert one == make(photos, tmp_path / "3", "--samples-per-shard", 2, "--workers", 3)
    assert keys(one) == [0, 1, 3, 5, 6]
    assert [path.name for path in sorted((tmp_path / "1").glob("*.tar*"))] == [f"0000{i}.tar" for i in range(4)]
    assert one["000000006.jpg"] == (photos / "6.jpg").read_bytes() and one["000000006.txt"] == b"number 6"
    report = json.loads((tmp_path / "1" / "report.json").read_text())
    assert (report["samples"], report["shards"], report["skipped"]) == (5, 4, 2)
    skipped = [json.loads(line) for line in (tmp_path / "1" / "skipped.jsonl").read_text().splitlines()]
    assert [(line["sample"], line["reason"].partition(":")[0]) for line in skipped] == [
        (f"{photos}/2.jpg", "image is not a readable JPEG, PNG or WebP file"),
        (f"{photos}/4.jpg", "caption is missing"),
    ]


@pytest.mark.parametrize(("image_format", "extension"), [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")])
def test_bytes_are_kept_and_sizes_added(tmp_path: Path, image_format: str, extension: str) -> None:
    data = makers.encode(makers.picture(1, 40, 32), image_format)
    (tmp_path / f"a.{extension}").write_bytes(data)
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "a.json").write_text(json.dumps({"score": 0.5, "uid": "007", "original_height": 999, "n": 3}))
    members = make(tmp_path, tmp_path / "out")
    assert members[f"000000000.{extension}"] == data and members["000000000.txt"] == b""
    expected = {"original_width": 40, "original_height": 999, "score": 0.5, "uid": "007", "n": 3}
    assert json.loads(members["000000000.json"]) == expected
    scan = scanned(tmp_path / "out" / "00000.tar")
    assert scan.problems.total() == 0 and scan.columns["number:original_height"].to_pylist() == [999]


@pytest.mark.parametrize("place", ["", "captions"])
def test_metadata_files_are_kept_whole(tmp_path: Path, place: str) -> None:
    """Also what the index leaves out, and what is equal to the caption."""
    folder = tmp_path / "images"
    folder.mkdir()
    (tmp_path / place).mkdir(exist_ok=True)
    for number in range(2):
        (folder / f"{number}.jpg").write_bytes(makers.encode(makers.picture(number)))
        (folder / f"{number}.txt").write_text("a cat")
    metadata = {"title": "a cat", "id": 2**60 + 1, "box": {"xy": [1, 2.5]}, "boxes": [[0, 1]], "none": None}
    beside = tmp_path / place if place else folder
    (beside / "0.json").write_text(json.dumps(metadata))
    (beside / "1.json").write_text("{broken")
    members = make(tmp_path, tmp_path / "out")
    assert keys(members) == [0]
    sizes = {"original_width": 40, "original_height": 32}
    assert json.loads(members["000000000.json"]) == {**sizes, **metadata}
    (line,) = (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()
    assert json.loads(line) == {"sample": f"{folder}/1.jpg", "reason": "metadata is not a JSON object"}


@pytest.mark.parametrize(("size", "expected"), [((40, 32), (20, 16)), ((10, 30), (10, 30)), ((400, 17), (376, 16))])
def test_resize_only_shrinks(tmp_path: Path, size: tuple[int, int], expected: tuple[int, int]) -> None:
    data = makers.encode(makers.picture(1, *size), "PNG")
    (tmp_path / "a.png").write_bytes(data)
    (tmp_path / "a.txt").write_text("a cat")
    members = make(tmp_path, tmp_path / "out", "--resize", 16)
    assert Image.open(io.BytesIO(members["000000000.png"])).size == expected
    assert (members["000000000.png"] == data) == (size == expected)
    assert json.loads(members["000000000.json"])["original_width"] == size[0]


@pytest.mark.parametrize("image", ["bytes", "struct", "path"])
def test_parquet(tmp_path: Path, image: str) -> None:
    data = makers.encode(makers.picture(0))
    (tmp_path / "a.jpg").write_bytes(data)
    cells: dict[str, Any] = {"bytes": data, "struct": {"bytes": data, "path": None}, "path": "a.jpg"}
    columns = {"thumb": [cells[image]] * 2, "words": ["x", None], "n": [1, 2]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    members = make(tmp_path / "t.parquet", tmp_path / "out", "--image-column", "thumb", "--caption-column", "words")
    assert keys(members) == [0] and members["000000000.jpg"] == data and members["000000000.txt"] == b"x"
    assert json.loads(members["000000000.json"])["n"] == 1


def test_shuffle_is_fixed_and_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.jpg").write_bytes(makers.encode(makers.picture(0)))
    for part in range(2):
        rows = range(10 * part, 10 * part + 10)
        table = pa.table({"path": ["a.jpg"] * 10, "text": [str(row) for row in rows]})
        pq.write_table(table, tmp_path / f"p/{part}.parquet", row_group_size=4)
    (tmp_path / "p" / "t.csv").write_text("path,text\n" + "".join(f"a.jpg,{row}\n" for row in range(20)))

    def order(source: Path, out: str, *words: object) -> list[int]:
        members = make(source, tmp_path / source.name / out, *words)
        return [int(members[name]) for name in sorted(members) if name.endswith("txt")]

    for source in (tmp_path / "p", tmp_path / "p" / "t.csv"):
        plain, once = order(source, "a"), order(source, "b", "--shuffle", 1)
        again, other = order(source, "c", "--shuffle", 1), order(source, "d", "--shuffle", 2)
        assert once == again != plain and other != once and sorted(once) == sorted(plain) == list(range(20))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.csv", None, "no such file"),
        ("a.zip", b"PK", "is not a folder"),
        ("a.parquet", b"PAR1 no", "not a readable Parquet file"),
        ("a.csv", b"path,caption\n", "no sample can be used"),
        ("a.csv", b"path,caption\xff\na,b\n", "UTF-8"),
        ("a.csv", b"pixels,caption\na,b\n", "image_column: .* it has pixels, caption"),
        ("", None, "no image file"),
    ],
)
def test_unusable_input(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(Exception, match=said) as error:
        main([str(tmp_path / name), "--out", str(tmp_path / "out")])
    assert type(error.value).__name__ in ("DataError", "ConfigError")


def test_all_of_many_unusable_rows_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(makers.encode(makers.picture(0)))
    rows = "".join(f"missing{number}.jpg,x\n" for number in range(150))
    (tmp_path / "t.csv").write_text(f"path,caption\na.jpg,a\n{rows}")
    make(tmp_path / "t.csv", tmp_path / "out")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["samples"], report["skipped"], list(report["reasons"].values())) == (1, 150, [150])


def test_unpacked_row_groups_leave_room_for_other_files(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [b"x"], "caption": ["x"]}), tmp_path / "t.parquet")
    source = open_input(tmp_path / "t.parquet", None, None, tmp_path)[1]
    assert isinstance(source, ArrowSource) and source.access.cache_gib < RemoteConfig().cache_gib


def test_shards_are_made_from_shards_by_filters_and_trained_on(tmp_path: Path) -> None:
    folder = makers.caption_shards(tmp_path / "laion", shards=3, per_shard=8)
    before = training_data(folder).datasets[0]
    words = ("--filter", "original_width=>=50", "--filter", "uid=not in [u23]", "--resize", 16)
    members = make(folder, tmp_path / "out", *words)
    assert len(keys(members)) == 13
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["samples"], report["filtered_out"], report["skipped"]) == (13, 11, 0)
    data = training_data(tmp_path / "out", kind="WebDataset", filters={"original_width": ">=50"})
    (after,) = data.datasets
    assert len(after.selected) == len(after.index) == 13
    for sample in range(13):
        number = json.loads(members[f"{sample:09d}.json"])
        old = int(number["uid"].removeprefix("u"))
        assert after.reader.caption(sample) == before.reader.caption(old) and number["original_width"] == 40 + old
        assert min(Image.open(io.BytesIO(after.reader.image(sample))).size) == 16
    with pytest.raises(ConfigError, match=r"--filter: original_width: .*>>"):
        make(folder, tmp_path / "wrong", "--filter", "original_width=>>5")
