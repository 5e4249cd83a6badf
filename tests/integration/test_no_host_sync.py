"""Between two logging points nothing asks the device for a value, and what callbacks read and write in a step."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.integration.training import options, train

WAITING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}
"""What makes the host wait for the device: `.item()`, `bool(tensor)`, `nonzero`, comparisons of whole tensors."""


OF_CALLBACKS = {"average", "logging", "validation", "drawing", "other"}
"""Sections of the ledger."""


class CountWaits(TorchDispatchMode):
    """Counts waiting operations per optimizer step, and the bytes that callbacks read and write in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.waits: dict[int, int] = {}
        self.bytes: Counter[int] = Counter()
        self.is_in_callback = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING:
            self.waits[self.step] = self.waits.get(self.step, 0) + 1
        result = func(*args, **(kwargs or {}))
        if self.is_in_callback:
            self.bytes[self.step] += bytes_moved(func, args, result)
        return result


def bytes_moved(operation: Any, args: Any, result: Any) -> int:
    """What the tensors of an operation hold, those that it writes in place twice; 0 of a view."""
    returns, moved = operation._schema.returns, 0
    if any(own.alias_info is not None and not own.alias_info.is_write for own in returns):
        return 0
    for argument, value in zip(operation._schema.arguments, args, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        moved += (1 + is_written) * num_bytes(value)
    return moved + (0 if any(own.alias_info is not None for own in returns) else num_bytes(result))


def num_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


class Follow(pl.Callback):
    """Switches the counter on for the training loop and tells it the step."""

    def __init__(self, counter: CountWaits) -> None:
        self.counter = counter

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.counter.step = trainer.global_step + 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        enter = pl_module.ledger.enter

        def enter_and_note(section: Any) -> None:
            self.counter.is_in_callback = section in OF_CALLBACKS
            enter(section)

        pl_module.ledger.enter = enter_and_note
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
    run = train(options(tmp_path / "run", pipeline_dir, shards_dir, **changes), Follow(counter))
    # Step 5 logs, step 8 logs and saves: there the counter must see something, or it sees nothing at all.
    assert counter.waits[5] > 0
    # 0 is the start of the loader, before the first step.
    assert {step: waits for step, waits in counter.waits.items() if step not in (0, 5, 8)} == {}
    # An update of the average reads it and the weights and writes it; a row of the metrics reads no weights.
    weights = sum(p.nbytes for p in run.module.network.parameters())
    assert 3 * weights <= counter.bytes[4] < 3.1 * weights
    assert counter.bytes[5] - counter.bytes[4] < 0.1 * weights
