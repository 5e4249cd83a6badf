import io
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sd_training.data.sources.base import metadata_of
from sd_training.data.sources.tar import TarSource
from tests import makers
from tests.unit.data.making import ACCESS, scanned

GOOD = {"jpg": makers.encode(makers.picture(0)), "txt": b"caption", "json": b'{"a": 1}'}


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            add(tar, name, data)
    return path


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", **header: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for field, value in header.items():
        setattr(member, field, value)
    tar.addfile(member, io.BytesIO(data))


def test_offsets_lead_to_the_content(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("x/1.JPG", b"image"), ("x/1.txt", b"words"), ("x/1.cls", b" 3\n")])
    scan = scanned(path)
    (sample,) = scan.samples
    content = path.read_bytes()
    read = {role: content[offset : offset + length] for role, (offset, length) in sample.spans.items()}
    assert (sample.key, scan.columns["cls"].to_pylist()) == ("x/1", ["3"])
    assert read == {"image": b"image", "caption": b"words", "cls": b" 3\n"}


def test_keys_with_dots_are_explained(tmp_path: Path) -> None:
    scan = scanned(write_tar(tmp_path / "a.tar", [("1.0.jpg", b"image"), ("1.0.txt", b"words")]))
    assert scan.samples == []
    assert scan.problems.counts == {"image ignored": 1}
    assert scan.problems.text().endswith("1.0.jpg, its extension is 0.jpg; keys have no dots)")


def test_members_need_not_be_neighbours(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.jpg", b"1"), ("2.jpg", b"2"), ("1.txt", b"one"), ("2.txt", b"two")])
    assert [sorted(sample.spans) for sample in scanned(path).samples] == [["caption", "image"]] * 2


def test_what_is_wrong_is_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        add(tar, "1.jpg", b"1")
        add(tar, "1.jpg", b"again")
        add(tar, "2.txt", b"no image")
        add(tar, "3.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(tar, "4.jpg", type=tarfile.CHRTYPE)
        add(tar, "/5.jpg", b"absolute")
        add(tar, "../6.jpg", b"outside")
        add(tar, "7.jpg", b"7")
        add(tar, "7.json", b"[1]")
        add(tar, "8.jpg", b"8")
        add(tar, "8.json", b"{broken")
    scan = scanned(path)
    assert [sample.key for sample in scan.samples] == ["7", "8"]
    assert scan.problems.counts == {
        "image size cannot be determined": 2,
        "sample with a second image ignored": 1,
        "image missing": 1,
        "link, device or sparse member ignored": 2,
        "member with an unsafe name ignored": 2,
        "metadata is not a JSON object": 2,
    }
    assert scan.problems.examples["image missing"] == [(str(path), "2", "image missing", None)]
    assert "2" in scan.problems.text()


def test_a_cut_at_any_byte_keeps_complete_samples_only(tmp_path: Path) -> None:
    whole = makers.write_shard(tmp_path / "a.tar", [{"__key__": f"{i}", **GOOD} for i in range(3)])
    content = whole.read_bytes()
    complete = scanned(whole).samples
    ends = [max(offset + length for offset, length in sample.spans.values()) for sample in complete]
    path = tmp_path / "cut.tar"
    for cut in range(1, ends[-1] + 512, 71):
        path.write_bytes(content[:cut])
        scan = scanned(path)
        kept = [sample.spans for sample in scan.samples]
        # The first sample has none before it to be compared with: a cut between its members leaves what was there.
        partial_first = cut < ends[0] and len(kept) == 1
        assert partial_first or kept == [s.spans for s, end in zip(complete, ends, strict=True) if end <= cut], cut
        assert scan.problems.total() > 0, cut


def test_no_end_mark_but_complete(tmp_path: Path) -> None:
    whole = makers.write_shard(tmp_path / "a.tar", [{"__key__": f"{i}", **GOOD} for i in range(3)])
    end = max(offset + length for offset, length in scanned(whole).samples[-1].spans.values())
    whole.write_bytes(whole.read_bytes()[: -(-end // 512) * 512])
    scan = scanned(whole)
    assert len(scan.samples) == 3
    assert scan.problems.counts == {"shard is truncated or damaged": 1}


def test_a_damaged_header_in_the_middle_is_no_silent_end(tmp_path: Path) -> None:
    path = makers.write_shard(tmp_path / "a.tar", [{"__key__": f"{i}", **GOOD} for i in range(4)])
    content = bytearray(path.read_bytes())
    offset = min(span[0] for span in scanned(path).samples[2].spans.values())
    content[offset - 512 : offset - 12] = b"\xff" * 500
    path.write_bytes(bytes(content))
    scan = scanned(path)
    assert [sample.key for sample in scan.samples] == ["0", "1"]
    assert scan.problems.counts == {"shard is truncated or damaged": 1}


@pytest.mark.parametrize("content", [b"", b"not a tar" * 1000, b"\x1f\x8b" + bytes(600)])
def test_no_tar_at_all(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(content)
    scan = scanned(path)
    assert scan.samples == []
    assert scan.problems.counts == {"shard is not an uncompressed tar file": 1}


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("\udcff.jpg", b"1"), ("\udcff.txt", b"1")])
    (sample,) = scanned(path).samples
    sample.key.encode("utf-8")
    assert sorted(sample.spans) == ["caption", "image"]


def test_a_sample_whose_last_member_is_cut_is_left_out_wherever_it_began(tmp_path: Path) -> None:
    """Members of a sample need not be neighbours."""
    members = [("0.jpg", GOOD["jpg"]), ("1.jpg", GOOD["jpg"]), ("1.txt", b"one"), ("0.txt", b"x" * 2000)]
    path = write_tar(tmp_path / "a.tar", members)
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"x" * 2000) + 1000])
    scan = scanned(path)
    assert [sample.key for sample in scan.samples] == ["1"]
    assert scan.problems.counts == {"shard is truncated or damaged": 1, "sample cut off with its shard": 1}


def test_metadata_scalars() -> None:
    text = '{"n": 1, "f": 0.5, "s": "512", "t": true, "z": null, "x": NaN, "l": [1], "o": {}, "big": 1%s}' % ("0" * 400)
    reported: list[tuple[str, str]] = []

    def report(key: str, reason: str) -> None:
        reported.append((key, reason))

    assert metadata_of("a", text.encode(), report) == {"n": 1.0, "f": 0.5, "s": "512", "t": "true"} and not reported
    for bad in ("", "[1]", "1", '"x"', "{", '{"a": 1}}'):
        assert metadata_of(bad, bad.encode(), report) == {}
        assert reported.pop() == (bad, "metadata is not a JSON object")


@pytest.mark.parametrize("between", [b"", bytes(512), bytes(3 << 20)])
def test_what_follows_an_end_mark_is_named_and_not_read(tmp_path: Path, between: bytes) -> None:
    """`cat 0.tar 1.tar > both.tar`; zeros alone only fill up the last block."""
    parts = [
        makers.write_shard(tmp_path / f"{n}.tar", makers.caption_samples(3, first=3 * n)).read_bytes() for n in (0, 1)
    ]
    path = tmp_path / "both.tar"
    path.write_bytes(parts[0] + between)
    assert scanned(path).problems.total() == 0
    path.write_bytes(between.join(parts))
    scan = scanned(path)
    assert [sample.key for sample in scan.samples] == [f"{i:06d}" for i in range(3)]
    assert scan.problems.counts == {"shard goes on after its end mark": 1}


def test_damaged_image_headers_are_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("1.jpg", b"no image"), ("1.txt", b"words")])
    assert scanned(path).problems.text() == f"image size cannot be determined 1 (first: {path} 1)"


