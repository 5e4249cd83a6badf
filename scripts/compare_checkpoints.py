"""Is the difference of two checkpoints more than noise? Losses on the same held-out images, noise and noise levels.

    python scripts/compare_checkpoints.py runs/x/checkpoints/step=20000 runs/x/checkpoints/step=30000
    python scripts/compare_checkpoints.py A B validation.path=held_out.tar validation.num_samples=4096 --json rows.json

A and B are checkpoints (RUN/checkpoints/step=N), or run folders: their newest. They stand for the weights that a save
exports, the average where there is one; RUN/checkpoints/step=N/weights are the trained ones, step=N/ema and
step=N/ema-sigma_rel=0.050 an average. Start it in the folder that the run of A was started in: options, objective and
frozen networks are those of A's run, changed by the options that are given here (docs/validation.md).
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sd_training.cli import prepare_cpu, set_passive_wait
from sd_training.log import quiet_libraries

quiet_libraries()
set_passive_wait()

import numpy as np
import torch

from scripts.replay_step import ON_ONE_DEVICE, load_stored
from sd_training.build.data import make_data
from sd_training.build.models import build_model
from sd_training.build.plan import Plan, make_plan
from sd_training.callbacks.ema import EMA_PART
from sd_training.callbacks.run_record import RunRecord
from sd_training.callbacks.validation import noise_levels
from sd_training.checkpoint.folder import replace_text, source_checkpoint
from sd_training.checkpoint.save import OPTIMIZER, WEIGHTS, StoredCheckpoint, load_into, open_checkpoint
from sd_training.cli import run_cli
from sd_training.config.changes import CONFIG, changed_options
from sd_training.config.fields import is_below
from sd_training.config.value_types import path_argument
from sd_training.data.datamodule import HeldOutData
from sd_training.errors import ConfigError, UserError
from sd_training.evaluation.paired import ALPHA, Vector, compare
from sd_training.models.family import autocast
from sd_training.training import TrainedModule

MOST_NOTED = 5
"""Options."""
MANY = 1_000_000
"""Images; where more would be needed, this is said instead."""


class Weights(NamedTuple):
    """One of the two that are compared."""

    name: str
    """For the reader."""
    tensors: Mapping[str, torch.Tensor]
    """Full tensors by their names in the module, read when they are used."""
    stored: StoredCheckpoint

    @property
    def options(self) -> str:
        """The run's configuration when it was saved, as YAML.

        Raises:
            UserError: an early version saved it without.
        """
        try:
            return str(self.stored.state["callbacks"][RunRecord.__name__][CONFIG])
        except (KeyError, TypeError) as error:
            raise UserError(f"{self.name}: the checkpoint does not hold the options of its run") from error


def open_weights(path: Path) -> Weights:
    """Finds them, and verifies the checkpoint.

    Args:
        path: run folder, checkpoint, or a part of one.

    Raises:
        UserError: there is no such checkpoint, or it is damaged, or has no such part.
    """
    is_part = path.parent.name.startswith("step=")
    try:
        folder = source_checkpoint(path.parent if is_part else path)
    except ConfigError as error:
        raise ConfigError([problem.removeprefix("experiment.start_from: ") for problem in error.problems]) from error
    stored = open_checkpoint(folder)
    parts = [part for part in stored.parts if part != OPTIMIZER]
    part = path.name if is_part else EMA_PART if EMA_PART in parts else WEIGHTS
    if part not in parts:
        raise UserError(f"{path}: {folder} has no such weights, but {', '.join(sorted(parts))}")
    tensors = stored.for_new_run((), "", None if part == WEIGHTS else part).parts[WEIGHTS]
    return Weights(f"{folder}/{part}", tensors, stored)


def plan_of(weights: Weights, words: Sequence[str]) -> Plan:
    """The run's options with changes, on one device.

    Raises:
        ConfigError: they cannot be used, or name no held-out data.
    """
    plan = make_plan(load_stored(weights.options, [*words, *ON_ONE_DEVICE]))
    if plan.config.validation.path is None:
        raise ConfigError("validation.path: the run of A has no held-out data; give some, as validation.path=…")
    return plan


def check_alike(first: Weights, second: Weights, plan: Plan) -> None:
    """Prints options of the second run that are not those it is measured with.

    Raises:
        UserError: the two do not predict the same.
    """
    own, other = (weights.stored.state.get("trained_as", {}) for weights in (first, second))
    for key in (key for key in own if not key.startswith("optimizer.")):
        if (value := other.get(key, own[key])) != own[key]:
            values = f"{own[key]} in {first.name} and {value} in {second.name}"
            raise UserError(f"{key}: is {values}, so their losses cannot be compared")
    changes = changed_options(second.options, plan.config)
    if noted := [str(change) for change in changes if is_below(change.key, ("model", "objective", "conditioning"))]:
        more = f" and {len(noted) - MOST_NOTED} more" if len(noted) > MOST_NOTED else ""
        print(f"note: options of B that are changed to measure it: {'; '.join(noted[:MOST_NOTED])}{more}")


@torch.no_grad()
def measure(plan: Plan, module: TrainedModule, weights: Weights, data: HeldOutData) -> tuple[Vector, Vector]:
    """[N, K] losses of N images at K noise levels, and [K] the mean timesteps; [0] for an autoencoder.

    Raises:
        UserError: the weights are of another network, or a loss is not finite.
    """
    load_into(module, weights.tensors, weights.name)
    device, batches = torch.device(plan.launch.accelerator), []
    module.to(device).eval()
    module.move_frozen_to(device)
    with autocast(device, plan.precision):
        for batch in data.batches(range(len(data))):
            values, _ = module.held_out_measures(batch.to(device), noise_levels(plan.config))
            batches.append(values.double().cpu().numpy())
    measures = dict(zip(module.held_out, np.concatenate(batches, axis=2), strict=True))
    losses = measures["loss"].T
    if bad := int((~np.isfinite(losses)).any(axis=1).sum()):
        raise UserError(f"{weights.name}: the loss of {bad} of {len(losses)} images is not finite")
    return losses, measures["timestep"].mean(axis=1) if "timestep" in measures else np.empty(0)


def rows_of(losses: Vector, timesteps: Vector) -> list[dict[str, Any]]:
    """A row per noise level, where there are several, and one for the mean over them; null stands for an infinite
    number of images.

    Args:
        losses: [2, N, K] of A and B, N images, K levels.
        timesteps: [K], or [0] where there are no levels.
    """
    if has_levels := len(timesteps) > 1:
        losses = np.concatenate((losses, losses.mean(axis=2, keepdims=True)), axis=2)
    found, rows = compare(losses[1] - losses[0]), []
    for test, (loss_a, loss_b) in enumerate(losses.mean(axis=1).T.tolist()):
        is_level, needed = has_levels and test < len(timesteps), float(found.images_needed[test])
        place = {"level": test, "timestep": float(timesteps[test])} if is_level else {"level": "all", "timestep": None}
        row: dict[str, Any] = place | {"loss_a": loss_a, "loss_b": loss_b}
        row |= {n: float(getattr(found, n)[test]) for n in ("difference", "low", "high", "p", "p_holm")}
        row |= {"is_different": bool(found.is_different[test])}
        rows.append(row | {"images_needed": int(needed) if math.isfinite(needed) else None})
    return rows


def verdict_of(rows: Sequence[dict[str, Any]]) -> str:
    """In a few words."""
    *levels, whole = rows
    num_different = sum(row["is_different"] for row in levels)
    if whole["is_different"]:
        return f"{'B' if whole['difference'] < 0 else 'A'} has the lower loss"
    return f"different at {num_different} of {len(levels)} noise levels only" if num_different else "no difference"


def print_rows(rows: Sequence[dict[str, Any]], count: int) -> None:
    """A table, and the verdict."""
    print("timestep   loss of A   loss of B       B - A          95 % interval          p      Holm  images to decide")
    for row in rows:
        place = "all" if row["timestep"] is None else f"{row['timestep']:.0f}"
        interval, needed = f"[{row['low']:+.3g}, {row['high']:+.3g}]", row["images_needed"] or math.inf
        to_decide = "" if row["is_different"] else f"{needed:,}" if needed <= MANY else f"above {MANY:,}"
        numbers = f"{row['loss_a']:10.5g}  {row['loss_b']:10.5g}  {row['difference']:+10.3g}  {interval:>22}"
        print(f"{place:>8}  {numbers}  {row['p']:9.2g} {row['p_holm']:9.2g}  {to_decide:>16}".rstrip())
    corrected = f", Holm's correction for {len(rows)} tests" if len(rows) > 1 else ""
    print(f"verdict: {verdict_of(rows)} ({count:,} images, paired t tests{corrected}, level {ALPHA:g})")


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, measure both, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", metavar="A", type=Path, help="checkpoint, part of one, or run folder")
    parser.add_argument("b", metavar="B", type=Path, help="the same")
    parser.add_argument("words", nargs="*", metavar="a.b.c=value", help="options, such as validation.path=…")
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="write the rows there as well")
    given = parser.parse_intermixed_args(argv)
    weights = [open_weights(given.a), open_weights(given.b)]
    plan = plan_of(weights[0], given.words)
    if plan.launch.accelerator == "cpu":
        prepare_cpu(1)
    print(f"A: {weights[0].name}\nB: {weights[1].name}")
    check_alike(weights[0], weights[1], plan)
    torch.set_float32_matmul_precision(plan.config.trainer.matmul_precision)
    trained = build_model(plan)
    data = make_data(plan, trained.family, trained.latent_grid).held_out
    assert data is not None, "plan_of has looked at validation.path"
    measured = [measure(plan, trained.module, own, data) for own in weights]
    count, timesteps = len(measured[0][0]), measured[0][1]
    if count < 2:
        raise ConfigError("validation.path: has one image, and a comparison needs 2 or more")
    rows = rows_of(np.stack([losses for losses, _ in measured]), timesteps)
    print_rows(rows, count)
    if given.json is not None:
        document = {"a": weights[0].name, "b": weights[1].name, "images": count, "verdict": verdict_of(rows)}
        try:
            replace_text(given.json, json.dumps(document | {"rows": rows}, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"--json: {given.json} cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    run_cli(main)
