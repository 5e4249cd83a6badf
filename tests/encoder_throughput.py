"""How fast a run trains inline, with one encoder process and from a cache, in turn (docs/benchmarks.md).

    python -m tests.encoder_throughput [share=0.9] [turns=5] [steps=160]

The autoencoder is given the width with which encoding a micro-batch takes the wanted share of a training step, as
inline runs show. Two free cores.
"""

import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL

from scripts.bench_peers import make_pictures
from scripts.bench_subjects import save_pipeline

ROOT = Path(__file__).resolve().parents[1]
NUM_GROUPS = 2
"""Of all norms; the width is a multiple of it."""
_WARM_UP_ROWS = 4


class Runs:
    """Training runs on the same pictures.

    Args:
        folder: of everything.
        steps: optimizer steps of a run.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.number = folder, steps, 0
        self.pipeline = save_pipeline(folder / "pipeline", "tiny")
        make_pictures(folder / "pictures", 64, 400)

    def words(self, **changes: Any) -> list[str]:
        """The command line of a run."""
        self.number += 1
        values = {
            "experiment.log_dir": self.folder,
            "experiment.name": self.number,
            "experiment.num_examples_to_see": 8 * self.steps,
            "experiment.save_every": 10**6,
            "model.pretrained": self.pipeline,
            "model.mixed_precision": "no",
            "model.use_ema": "true",
            "conditioning.dropout_prob": 0,
            "dataset.type": "Table",
            "dataset.params.path": self.folder / "pictures" / "metadata.jsonl",
            "dataset.params.resolution": 64,
            "dataset.params.index_dir": self.folder / "index",
            "system.batch_size": 8,
            "system.workers": 0,
            "trainer.devices": 1,
            "wandb.mode": "disabled",
            "logging.progress_bar": "false",
            "logging.every": 10,
        }
        return [f"{key}={value}" for key, value in {**values, **changes}.items()]

    def start(self, program: str, words: list[str]) -> None:
        """Runs a program of this project to its end."""
        subprocess.run([sys.executable, program, *words], cwd=ROOT, check=True, capture_output=True)

    def median_s(self, **changes: Any) -> dict[str, float]:
        """Trains; median seconds per optimizer step, of it as a whole and of its sections."""
        self.start("train.py", self.words(**changes))
        with (self.folder / str(self.number) / "metrics.csv").open() as stream:
            rows = list(csv.DictReader(stream))[_WARM_UP_ROWS:]
        names = ("step_s", "encode_s", "data_wait_s", "encoders_s")
        return {name: statistics.median(float(row[name] or 0) for row in rows) for name in names}

    def set_width(self, width: int) -> None:
        """Replaces the autoencoder."""
        settings = json.loads((self.pipeline / "vae" / "config.json").read_text())
        settings = {name: value for name, value in settings.items() if not name.startswith("_")}
        settings |= {"block_out_channels": [width] * len(settings["block_out_channels"])}
        torch.manual_seed(0)
        AutoencoderKL.from_config(settings | {"norm_num_groups": NUM_GROUPS}).save_pretrained(self.pipeline / "vae")

    def find_width(self, share: float) -> int:
        """With which encoding takes `share` of the rest of a step, the data aside."""
        width, measured = 24, dict[int, float]()
        while width not in measured:
            self.set_width(width)
            seconds = self.median_s()
            measured[width] = seconds["encode_s"] / (seconds["step_s"] - seconds["encode_s"] - seconds["data_wait_s"])
            print(f"width {width}: encoding takes {measured[width]:.2f} of a training step", flush=True)
            # Convolutions take the square of the width.
            width = round(width * (share / measured[width]) ** 0.5 / NUM_GROUPS) * NUM_GROUPS
        best = min(measured, key=lambda tried: abs(measured[tried] - share))
        self.set_width(best)
        return best


def main() -> None:
    """Measure and print."""
    given = {"share": "0.9", "turns": "5", "steps": "160"} | dict(word.split("=") for word in sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        runs = Runs(Path(name), int(given["steps"]))
        print(f"width {runs.find_width(float(given['share']))}")
        cache = runs.folder / "cache"
        runs.start("scripts/cache_latents.py", [*runs.words(), f"out={cache}", "dtype=fp32"])
        ways = {"inline": {}, "encoder": {"distributed.encoders": 1}, "cached": {"dataset.cache.path": cache}}
        steps_s: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(int(given["turns"])):
            for way, changes in ways.items():
                seconds = runs.median_s(**changes)
                steps_s[way].append(seconds["step_s"])
                print(
                    f"{way:8s}",
                    "  ".join(f"{name} {1e3 * value:6.1f} ms" for name, value in seconds.items()),
                    flush=True,
                )
        for way in ("cached", "inline"):
            ratios = [other / own for other, own in zip(steps_s[way], steps_s["encoder"], strict=True)]
            print(
                f"one encoder process: {statistics.median(ratios):.3f} times as fast as {way}; turns",
                *(f"{r:.3f}" for r in ratios),
            )


if __name__ == "__main__":
    main()
