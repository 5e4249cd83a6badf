"""Snapshots come back as they were written, an unfinished one never has a name, and others are refused."""

import resource
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_training.errors import DataError
from sd_training.export.ema_snapshots import find_snapshots, read_snapshot, snapshot_path, width_name, write_snapshot
from sd_training.optim.power_function_ema import gamma_of

GOOD = {"format": "1", "step": "20", "gamma": repr(gamma_of(0.05)), "sigma_rel": "0.05"}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a.weight": torch.randn(4, 3, generator=generator).t(), "b": torch.randn(5, generator=generator)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_snapshot_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    path = write_snapshot(tmp_path, 20, 0.05, tensors(), dtype)
    assert path == tmp_path / "ema_snapshots/step=20/sigma_rel=0.050.safetensors"
    stored = load_file(path)
    assert {name: t.dtype for name, t in stored.items()} == {"a.weight": dtype, "b": dtype}
    assert all(torch.equal(stored[name], tensor.to(dtype)) for name, tensor in tensors().items())
    snapshot = read_snapshot(path)
    assert (snapshot.path, snapshot.step, snapshot.sigma_rel) == (path, 20, 0.05)
    assert (snapshot.profile.step, snapshot.profile.gamma) == (20, gamma_of(0.05))


def test_snapshots_of_a_run_by_step_and_width(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        for width in (0.1, 0.05):
            write_snapshot(tmp_path, step, width, tensors(step))
    (tmp_path / "ema_snapshots/step=100/sigma_rel=0.200.safetensors.partial").write_bytes(b"half")
    found = [(s.step, s.sigma_rel) for s in find_snapshots(tmp_path)]
    assert found == [(3, 0.05), (3, 0.1), (20, 0.05), (20, 0.1), (100, 0.05), (100, 0.1)]
    write_snapshot(tmp_path, 20, 0.1, tensors(7))
    assert torch.equal(load_file(snapshot_path(tmp_path, 20, 0.1))["b"], tensors(7)["b"])
    assert len(find_snapshots(tmp_path)) == 6


def test_near_widths_have_names_of_their_own(tmp_path: Path) -> None:
    assert [width_name(w) for w in (0.05, 0.1, 0.0505)] == ["sigma_rel=0.050", "sigma_rel=0.100", "sigma_rel=0.0505"]
    for width in (0.05, 0.0504):
        write_snapshot(tmp_path, 20, width, tensors())
    assert [s.sigma_rel for s in find_snapshots(tmp_path)] == [0.05, 0.0504]


def test_whoever_may_read_the_folder_may_read_the_file(tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, 20, 0.05, tensors())
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(path.parent.stat().st_mode) & 0o664


def test_a_full_disk_leaves_the_old_snapshot(tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, 20, 0.05, tensors())
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"EMA snapshot could not be written to .*GiB are free"):
            write_snapshot(tmp_path, 20, 0.05, {"a": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_nothing_is_left_beside_a_name_that_is_taken(tmp_path: Path) -> None:
    path = snapshot_path(tmp_path, 20, 0.05)
    path.mkdir(parents=True)
    with pytest.raises(OSError, match="could not be written to"):
        write_snapshot(tmp_path, 20, 0.05, tensors())
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (None, "has format none, not 1"),
        (GOOD | {"format": "2"}, "has format 2, not 1"),
        ({k: v for k, v in GOOD.items() if k != "gamma"}, "are no numbers"),
        (GOOD | {"step": "many"}, "are no numbers"),
        (GOOD | {"step": "0"}, "step 0 or sigma_rel 0.05 in its metadata cannot be"),
        (GOOD | {"sigma_rel": "0.4"}, "sigma_rel 0.4 in its metadata cannot be"),
        (GOOD | {"gamma": "6.9"}, "gamma 6.9 is not that of sigma_rel 0.05"),
        (GOOD | {"step": "30"}, "holds step 30 and sigma_rel 0.05; give it its name back"),
        (GOOD | {"sigma_rel": "0.1", "gamma": repr(gamma_of(0.1))}, "holds step 20 and sigma_rel 0.1"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, facts: dict[str, str] | None, said: str) -> None:
    path = write_snapshot(tmp_path, 20, 0.05, tensors())
    save_file({"a": torch.zeros(2)}, path, metadata=facts)
    with pytest.raises(DataError, match=said):
        find_snapshots(tmp_path)


def test_a_damaged_file_and_no_file(tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, 20, 0.05, tensors())
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"step=20/sigma_rel=0\.050\.safetensors: is damaged"):
        find_snapshots(tmp_path)
    with pytest.raises(DataError, match=r"has no snapshots; .*ema\.tracks=\[0\.05,0\.10\], and ema\.snapshot_every"):
        find_snapshots(tmp_path / "other")