def test_keys_with_dots_beside_good_ones_are_named(tmp_path: Path) -> None:
    image = makers.encode(makers.picture(0))
    names = ["1.jpg", "1.txt", "2.0.jpg", "2.0.json", "3.jpg", "3.seg.png"]
    path = write_tar(tmp_path / "a.tar", [(name, image if name.endswith("g") else b"{}") for name in names])
    scan = scanned(path)
    assert [sample.key for sample in scan.samples] == ["1", "3"]  # 3.seg.png is a picture of sample 3, not a sample
    assert {(problem.key, problem.reason) for problem in scan.problems.named()} == {
        ("2.0.jpg", "image ignored: its extension is 0.jpg; keys have no dots"),
    }


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    image = makers.encode(makers.picture(0))
    bom = b"\xef\xbb\xbf"
    path = write_tar(tmp_path / "a.tar", [("1.jpg", image), ("1.json", bom + b'{"a": 1}'), ("1.cls", bom + b"3")])
    scan = scanned(path)
    assert scan.columns["number:a"].to_pylist() == [1.0] and scan.columns["cls"].to_pylist() == ["3"]
    assert scan.problems.total() == 0


@pytest.mark.parametrize("second", [["1.jpg", "1.txt"], ["1.txt", "1.jpg"], ["1.txt", "1.png"], ["1.png"]])
def test_a_sample_of_which_a_part_comes_twice_is_left_out(tmp_path: Path, second: list[str]) -> None:
    """Which image belongs to which caption is not known."""
    image = makers.encode(makers.picture(0))
    path = write_tar(tmp_path / "a.tar", [(name, image) for name in ["1.jpg", "2.jpg", *second]])
    scan = scanned(path)
    assert [sample.key for sample in scan.samples] == ["2"]
    assert scan.problems.counts == {"sample with a second image ignored": 1}


def test_a_parquet_file_beside_a_shard_is_not_read(tmp_path: Path) -> None:
    """img2dataset writes one; its metadata are those of the JSON members."""
    path = makers.write_shard(tmp_path / "0.tar", [{"__key__": "0012", **GOOD}])
    before = TarSource([str(path)], ACCESS).shards()
    pq.write_table(pa.table({"key": ["12"], "a": [7]}), tmp_path / "0.parquet")
    assert TarSource([str(path)], ACCESS).shards() == before
    assert scanned(path).columns["number:a"].to_pylist() == [1.0]
