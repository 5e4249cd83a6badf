"""Non-finite gradients: the step is skipped and named, and a run that makes no progress stops."""

import json
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from sd_training.errors import UserError
from tests.integration.training import checkpoint_tensors, options, train


class Poison(pl.Callback):
    """Puts a NaN into the gradient of chosen optimizer steps."""

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step in self.steps:
            next(pl_module.network.parameters()).grad.view(-1)[0] = float("nan")


def test_a_poisoned_step_is_skipped_and_named(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    run_dir = tmp_path / "run"
    train(options(run_dir, pipeline_dir, shards_dir), Poison({3}))
    incidents = [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]
    assert [(i["optimizer_step"], i["first_position"], i["last_position"]) for i in incidents] == [(3, 24, 31)]
    assert all(torch.isfinite(t).all() for t in checkpoint_tensors(run_dir, 8).values() if t.is_floating_point())


def test_ten_skipped_steps_in_a_row_stop_the_run(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, experiment__num_examples_to_see=160)
    with pytest.raises(UserError, match="10 optimizer steps in a row"):
        train(argv, Poison(set(range(4, 20))))
