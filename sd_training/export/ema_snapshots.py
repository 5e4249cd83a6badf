"""Snapshots of power-function averages, the material of a later reconstruction (docs/ema.md).

    RUN/ema_snapshots/step=5000/sigma_rel=0.050.safetensors

holds the average of every parameter of the trained network under its name in the network's state_dict, in fp32, fp16
or bf16. A file is written beside its place, flushed and renamed: one that has its name is whole.

An average that was never kept is reconstructed as a weighted sum of snapshots (`plan_sum`, `load_sum`).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sd_training.checkpoint.folder import flush, flush_file, remove_quietly, write_failure
from sd_training.errors import DataError
from sd_training.optim.power_function_ema import Profile, gamma_of, is_sigma_rel, reconstruct

FOLDER = "ema_snapshots"
"""Its name in a run folder."""
_STEP, _WIDTH = "step=", "sigma_rel="
_PATTERN = f"{_STEP}*/{_WIDTH}*.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """One average at one moment, on disk."""

    path: Path
    step: int
    """Optimizer steps completed."""
    sigma_rel: float

    @property
    def profile(self) -> Profile:
        """How it weighs the training."""
        return Profile(self.step, gamma_of(self.sigma_rel))


def width_name(sigma_rel: float) -> str:
    """`sigma_rel=0.050`: three digits, or all of them where three would not distinguish two widths."""
    text = f"{sigma_rel:.3f}"
    return f"{_WIDTH}{text if float(text) == sigma_rel else repr(float(sigma_rel))}"


def snapshot_path(run_dir: Path, step: int, sigma_rel: float) -> Path:
    """Where the snapshot of a track lies."""
    return run_dir / FOLDER / f"{_STEP}{step}" / f"{width_name(sigma_rel)}.safetensors"


def write_snapshot(
    run_dir: Path, step: int, sigma_rel: float, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> Path:
    """Writes one track; a snapshot of the same step and width is replaced.

    Args:
        run_dir: the run folder.
        step: optimizer steps completed, at an update of the average.
        sigma_rel: width of the track.
        tensors: average by parameter name, on any device.
        dtype: of the file. bf16 rounds by up to 1/256 of every value, fp16 by 1/2048.

    Returns:
        The file.

    Raises:
        OSError: it could not be written; names the file and free space. An older file is as it was.
    """
    path = snapshot_path(run_dir, step, sigma_rel)
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({n: t.detach().to("cpu", dtype).contiguous() for n, t in tensors.items()}, partial)
        flush_file(partial)
        os.replace(partial, path)
        for folder in (path.parent, path.parent.parent, run_dir):
            flush(folder)
    except (OSError, SafetensorError) as error:
        remove_quietly(partial)
        raise write_failure("EMA snapshot", path, error) from error
    return path


def find_snapshots(run_dir: Path) -> list[Snapshot]:
    """All snapshots of a run, by step and width.

    Raises:
        DataError: there are none, or one of them cannot be used.
    """
    found = list[Snapshot]()
    for path in (run_dir / FOLDER).glob(_PATTERN):
        try:
            step, sigma_rel = int(path.parent.name.removeprefix(_STEP)), float(path.stem.removeprefix(_WIDTH))
            with safe_open(path, framework="pt"):  # a file that was cut off cannot be opened
                pass
        except (SafetensorError, OSError, ValueError) as error:
            raise DataError(
                f"{path}: is damaged or no EMA snapshot ({error}); remove it, reconstructions can do without it"
            ) from error
        if step < 1 or not is_sigma_rel(sigma_rel):
            raise DataError(f"{path}: step {step} and sigma_rel {sigma_rel} in its name cannot be; remove it")
        found.append(Snapshot(path, step, sigma_rel))
    if not found:
        raise DataError(
            f"{run_dir / FOLDER}: has no snapshots; they are kept when the run trains with ema.sigma_rels, such as "
            "ema.sigma_rels=[0.05,0.10], and ema.snapshot_every"
        )
    return sorted(found, key=lambda snapshot: (snapshot.step, snapshot.sigma_rel))


_NEGLIGIBLE = 1e-10
"""Snapshots with a smaller weight are not read: the weights sum to 1."""
_DENOISER = "denoiser."
"""Begins the denoiser's names where text encoders are trained beside it."""
WeightedSnapshots: TypeAlias = Sequence[tuple[Snapshot, float]]
"""Snapshots with their weights, which sum to 1; at least one."""


def plan_sum(snapshots: Sequence[Snapshot], step: int, sigma_rel: float) -> tuple[WeightedSnapshots, float]:
    """The snapshots to add up for the average of this width at this step, and the relative residual of its profile, 0
    where it is met exactly.

    Those up to `step` are used and, for a step between two snapshots, the next ones: later ones do not help (the
    residual changes by less than a thousandth).

    Args:
        step: optimizer steps completed; at most that of the last snapshot.
    """
    end = min(snapshot.step for snapshot in snapshots if snapshot.step >= step)
    used = [snapshot for snapshot in snapshots if snapshot.step <= end]
    fit = reconstruct([snapshot.profile for snapshot in used], Profile(step, gamma_of(sigma_rel)))
    parts = [(s, float(weight)) for s, weight in zip(used, fit.weights, strict=True) if abs(weight) > _NEGLIGIBLE]
    return parts, fit.residual


def averaged_parameters(pipeline: Any, snapshot: Snapshot) -> dict[str, nn.Parameter]:
    """The parameters of a pipeline (or of a single network) that the tensors of a snapshot belong to.

    A run that trains text encoders as well stores `denoiser.NAME` and `text_encoder.NAME`, others the network's names.
    """
    if not hasattr(pipeline, "components"):
        return dict(pipeline.named_parameters())
    parts = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    denoiser = parts["unet"] if "unet" in parts else parts["transformer"]
    with safe_open(snapshot.path, framework="pt") as stored:
        if not any(name.startswith(_DENOISER) for name in stored.keys()):  # noqa: SIM118
            return dict(denoiser.named_parameters())
    trained = {_DENOISER[:-1]: denoiser, **{n: part for n, part in parts.items() if n.startswith("text_encoder")}}
    return {f"{n}.{name}": p for n, part in trained.items() for name, p in part.named_parameters()}


@torch.no_grad()
def load_sum(snapshots: WeightedSnapshots, parameters: Mapping[str, Tensor]) -> None:
    """Overwrites the parameters by the sum of the snapshots, which takes 8 bytes of memory per parameter: sums are
    float64, since the weights have both signs. One snapshot after the other is read.

    Raises:
        DataError: names a snapshot and a parameter that do not fit; nothing is overwritten then.
    """
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in expected.items()}
    for snapshot, weight in snapshots:
        with safe_open(snapshot.path, framework="pt") as stored:
            found = {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
            if odd := sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name)):
                raise DataError(
                    f"{snapshot.path}: {len(odd)} tensors do not fit the network of the pipeline, e.g. {odd[0]}: "
                    f"{found.get(odd[0], 'missing')} in the snapshot, {expected.get(odd[0], 'missing')} in the network"
                )
            for name, total in sums.items():
                total.add_(stored.get_tensor(name), alpha=weight)
    for name, total in sums.items():
        parameters[name].copy_(total)
