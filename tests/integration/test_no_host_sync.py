"""Between two logging points nothing asks the device for a value."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.integration.training import options, train

WAITING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}
"""What makes the host wait for the device: `.item()`, `bool(tensor)`, `nonzero`, comparisons of whole tensors."""


class CountWaits(TorchDispatchMode):
    """Counts waiting operations per optimizer step."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.waits: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING:
            self.waits[self.step] = self.waits.get(self.step, 0) + 1
        return func(*args, **(kwargs or {}))


class Follow(pl.Callback):
    """Switches the counter on for the training loop and tells it the step."""

    def __init__(self, counter: CountWaits) -> None:
        self.counter = counter

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.counter.step = trainer.global_step + 1

    def on_train_start(self, *_: Any) -> None:
        self.counter.__enter__()

    def on_train_end(self, *_: Any) -> None:
        self.counter.__exit__(None, None, None)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("max_grad_norm", ["null", 1.0])
def test_no_host_synchronisation_inside_a_step(
    accumulation: int, max_grad_norm: Any, tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    counter = CountWaits()
    changes = {
        "logging__every": 5,
        "experiment__save_every": 100,
        "system__batch_size": 8 // accumulation,
        "system__gradient_accumulation": accumulation,
        "optimizer__max_grad_norm": max_grad_norm,
    }
    train(options(tmp_path / "run", pipeline_dir, shards_dir, **changes), Follow(counter))
    # Step 5 logs, step 8 logs and saves: there the counter must see something, or it sees nothing at all.
    assert counter.waits[5] > 0
    # 0 is the start of the loader, before the first step.
    assert {step: waits for step, waits in counter.waits.items() if step not in (0, 5, 8)} == {}
