"""Runs with wrong numbers in them, one after the other in the same processes; `tests/faults/numerics.py` starts it.

python -m tests.faults.numeric_runs JOBS.json
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sd_training.log import quiet_libraries

quiet_libraries()

import pytorch_lightning as pl
import torch

from sd_training.build.plan import make_plan
from sd_training.build.run import build_run
from sd_training.callbacks.ema import Ema
from sd_training.callbacks.numerics import bit_digest
from sd_training.cli import run_cli
from sd_training.config.load import load_config
from sd_training.errors import UserError


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a run.

    `nan` puts a NaN into the noise of the first sample of a step, `outlier` makes a step's noise sixteen times as
    large, `bit` flips the lowest bit of one weight before a step.
    """

    kind: str
    steps: list[int] = field(default_factory=list)
    rank: int | None = None
    """None: on every process."""


class Inject(pl.Callback):
    """Does the fault, once per step."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self._done = fault, -1

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Before the forward pass of the step's first micro-batch."""
        step, fault = trainer.global_step, self.fault
        if step not in fault.steps or step == self._done or fault.rank not in (None, trainer.global_rank):
            return
        self._done = step
        if fault.kind == "nan":
            batch.noise[0].view(-1)[0] = float("nan")
        elif fault.kind == "outlier":
            batch.noise.mul_(16.0)
        else:
            weight = next(p for p in pl_module.network.parameters() if p.requires_grad)
            weight.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


@dataclass
class Outcome:
    """What a process saw of a run."""

    digests: dict[int, int] = field(default_factory=dict)
    """Optimizer steps completed → digest of what this process holds of the weights."""
    is_finite: bool = False
    """Weights and average at the end."""
    steps: int = 0
    status: int = 0
    """What the run would have ended with."""
    message: str = ""


class Follow(pl.Callback):
    """Takes a digest after every optimizer step."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """The last of the callbacks."""
        held = [getattr(p, "ds_tensor", p) for _, p in pl_module.named_trained()]  # ZeRO-3 keeps its piece apart
        self.outcome.digests[trainer.global_step] = int(bit_digest(held))


def run_one(argv: list[str], fault: Fault) -> Outcome:
    """Trains to the end, or to the error that the run ends with."""
    outcome = Outcome()
    run = build_run(make_plan(load_config(argv)))
    run.trainer.callbacks.extend([Inject(fault), Follow(outcome)])  # type: ignore[attr-defined]
    try:
        run.trainer.fit(run.module, datamodule=run.data)
    except UserError as error:
        outcome.status, outcome.message = error.exit_status, str(error)
    averages = [e.shards.values() for e in run.trainer.callbacks if isinstance(e, Ema)]  # type: ignore[attr-defined]
    held = [*run.module.parameters(), *(share for shares in averages for share in shares)]
    outcome.is_finite = all(bool(torch.isfinite(getattr(t, "to_local", lambda t=t: t)()).all()) for t in held)
    outcome.steps = run.trainer.global_step
    return outcome


def write_outcome(folder: Path, name: str, outcome: Outcome) -> None:
    """Leaves `NAME_RANK.json` in the folder."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    (folder / f"{name}_{rank}.json").write_text(json.dumps(asdict(outcome)), encoding="utf-8")


def main() -> None:
    """Does the jobs; leaves the outcomes beside the list."""
    torch.set_num_threads(1)
    jobs = Path(sys.argv[1])
    for job in json.loads(jobs.read_text(encoding="utf-8")):
        write_outcome(jobs.parent, job["name"], run_one(job["argv"], Fault(**job["fault"])))


if __name__ == "__main__":
    run_cli(main)
