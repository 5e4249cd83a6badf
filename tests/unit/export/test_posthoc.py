"""Which snapshots are added up, and what they are added up into."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sd_training.errors import DataError
from sd_training.export import ema_snapshots as posthoc
from sd_training.export.ema_snapshots import (
    Mixture,
    Snapshot,
    averaged_parameters,
    find_snapshots,
    load_mixture,
    plan_mixture,
    write_snapshot,
)
from tests import makers


def snapshots(steps: range, widths: tuple[float, ...] = (0.05, 0.1)) -> list[Snapshot]:
    """Not on disk: a plan needs no files."""
    return [Snapshot(Path(f"{step}-{width}"), step, width) for step in steps for width in widths]


def test_later_snapshots_are_used_for_a_step_between_two_only() -> None:
    known = snapshots(range(100, 1001, 100))
    at = plan_mixture(known, 700, 0.075)
    between = plan_mixture(known, 750, 0.075)
    assert max(s.step for s, _ in at.parts) == 700 and at.residual < 0.02
    assert max(s.step for s, _ in between.parts) == 800 and 0.3 < between.residual < 0.5
    assert sum(weight for _, weight in between.parts) == pytest.approx(1)


def test_a_kept_track_needs_its_own_file_only() -> None:
    mixture = plan_mixture(snapshots(range(100, 1001, 100)), 1000, 0.1)
    assert [(s.step, s.sigma_rel) for s, _ in mixture.parts] == [(1000, 0.1)]
    assert mixture.parts[0][1] == pytest.approx(1, abs=1e-12)


def written(run_dir: Path, values: dict[float, dict[str, Tensor]], dtype: torch.dtype = torch.float32) -> Mixture:
    """A mixture of snapshots with these weights."""
    mixture = []
    for step, (weight, tensors) in enumerate(values.items(), 1):
        path = write_snapshot(run_dir, step, 0.05, tensors, dtype)
        mixture.append((next(s for s in find_snapshots(run_dir) if s.path == path), weight))
    return Mixture(mixture, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_exact_in_spite_of_both_signs(tmp_path: Path, dtype: torch.dtype) -> None:
    last_bit = 2**-22 if dtype == torch.float32 else 0.0  # of 3 in fp32; lost if sums were fp32, too
    base, small = torch.full((3, 2), 3.0 + last_bit), torch.tensor([[1.0], [2.0], [4.0]]) / 64
    mixture = written(tmp_path, {1000.5: {"a": base}, -999.5: {"a": base + small}}, dtype)
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    load_mixture(mixture, {"a": parameter})
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
        load_mixture(written(tmp_path, {0.5: good, 0.4: odd}), parameters)
    assert all(not p.any() for p in parameters.values())


@pytest.mark.parametrize(("limit", "groups"), [(1, 3), (4, 2), (6, 1)])
def test_one_file_at_a_time_and_few_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, groups: int
) -> None:
    mixture = written(
        tmp_path, {w: {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)} for w in (0.2, 0.3, 0.5)}
    )
    opened, most, calls, opener = 0, 0, 0, posthoc.safe_open

    class Counting:
        def __init__(self, *args: object, **options: object) -> None:
            self.file = opener(*args, **options)

        def __enter__(self) -> object:
            nonlocal opened, most, calls
            opened, calls = opened + 1, calls + 1
            most = max(most, opened)
            return self.file.__enter__()

        def __exit__(self, *error: object) -> None:
            nonlocal opened
            opened -= 1
            self.file.__exit__(*error)

    monkeypatch.setattr(posthoc, "safe_open", Counting)
    monkeypatch.setattr(posthoc, "_GROUP_VALUES", limit)
    parameters = {name: torch.nn.Parameter(torch.zeros(n)) for name, n in (("a", 2), ("b", 3), ("c", 1))}
    load_mixture(mixture, parameters)
    assert most == 1 and calls == 3 + 3 * groups  # one look at the names, then one per group
    assert all(torch.equal(p.detach(), torch.ones_like(p)) for p in parameters.values())


def test_names_of_a_denoiser_of_trained_text_encoders_and_of_an_autoencoder() -> None:
    pipeline, vae = makers.tiny_pipeline(), makers.tiny_vae()
    alone = averaged_parameters(pipeline, ["conv_in.weight"])
    assert alone.keys() == dict(pipeline.unet.named_parameters()).keys()
    assert alone["conv_in.weight"] is pipeline.unet.conv_in.weight
    both = averaged_parameters(pipeline, ["denoiser.conv_in.weight", "text_encoder.final"])
    assert both["denoiser.conv_in.weight"] is pipeline.unet.conv_in.weight
    assert {name.split(".")[0] for name in both} == {"denoiser", "text_encoder"}
    assert averaged_parameters(vae, ["x"]).keys() == dict(vae.named_parameters()).keys()
