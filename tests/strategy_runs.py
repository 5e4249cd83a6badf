"""Runs of `tests/strategy_report.py`, one after the other in the same processes, which it starts.

python -m tests.strategy_runs JOBS.json
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from sd_training.log import quiet_libraries

quiet_libraries()

import torch
from torch import Tensor, distributed, nn

from sd_training.build.plan import make_plan
from sd_training.build.run import Run, build_run
from sd_training.callbacks.ema import Ema
from sd_training.cli import run_cli
from sd_training.config.load import load_config
from sd_training.log import is_main_process
from sd_training.parallel.deepspeed import ZeroSharding


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _weights(parameter: nn.Parameter) -> Tensor:
    """What this process stores of a parameter for the network; ZeRO-3 stores its piece apart."""
    piece: Tensor | None = getattr(parameter, "ds_tensor", None)
    return _local(parameter.detach()) if piece is None else piece


def local_bytes(run: Run) -> dict[str, int]:
    """Bytes of this process by what they are for; ZeRO's masters count as optimizer state."""
    strategy: Any = run.trainer.strategy
    sharding, parameters = strategy.sharding, [p for p in run.module.parameters() if p.requires_grad]
    states = [_local(v) for s in sharding.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    masters = [sharding.local_shard(p) for p in parameters] if isinstance(sharding, ZeroSharding) else []
    averages = [e.shards for e in run.trainer.callbacks if isinstance(e, Ema)]  # type: ignore[attr-defined]
    return {
        "weights": _bytes([_weights(p) for p in parameters]),
        "optimizer": _bytes([state for state in states if state.numel() > 1]) + _bytes(masters),
        "ema": _bytes([share for shares in averages for share in shares.values()]),
    }


def _copy(source: Path, target: Path, drop: str) -> None:
    """A run folder without its later checkpoint, so that the run goes on from the earlier one."""
    if is_main_process():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(drop, "exported_step"))
    if distributed.is_initialized():
        distributed.barrier()


def train(argv: list[str]) -> None:
    """One run; leaves `bytes_RANK.json` in its folder."""
    plan = make_plan(load_config(argv))
    run = build_run(plan)
    run.trainer.fit(run.module, datamodule=run.data)
    rank = run.trainer.global_rank
    (plan.run_dir / f"bytes_{rank}.json").write_text(json.dumps(local_bytes(run)))


def main() -> None:
    """Do the jobs."""
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        if "copy" in job:
            _copy(Path(job["copy"]), Path(job["to"]), job["drop"])
        train(job["argv"])


if __name__ == "__main__":
    run_cli(main)
