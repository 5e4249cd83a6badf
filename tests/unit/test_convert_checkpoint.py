"""Pickled checkpoints are converted without running what is in them."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scripts import convert_checkpoint
from scripts.convert_checkpoint import SPARE_BYTES, convert, limit_resources, load
from sd_training.errors import DataError
from tests.faults.hostile_files import canary_pickle
from tests.integration.commands import forked

ROOT = Path(__file__).parents[2]


class Makes:
    """Unpickling it makes a folder."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def test_tensors_by_name(tmp_path: Path) -> None:
    one = torch.arange(4.0).reshape(2, 2)
    torch.save({"state_dict": {"a": one, "b": one.t()}, "epoch": 3, "optimizer": {"m": one}}, tmp_path / "x.ckpt")
    assert convert(tmp_path / "x.ckpt", tmp_path / "x.safetensors") == 2
    stored = load_file(tmp_path / "x.safetensors")
    assert torch.equal(stored["a"], one) and torch.equal(stored["b"], one.t())
    assert list(load(tmp_path / "x.ckpt", "optimizer")) == ["m"]
    torch.save({"ema": [one, {"c": one}], "n": 1}, tmp_path / "y.pt")
    assert list(load(tmp_path / "y.pt")) == ["ema.0", "ema.1.c"]
    with pytest.raises(DataError, match="has no entry 'nothing'; it has ema, n"):
        load(tmp_path / "y.pt", "nothing")
    torch.save({"n": 1}, tmp_path / "z.pt")
    with pytest.raises(DataError, match="holds no tensors"):
        load(tmp_path / "z.pt")


def doubled(found: Any) -> Any:
    """The same list in 2²⁶ places."""
    for _ in range(26):
        found = [found, found]
    return found


def with_itself() -> Any:
    found: list[Any] = [torch.zeros(1)]
    found.append({"again": (found,)})
    return found


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({1: torch.zeros(1), "1": torch.ones(1)}, "two of its tensors have the name '1'"),
        ({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, "two of its tensors have the name 'a.b'"),
        (with_itself(), "nested too deeply, or holds itself"),
        ({"a": torch.eye(2).to_sparse()}, r"tensor 'a' \(torch.sparse_coo\) cannot be stored: "),
        (doubled([]), "more than 1,000,000 entries"),
        (doubled([torch.zeros(1)]), "more than 1,000,000 entries"),
    ],
)
def test_what_has_no_plain_names_is_refused(
    content: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert_checkpoint, "MAX_ENTRIES", 1_000_000)
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(DataError, match=f"x.pt: {said}"):
        convert(tmp_path / "x.pt", tmp_path / "out.safetensors")
    assert not list(tmp_path.glob("out*"))


def test_a_container_may_be_in_two_places(tmp_path: Path) -> None:
    shared = [torch.ones(1)]
    torch.save({"a": shared, "b": shared}, tmp_path / "x.pt")
    assert list(load(tmp_path / "x.pt")) == ["a.0", "b.0"]


def test_nothing_runs_and_there_is_no_way_round(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    tensors = {"a": torch.zeros(2)}
    torch.save({"state_dict": tensors, "x": Makes(canary)}, tmp_path / "new.ckpt")
    torch.save({"state_dict": tensors, "x": Makes(canary)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pt").write_bytes(canary_pickle(canary))
    with zipfile.ZipFile(tmp_path / "jit.pt", "w") as archive:
        archive.writestr("jit/code/__torch__.py", "import os")
        archive.writestr("jit/constants.pkl", canary_pickle(canary))
        archive.writestr("jit/data.pkl", canary_pickle(canary))
        archive.writestr("jit/version", "3\n")
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in ("new.ckpt", "old.bin", "plain.pt", "jit.pt", "empty.pt"):
        with pytest.raises(DataError, match=r"it is not opened|cannot be read"):
            convert(tmp_path / name, tmp_path / "out.safetensors")
    assert not canary.exists() and not list(tmp_path.glob("out*"))


def test_the_command_has_a_process_without_rights(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "good.pt")
    command = [sys.executable, str(ROOT / "scripts" / "convert_checkpoint.py")]

    words = [*command, "good.pt", "good.safetensors"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "1 tensor," in done.stdout and "opened with" in done.stdout
    assert load_file(tmp_path / "good.safetensors")["a"].shape == (2,)
    (tmp_path / "folder.pt").mkdir()
    for given, reason in (
        (("none.pt", "x.safetensors"), "no such file"),
        (("good.pt", "good.safetensors"), "exists"),
        (("good.pt", "x.bin"), "must be a"),
        (("folder.pt", "x.safetensors"), "folder.pt: is no pipeline folder"),
        (("good.pt", "good.pt/x.safetensors"), "must be a *.safetensors file in a folder that exists"),
        (("good.pt", "/proc/x.safetensors"), "/proc/x.safetensors: cannot be written: "),
    ):
        done = forked(command[1], *given, cwd=tmp_path)
        assert (done.returncode, reason in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


def test_memory_has_a_limit() -> None:
    if (child := os.fork()) == 0:
        limit_resources(0)
        try:
            bytearray(SPARE_BYTES + (1 << 28))
        except MemoryError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
