"""Which samples each rank saw in each micro-batch."""

import json
from pathlib import Path
from typing import Any

import pytorch_lightning as pl


class RecordIds(pl.Callback):
    """One JSON line per micro-batch: optimizer step it belongs to, positions, sample ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        line = [trainer.global_step, batch.positions.tolist(), batch.sample_ids.tolist()]
        with (self.folder / f"ids_{trainer.global_rank}.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")


def read_ids(folder: Path) -> dict[int, list[tuple[int, int]]]:
    """Optimizer step → (position, sample id) of all ranks, in the global order."""
    steps: dict[int, list[tuple[int, int]]] = {}
    for path in folder.glob("ids_*.jsonl"):
        for line in path.read_text().splitlines():
            step, positions, ids = json.loads(line)
            steps.setdefault(step, []).extend(zip(positions, ids, strict=True))
    return {step: sorted(pairs) for step, pairs in steps.items()}
