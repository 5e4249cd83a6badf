from pathlib import Path

import pytest
from PIL import Image

from sd_training.errors import DataError
from sd_training.export.draw import picture_grid, read_captions, read_rows


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "captions.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_grid_places_pictures_row_by_row() -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    grid = picture_grid([Image.new("RGB", (4, 3), colour) for colour in colours], columns=2)
    assert grid.size == (8, 6)
    assert [grid.getpixel(xy) for xy in ((0, 0), (7, 2), (3, 5), (4, 3))] == [*colours, (0, 0, 0)]


def test_grid_of_other_sizes_and_modes() -> None:
    grid = picture_grid([Image.new("L", (2, 5), 9), Image.new("RGBA", (4, 1), (1, 2, 3, 255))], columns=5)
    assert (grid.size, grid.mode) == ((8, 5), "RGB")
    assert grid.getpixel((1, 4)) == (9, 9, 9) and grid.getpixel((7, 0)) == (1, 2, 3)


def test_captions_in_file_order_with_any_column_order(tmp_path: Path) -> None:
    path = write(tmp_path, '\ufeffCaption,extra,UID\n"a cat, asleep",1,b7\n"two\nlines",2,a1\n\n,3,c\n')
    assert read_captions(path) == [("b7", "a cat, asleep"), ("a1", "two\nlines"), ("c", "")]


def test_path_like_uids_stay_inside_the_folder(tmp_path: Path) -> None:
    pairs = read_captions(write(tmp_path, "uid,caption\n../../etc/x,a\n..,b\n.hid,c\na%2Fb,d\na/b,e\nC:\\x,f\n"))
    stems = [stem for stem, _ in pairs]
    assert len(set(stems)) == 6
    for stem in stems:
        assert (tmp_path / f"{stem}.png").resolve().parent == tmp_path.resolve()
        assert not set(stem) & set("/\\:") and not stem.startswith(".")


def test_plain_names_stay_as_they_are(tmp_path: Path) -> None:
    assert read_captions(write(tmp_path, "uid,caption\nCOCO_000123-x.y,a\n")) == [("COCO_000123-x.y", "a")]


def test_numbered_when_uids_are_optional(tmp_path: Path) -> None:
    path = write(tmp_path, "prompt\na\nb\n")
    rows = read_rows(path, caption_columns=("caption", "prompt"), needs_uid=False)
    assert [(stem, row["caption"]) for stem, row in rows.items()] == [("000000", "a"), ("000001", "b")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,caption\n1,a\n", "uid and caption; it has id, caption"),
        ("", "it has none"),
        ("uid,caption\n1,a\n2,b\n1,c\n", "line 4: uid '1' appears twice"),
        ("uid,caption\n1,a cat, asleep\n", "line 2: 3 cells"),
        ("uid,caption\n1\n", "line 2: 1 cells"),
        ("uid,caption\n,a\n", "line 2: uid ''"),
        ("uid,caption\n" + "x" * 300 + ",a\n", "cannot be a file name"),
        ('uid,caption\n1,"a"b\n', "cannot be read as a CSV file"),
        (b"uid,caption\n1,\xff\n", "UTF-8"),
    ],
)
def test_bad_tables_are_named(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(DataError) as caught:
        read_captions(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.csv"):
        read_captions(tmp_path / "nowhere.csv")
