"""Makes pipelines with averages of other widths than those that a run kept, without training again (docs/ema.md).

    python scripts/posthoc_ema.py runs/x --out averaged --sigma-rel 0.075
    python scripts/posthoc_ema.py runs/x --out averaged --sigma-rel 0.05 0.1 0.15 --step 20000

The run has trained with `ema.sigma_rels` and `ema.snapshot_every`. With several widths the output is a folder of
pipelines, `sigma_rel=0.050` and so on. Everything but the averaged weights is taken from `current_pipeline` of the run.
An average that was never kept is reconstructed as a weighted sum of snapshots (Karras et al. 2024, arXiv:2312.02696,
section 3 and appendix C; profiles are described in `callbacks/ema.py`).
"""

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sd_training.log import quiet_libraries

quiet_libraries()

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sd_training.callbacks.ema import MAX_SIGMA_REL, SNAPSHOTS, STEP, WIDTH, gamma_of, width_name
from sd_training.cli import run_cli
from sd_training.config.schema import PartConfig
from sd_training.config.value_types import path_argument
from sd_training.errors import ConfigError, DataError
from sd_training.export.pipeline import CURRENT, export_pipeline, load_pipeline, trained_parts
from sd_training.models.load import load_part

LARGE_RESIDUAL = 0.02
"""Relative residual above which a reconstruction is rough. Below it, averages of weights on a random walk came within
1e-3 of those that were kept directly (tests/unit/optim/test_power_function_ema.py)."""
_CUT_OFF = 1e-14
"""Directions of the Gram matrix with a smaller share than this are rounding errors (of float64)."""

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Profile:
    """How an average weighs the training that lies behind it."""

    step: int
    """Optimizer steps completed when it was taken, t."""
    gamma: float
    """Exponent γ ≥ 0."""


@dataclass(frozen=True)
class Reconstruction:
    """The best sum of known averages for a wanted one."""

    weights: Vector
    """[N] a weight for every known average; they sum to 1."""
    residual: float
    """Norm of (wanted profile - profile of the sum), divided by the norm of the wanted one; 0 is exact."""


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


def find_snapshots(run_dir: Path) -> list[Snapshot]:
    """All snapshots of a run, by step and width.

    Raises:
        DataError: there are none, or one of them cannot be used.
    """
    found = list[Snapshot]()
    for path in (run_dir / SNAPSHOTS).glob(f"{STEP}*/{WIDTH}*.safetensors"):
        try:
            step, sigma_rel = int(path.parent.name.removeprefix(STEP)), float(path.stem.removeprefix(WIDTH))
            with safe_open(path, framework="pt"):  # a file that was cut off cannot be opened
                pass
        except (SafetensorError, OSError, ValueError) as error:
            raise DataError(
                f"{path}: is damaged or no EMA snapshot ({error}); remove it, reconstructions can do without it"
            ) from error
        if step < 1 or not 0.0 < sigma_rel <= MAX_SIGMA_REL:
            raise DataError(f"{path}: step {step} and sigma_rel {sigma_rel} in its name cannot be; remove it")
        found.append(Snapshot(path, step, sigma_rel))
    if not found:
        raise DataError(
            f"{run_dir / SNAPSHOTS}: has no snapshots; they are kept when the run trains with ema.sigma_rels, such as "
            "ema.sigma_rels=[0.05,0.10], and ema.snapshot_every"
        )
    return sorted(found, key=lambda snapshot: (snapshot.step, snapshot.sigma_rel))


def inner_products(rows: Sequence[Profile], columns: Sequence[Profile]) -> Matrix:
    """[R, C] integrals of the products of two profiles over the training (algorithm 3).

    With s the shorter and t the longer training, (γs + 1) (γt + 1) (s / t)^γt / ((γs + γt + 1) t). The power is taken
    through logarithms of float64, so a large γ gives 0, not an overflow.
    """
    row_steps, row_gammas = np.array([(row.step, row.gamma) for row in rows], dtype=np.float64).T[..., None]
    steps, gammas = np.array([(column.step, column.gamma) for column in columns], dtype=np.float64).T
    log_ratio = np.log(row_steps) - np.log(steps)
    log_power = np.where(log_ratio < 0, gammas * log_ratio, -row_gammas * log_ratio)
    longer = np.maximum(row_steps, steps)
    return (row_gammas + 1) * (gammas + 1) * np.exp(log_power) / ((row_gammas + gammas + 1) * longer)


