"""Snapshots of averages, and averages made from them."""

import resource
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.posthoc_ema import (
    Snapshot,
    WeightedSnapshots,
    averaged_parameters,
    find_snapshots,
    load_sum,
    plan_sum,
)
from sd_training.callbacks.ema import gamma_of, snapshot_path, width_name, write_snapshot
from sd_training.errors import DataError
from tests import makers


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a.weight": torch.randn(4, 3, generator=generator).t(), "b": torch.randn(5, generator=generator)}


def test_a_snapshot_comes_back(tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, 20, 0.05, tensors())
    assert path == tmp_path / "ema_snapshots/step=20/sigma_rel=0.050.safetensors"
    stored = load_file(path)
    assert {name: t.dtype for name, t in stored.items()} == dict.fromkeys(("a.weight", "b"), torch.float32)
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors().items())
    (snapshot,) = find_snapshots(tmp_path)
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


def test_a_damaged_file_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"has no snapshots; .*ema\.sigma_rels=\[0\.05,0\.10\], and ema\.snapshot_every"
    ):
        find_snapshots(tmp_path / "other")
    path = write_snapshot(tmp_path, 20, 0.05, tensors())
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"step=20/sigma_rel=0\.050\.safetensors: is damaged"):
        find_snapshots(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("step=20/sigma_rel=many", "no EMA snapshot"),
        ("step=many/sigma_rel=0.050", "no EMA snapshot"),
        ("step=0/sigma_rel=0.050", r"step 0 and sigma_rel 0\.05 in its name cannot be"),
        ("step=20/sigma_rel=0.400", r"sigma_rel 0\.4 in its name cannot be"),
    ],
)
def test_a_name_of_another_kind_is_refused(tmp_path: Path, name: str, said: str) -> None:
    path = write_snapshot(tmp_path, 20, 0.05, tensors())
    other = path.parents[1] / f"{name}.safetensors"
    other.parent.mkdir(exist_ok=True)
    path.rename(other)
    with pytest.raises(DataError, match=said):
        find_snapshots(tmp_path)


@pytest.mark.parametrize("width", [0.05, 0.1, 1 / 7, 0.05 + 1e-12])
def test_the_name_holds_the_width_exactly(tmp_path: Path, width: float) -> None:
    write_snapshot(tmp_path, 20, width, tensors())
    assert [snapshot.sigma_rel for snapshot in find_snapshots(tmp_path)] == [width]


def snapshots(steps: range, widths: tuple[float, ...] = (0.05, 0.1)) -> list[Snapshot]:
    """Not on disk: a plan needs no files."""
    return [Snapshot(Path(f"{step}-{width}"), step, width) for step in steps for width in widths]


def test_later_snapshots_are_used_for_a_step_between_two_only() -> None:
    known = snapshots(range(100, 1001, 100))
    at, residual = plan_sum(known, 700, 0.075)
    assert max(s.step for s, _ in at) == 700 and residual < 0.02
    between, residual = plan_sum(known, 750, 0.075)
    assert max(s.step for s, _ in between) == 800 and 0.3 < residual < 0.5
    assert sum(weight for _, weight in between) == pytest.approx(1)


def test_a_kept_track_needs_its_own_file_only() -> None:
    weighted, _ = plan_sum(snapshots(range(100, 1001, 100)), 1000, 0.1)
    assert [(s.step, s.sigma_rel) for s, _ in weighted] == [(1000, 0.1)]
    assert weighted[0][1] == pytest.approx(1, abs=1e-12)


def written(
    run_dir: Path, values: dict[float, dict[str, Tensor]], dtype: torch.dtype = torch.float32
) -> WeightedSnapshots:
    """A weighted of snapshots with these weights."""
    weighted = []
    for step, (weight, tensors) in enumerate(values.items(), 1):
        path = write_snapshot(run_dir, step, 0.05, tensors)
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path)  # any type is read
        weighted.append((next(s for s in find_snapshots(run_dir) if s.path == path), weight))
    return weighted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_exact_in_spite_of_both_signs(tmp_path: Path, dtype: torch.dtype) -> None:
    last_bit = 2**-22 if dtype == torch.float32 else 0.0  # of 3 in fp32; lost if sums were fp32, too
    base, small = torch.full((3, 2), 3.0 + last_bit), torch.tensor([[1.0], [2.0], [4.0]]) / 64
    weighted = written(tmp_path, {1000.5: {"a": base}, -999.5: {"a": base + small}}, dtype)
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    load_sum(weighted, {"a": parameter})
    assert torch.equal(parameter.detach(), (base.double() - 999.5 * small).float())


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"a": torch.zeros(2)}, r"step=2/.*: 1 tensors do not fit .*, e\.g\. b: missing in the snapshot"),
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, r"e\.g\. c: \(1,\) in the snapshot, missing"),
        ({"a": torch.zeros(4), "b": torch.zeros(3)}, r"e\.g\. a: \(4,\) in the snapshot, \(2,\) in the network"),
    ],
)
def test_snapshots_of_another_network_change_nothing(tmp_path: Path, odd: dict[str, Tensor], said: str) -> None:
    good = {"a": torch.ones(2), "b": torch.ones(3)}
    parameters = {name: torch.nn.Parameter(torch.zeros_like(t)) for name, t in good.items()}
    with pytest.raises(DataError, match=said):
        load_sum(written(tmp_path, {0.5: good, 0.4: odd}), parameters)
    assert all(not p.any() for p in parameters.values())


def test_names_of_a_denoiser_of_trained_text_encoders_and_of_an_autoencoder(tmp_path: Path) -> None:
    def snapshot(step: int, *names: str) -> Snapshot:
        path = write_snapshot(tmp_path, step, 0.05, {name: torch.zeros(1) for name in names})
        return Snapshot(path, step, 0.05)

    pipeline, vae = makers.tiny_pipeline(), makers.tiny_vae()
    alone = averaged_parameters(pipeline, snapshot(1, "conv_in.weight"))
    assert alone.keys() == dict(pipeline.unet.named_parameters()).keys()
    assert alone["conv_in.weight"] is pipeline.unet.conv_in.weight
    both = averaged_parameters(pipeline, snapshot(2, "denoiser.conv_in.weight", "text_encoder.final"))
    assert both["denoiser.conv_in.weight"] is pipeline.unet.conv_in.weight
    assert {name.split(".")[0] for name in both} == {"denoiser", "text_encoder"}
    assert averaged_parameters(vae, snapshot(3, "x")).keys() == dict(vae.named_parameters()).keys()
