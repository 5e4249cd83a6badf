"""Speed of a training on one core beside an evaluation on another, against the same training while the evaluation is
stopped (SIGSTOP), in turns of two seconds.

    python scripts/quickstart.py --quick --folder build/bench
    python -m tests.bench_evaluation build/bench
    python -m tests.bench_evaluation build/bench --beside evaluation

The training is the quickstart's of the UNet, without end. Beside it runs:

    watcher     scripts/evaluate.py --watch with Inception (random weights), 64 pictures: it evaluates every export of
                the training, one per 700 optimizer steps, and waits for the next. As it is stopped for half of the
                time, it is at work for a larger share of the rest than it would be
    evaluation  the same of one export, again and again, without a pause
    copy        a copy of 256 MB in memory, which has nothing to do with the run
    matmul      products of matrices that fit into the core's cache

The last two tell what cores of this machine cost each other by the memory and by the clock. A turn's speed is that of
the optimizer steps that lie in it, saves and previews aside; a ratio is that of neighbouring turns. A host that gives
its cores to others as well spoils it.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from scripts.quickstart import data_overrides, part_overrides
from sd_training.cli import check_counts, run_cli
from sd_training.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_S = 20
OTHERS = {
    "copy": "import torch\na, b = torch.zeros(2, 2**26)\nwhile True:\n    b.copy_(a)",
    "matmul": "import torch\na = torch.randn(256, 256)\nwhile True:\n    a @ a",
}


class Training:
    """The process that trains, and the rows that it writes: one per optimizer step."""

    def __init__(self, process: "subprocess.Popen[bytes]", metrics: Path) -> None:
        self.process, self.metrics, self.num_bytes = process, metrics, 0

    def new_steps_s(self) -> list[float]:
        """Seconds of each optimizer step since the last call. Raises UserError when the training has ended."""
        if self.process.poll() is not None:
            status = self.process.returncode
            raise UserError(f"{self.metrics.parent}: the training has ended with status {status}; see train.log")
        if not self.metrics.exists():
            return []
        with self.metrics.open("rb") as file:
            file.seek(self.num_bytes)
            whole = file.read().rpartition(b"\n")[0]
        self.num_bytes += len(whole) + 1 if whole else 0
        return [json.loads(row)["step_s"] for row in whole.splitlines()]

    def turn(self, turn_s: float) -> float:
        """Mean seconds of a step. The one that has begun is not counted."""
        self.new_steps_s()
        while not self.new_steps_s():
            time.sleep(0.01)
        time.sleep(turn_s)
        return statistics.mean(self.new_steps_s())


def write_inception(path: Path) -> None:
    """Random weights under the published names."""
    import torch
    from safetensors.torch import save_file

    from tests.unit.evaluation.test_networks import GOLDEN, inception_weights

    save_file({**inception_weights(json.loads(GOLDEN.read_text())["layers"]), "fc.weight": torch.zeros(2, 2)}, path)


@contextmanager
def start(words: list[str], core: int, output: BinaryIO | None = None) -> "Iterator[subprocess.Popen[bytes]]":
    """A program on this core alone, until left."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = ["taskset", "-c", f"{core}", *words]
    process = subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True, stdout=output, stderr=output)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def train_words(folder: Path, home: Path) -> list[str]:
    """The run `home/run`, without end."""
    words = [sys.executable, "train.py", "config=configs/quickstart_unet.yaml", *data_overrides(folder)]
    words += [*part_overrides(folder), f"experiment.log_dir={home}", "experiment.name=run", "system.batch_size=64"]
    return [*words, "experiment.num_examples_to_see=100_000_000", "trainer.accelerator=cpu", "logging.every=1"]


def other_words(name: str, folder: Path, home: Path) -> list[str]:
    """Of the program beside the training."""
    if name in OTHERS:
        return [sys.executable, "-c", OTHERS[name]]
    words = [f"evaluation.inception={home}/inception.safetensors", f"evaluation.path={folder / 'data'}"]
    words += ["evaluation.num_images=64", "evaluation.num_real=64"]
    if name == "watcher":
        return [sys.executable, "scripts/evaluate.py", str(home / "run"), "--watch", *words]
    words = [sys.executable, "scripts/evaluate.py", str(home / "pipeline"), f"config={home}/run/config.yaml", *words]
    # Each round draws anew into a folder of its own.
    return ["sh", "-c", 'while :; do rm -rf $0; "$@" --out $0 || exit; done', str(home / "out"), *words]


def measure(folder: Path, beside: str, turns: int, turn_s: float, home: Path) -> dict[str, list[float]]:
    """`stopped` and `continued` → seconds per optimizer step, of each turn."""
    os.sched_setaffinity(0, {1})  # reading the rows takes nothing from the training
    write_inception(home / "inception.safetensors")
    steps_s: dict[str, list[float]] = {"stopped": [], "continued": []}
    with (home / "train.log").open("wb") as log, start(train_words(folder, home), 0, log) as process:
        training = Training(process, home / "run/metrics.jsonl")
        while not (home / "run/exported_step").exists():
            training.new_steps_s()
            time.sleep(0.5)
        shutil.copytree(home / "run/current_pipeline", home / "pipeline")
        with start(other_words(beside, folder, home), 1) as other:
            time.sleep(WARM_UP_S)
            for turn in range(2 * turns):
                name = ("stopped", "continued")[turn % 2]
                os.killpg(other.pid, signal.SIGCONT if name == "continued" else signal.SIGSTOP)
                steps_s[name].append(training.turn(turn_s))
                if other.poll() is not None:
                    raise UserError("the program beside the training has failed; its output is above")
    return steps_s


def main() -> None:
    """Runs the benchmark and prints its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the quickstart: its data, text side and autoencoder")
    parser.add_argument("--beside", choices=("watcher", "evaluation", *OTHERS), default="watcher")
    parser.add_argument("--turns", type=int, default=200, help="of each kind")
    parser.add_argument("--turn-s", type=float, default=2.0)
    args = parser.parse_args()
    check_counts(args, "turns")
    with tempfile.TemporaryDirectory() as home:
        steps_s = measure(args.folder.absolute(), args.beside, args.turns, args.turn_s, Path(home))
    ratios = [alone / beside for alone, beside in zip(*steps_s.values(), strict=True)]
    rates = {f"steps/s, {name}": round(1 / statistics.mean(own), 3) for name, own in steps_s.items()}
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5
    result = {"beside": args.beside, "continued / stopped": round(statistics.mean(ratios), 4)}
    print(json.dumps({**result, "standard_error": round(spread, 4), "turns": len(ratios), **rates}))


if __name__ == "__main__":
    run_cli(main)
