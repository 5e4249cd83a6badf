"""Errors of the disk, also inside the texts of other libraries' errors; small files that are replaced."""

import errno
import re
from pathlib import Path

import pytest
from safetensors import SafetensorError

from sd_training.checkpoint.folder import replace_text, system_error, write_failure
from tests.file_size_limit import file_size_limit


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Error while serializing: I/O error: No space left on device (os error 28)", errno.ENOSPC),
        ('Error: IoError(Os { code: 27, kind: FileTooLarge, message: "File too large" })', errno.EFBIG),
        ("InvalidHeaderDeserialization", None),
    ],
)
def test_the_systems_error_is_found(text: str, number: int | None) -> None:
    found = system_error(SafetensorError(text))
    assert (None if found is None else found.errno) == number


def test_a_failed_write_names_cause_folder_and_free_space(tmp_path: Path) -> None:
    error = write_failure("x", tmp_path / "not" / "yet", OSError(errno.ENOSPC, "No space left"))
    assert error.errno == errno.ENOSPC
    assert re.search(r"x could not be written to .*/not/yet: No space left; \d+\.\d\d GiB are free there", str(error))


def test_a_small_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(OSError), file_size_limit(100):
        replace_text(tmp_path / "file", "x" * 200)
    assert (tmp_path / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    (tmp_path / "link").symlink_to("file")
    replace_text(tmp_path / "link", "x" * 200)
    assert (tmp_path / "file").read_text() == "x" * 200 and len(list(tmp_path.iterdir())) == 2


def test_a_device_is_never_replaced() -> None:
    with pytest.raises(OSError, match="No space left"):
        replace_text(Path("/dev/full"), "7\n")
    replace_text(Path("/dev/null"), "7\n")
    assert Path("/dev/full").is_char_device() and Path("/dev/null").is_char_device()