def reconstruct(known: Sequence[Profile], wanted: Profile) -> Reconstruction:
    """Weights whose sum of known averages is nearest to the wanted one: least squares over profiles (algorithm 3).

    The weights sum to 1, so that a weight of the network that never moved comes back exactly. (The paper's solution
    has a sum near 1; its code divides by the sum afterwards. Here the sum is a condition of the fit.)

    Args:
        known: profiles of the snapshots; at least one.
        wanted: the profile to rebuild.
    """
    norms = np.sqrt(np.diagonal(inner_products(known, known)))
    norm = math.sqrt(inner_products([wanted], [wanted])[0, 0])
    # Profiles of length 1, weighted by y = x · norms / norm: all entries lie in [0, 1] whatever t and γ are.
    gram = inner_products(known, known) / np.outer(norms, norms)
    match = inner_products(known, [wanted])[:, 0] / (norms * norm)
    sums = norm / norms  # Σ x = sums · y = 1
    free, shift = np.linalg.lstsq(gram, np.stack([match, sums], axis=1), rcond=_CUT_OFF)[0].T
    scaled = free + shift * (1.0 - sums @ free) / (sums @ shift)
    residual_square = 1.0 - 2.0 * scaled @ match + scaled @ gram @ scaled
    return Reconstruction(scaled * sums, math.sqrt(max(0.0, float(residual_square))))


_NEGLIGIBLE = 1e-10
"""Snapshots with a smaller weight are not read: the weights sum to 1."""
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
    with safe_open(snapshot.path, framework="pt") as stored:
        trained = trained_parts(pipeline, stored.keys())
    return {f"{prefix}{name}": p for prefix, part in trained.items() for name, p in part.named_parameters()}


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


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: a value cannot be used.
    """
    low_max = int(MAX_SIGMA_REL * 10_000) / 10_000  # rounded down, so that the number that is named is accepted
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--out", type=path_argument, required=True, help="folder to make")
    parser.add_argument(
        "--sigma-rel", type=float, nargs="+", required=True, help=f"widths, shares of the training up to {low_max}"
    )
    parser.add_argument("--step", type=int, help="average up to this optimizer step (default: the last snapshot)")
    arguments = parser.parse_args(argv)
    problems = [
        f"--sigma-rel: {width} is no width; give numbers above 0 and at most {low_max}"
        for width in arguments.sigma_rel
        if not 0.0 < width <= MAX_SIGMA_REL
    ]
    if arguments.step is not None and arguments.step < 1:
        problems.append(f"--step: is {arguments.step}; give a number of optimizer steps, 1 or more")
    if not arguments.run.is_dir():
        problems.append(f"{arguments.run}: is no folder; give the folder of a run")
    if problems:
        raise ConfigError(problems)
    return arguments


def load_template(run: Path) -> Any:
    """The run's newest export, on the CPU in fp32: a pipeline, or the autoencoder that was trained."""
    folder = run / CURRENT
    if (folder / "model_index.json").is_file():
        return load_pipeline(folder)
    if (folder / "config.json").is_file():
        return load_part("vae", PartConfig(pretrained=str(folder)), seed=0)
    raise ConfigError(f"{folder}: is no pipeline; the run has not saved yet, or its pipeline was moved away")


def make_pipelines(run: Path, out: Path, widths: Sequence[float], step: int | None) -> None:
    """Writes the pipelines one after the other.

    Raises:
        UserError: snapshots or the pipeline cannot be used, or a folder exists.
    """
    targets = {width: out / width_name(width) if len(widths) > 1 else out for width in widths}
    if taken := [path for path in targets.values() if os.path.lexists(path)]:
        raise ConfigError([f"--out: {path} exists; remove it or choose another" for path in taken])
    snapshots = find_snapshots(run)
    steps = sorted({snapshot.step for snapshot in snapshots})
    step = step or steps[-1]
    if step > steps[-1]:
        raise ConfigError(f"--step: is {step}, but the last snapshot of {run} is of step {steps[-1]}")
    template = load_template(run)
    for width, target in targets.items():
        parts, residual = plan_sum(snapshots, step, width)
        print(
            f"sigma_rel={width:g} at step {step:,}: {len(parts)} snapshots, relative residual of the profile "
            f"{residual:.1e}"
        )
        if residual > LARGE_RESIDUAL:
            print(
                f"warning: the residual is above {LARGE_RESIDUAL}, the average is only roughly the one asked for; a "
                f"step that has a snapshot ({', '.join(map(str, steps[-5:]))}, …), more of them (ema.snapshot_every) "
                "or tracks nearer to this width (ema.sigma_rels) would help"
            )
        load_sum(parts, averaged_parameters(template, parts[0][0]))
        try:
            export_pipeline(template, target)
        except OSError as error:
            raise ConfigError(f"--out: {error.strerror}") from error
        print(f"written: {target}")


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    arguments = parse_arguments(argv)
    make_pipelines(arguments.run, arguments.out, arguments.sigma_rel, arguments.step)


if __name__ == "__main__":
    run_cli(main)
