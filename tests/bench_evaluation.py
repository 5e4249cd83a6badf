"""Speed of a training on one core beside an evaluation on another, against the same training while the evaluation is
stopped (SIGSTOP), by turns.

    python scripts/quickstart.py --quick --folder build/bench
    python -m tests.bench_evaluation build/bench --turns 100
    python -m tests.bench_evaluation build/bench --turns 100 --control

Both are the commands that a user starts: train.py with the quickstart's UNet, and scripts/evaluate.py with Inception
(random weights), which draws pictures with the first export and measures them, again and again. Printed are the ratios
of optimizer steps per second of wall time and of the training's CPU time; a ratio is that of neighbouring turns. Wall
time is what matters where the cores are the machine's own; a host that gives them to others as well spoils it. With
`--control` the other program is a loop of convolutions in torch that has nothing to do with the run: what cores of this
machine cost each other by the caches, the memory and the clock that they share.
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
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sd_training.cli import run_cli
from sd_training.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_S = 10
CONTROL = """
import torch
pictures, weights = torch.randn(16, 192, 35, 35), torch.randn(192, 192, 3, 3)
while True:
    torch.nn.functional.conv2d(pictures, weights, padding=1)
"""


class Reading(NamedTuple):
    """Of the training, at one moment."""

    wall_s: float
    cpu_s: float
    steps: int


def write_inception(path: Path) -> None:
    """Random weights under the published names."""
    import torch
    from safetensors.torch import save_file

    from tests.unit.evaluation.test_networks import GOLDEN, inception_weights

    save_file({**inception_weights(json.loads(GOLDEN.read_text())["layers"]), "fc.weight": torch.zeros(2, 2)}, path)


def read(training: "subprocess.Popen[bytes]", metrics: Path) -> Reading:
    """Now. Raises UserError when the training has ended."""
    if training.poll() is not None:
        raise UserError(f"{metrics.parent}: the training has ended with status {training.returncode}; see train.log")
    fields = Path(f"/proc/{training.pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    steps = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    return Reading(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), steps)


def measure(
    folder: Path, turns: int, turn_s: float, home: Path, is_control: bool
) -> dict[str, list[tuple[float, float]]]:
    """`alone` and `beside` → steps per second of wall time and of CPU time, of each turn."""
    write_inception(home / "inception.safetensors")
    run, environment = home / "run", {**os.environ, "OMP_NUM_THREADS": "1"}
    train = [sys.executable, "train.py", "config=configs/quickstart_unet.yaml", f"experiment.log_dir={home}"]
    train += ["experiment.name=run", "experiment.num_examples_to_see=100_000_000", "system.batch_size=8"]
    train += [f"model.vae.pretrained={folder / 'runs/autoencoder/current_pipeline'}", "trainer.accelerator=cpu"]
    train += [f"model.{part}.pretrained={folder / 'text'}" for part in ("text_encoder", "tokenizer")]
    train += [f"dataset.params.path={folder / 'data'}", "logging.every=1", "experiment.save_every=200"]
    evaluate = [sys.executable, "scripts/evaluate.py", str(home / "pipeline"), f"config={run}/config.yaml"]
    evaluate += [f"evaluation.inception={home}/inception.safetensors"]
    evaluate += [f"evaluation.path={folder / 'data'}", "evaluation.num_images=64", "evaluation.num_real=64"]
    rates: dict[str, list[tuple[float, float]]] = {"alone": [], "beside": []}
    with (
        (home / "train.log").open("wb") as log,
        subprocess.Popen(["taskset", "-c", "0", *train], cwd=ROOT, env=environment, stdout=log, stderr=log) as training,
    ):
        beside: subprocess.Popen[bytes] | None = None
        try:
            while not (run / "exported_step").exists():
                read(training, run / "metrics.jsonl")
                time.sleep(0.5)
            shutil.copytree(run / "current_pipeline", home / "pipeline")
            # It never ends: each round draws anew into a folder of its own.
            again = 'while :; do rm -rf $0; "$@" --out $0 || exit; done'
            other = [sys.executable, "-c", CONTROL] if is_control else ["sh", "-c", again, str(home / "out"), *evaluate]
            command = ["taskset", "-c", "1", *other]
            beside = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
            time.sleep(WARM_UP_S)
            for turn in range(2 * turns):
                name = ("alone", "beside")[turn % 2]
                os.killpg(beside.pid, signal.SIGCONT if name == "beside" else signal.SIGSTOP)
                before = read(training, run / "metrics.jsonl")
                time.sleep(turn_s)
                after = read(training, run / "metrics.jsonl")
                if beside.poll() is not None:
                    raise UserError("the program beside the training has failed; its output is above")
                steps = after.steps - before.steps
                rates[name].append((steps / (after.wall_s - before.wall_s), steps / (after.cpu_s - before.cpu_s)))
        finally:
            training.kill()
            if beside is not None:
                with suppress(ProcessLookupError):
                    os.killpg(beside.pid, signal.SIGKILL)
    return rates


def main() -> None:
    """Runs the benchmark and prints its result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the quickstart: its data, text side and autoencoder")
    parser.add_argument("--turns", type=int, default=50, help="of each kind")
    parser.add_argument("--turn-s", type=float, default=4.0)
    parser.add_argument("--control", action="store_true", help="a loop of convolutions instead of the evaluation")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        rates = measure(args.folder.absolute(), args.turns, args.turn_s, Path(home), args.control)
    for kind, number in (("wall", 0), ("cpu", 1)):
        ratios = [b[number] / a[number] for a, b in zip(rates["alone"], rates["beside"], strict=True)]
        steps_per_s = {name: round(statistics.mean(rate[number] for rate in own), 3) for name, own in rates.items()}
        result = {"per": f"{kind} second", "beside / alone": round(statistics.mean(ratios), 4), **steps_per_s}
        spread = statistics.stdev(ratios) / len(ratios) ** 0.5
        print(json.dumps({**result, "standard_error": round(spread, 4), "turns": len(ratios)}))


if __name__ == "__main__":
    run_cli(main)
