"""How fast a run trains inline, with one encoder process and from a cache, in turn (docs/benchmarks.md).

    python -m tests.encoder_throughput [share=0.9] [turns=5] [steps=120]

The autoencoder is given the widths with which encoding a micro-batch takes the wanted share of a training step, as
inline runs show: of their steps without encoding and without waiting for data. A figure is a median of rows of
metrics.csv, the last lines are medians over turns. Wants two cores without other work, and some eight minutes there.
"""

import csv
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL

from scripts.bench_peers import make_pictures, save_pipeline
from sd_training.models.flops import flops

ROOT = Path(__file__).resolve().parents[1]
SIDE = 64
"""Of a picture [pixels]."""
SIZES = [(32, *rest) for rest in itertools.product(range(32, 81, 16), range(16, 145, 16), range(16, 97, 16))]
"""Widths of autoencoders. Multiples of 16: a convolution takes as long with 17 channels as with 32 (oneDNN)."""
EVERY = 5
"""Optimizer steps of a row."""
WARM_UP_ROWS = 4
SEARCH_STEPS = 60
CLOSE = 0.02
"""To the wanted share."""


def autoencoder(widths: tuple[int, ...], settings: dict[str, Any]) -> AutoencoderKL:
    """One of these widths, otherwise as the settings say."""
    return AutoencoderKL.from_config(settings | {"block_out_channels": widths})


class Runs:
    """Training runs on the same pictures.

    Args:
        folder: of everything.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        self.pipeline = save_pipeline(folder / "pipeline", "tiny")
        make_pictures(folder / "pictures", SIDE, 400)

    def words(self, steps: int, **changes: Any) -> list[str]:
        """The command line of a run."""
        self.number += 1
        values = {
            "experiment.log_dir": self.folder,
            "experiment.name": self.number,
            "experiment.num_examples_to_see": 8 * steps,
            "experiment.save_every": 10**6,
            "model.pretrained": self.pipeline,
            "model.mixed_precision": "no",
            "model.use_ema": "true",
            "conditioning.dropout_prob": 0,
            "dataset.type": "Table",
            "dataset.params.path": self.folder / "pictures" / "metadata.jsonl",
            "dataset.params.resolution": SIDE,
            "dataset.params.index_dir": self.folder / "index",
            "system.batch_size": 8,
            "system.workers": 0,
            "trainer.devices": 1,
            "wandb.mode": "disabled",
            "logging.progress_bar": "false",
            "logging.every": EVERY,
        }
        return [f"{key}={value}" for key, value in {**values, **changes}.items()]

    def start(self, program: str, words: list[str]) -> None:
        """Runs a program of this project to its end."""
        done = subprocess.run([sys.executable, program, *words], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)

    def median_s(self, steps: int, **changes: Any) -> dict[str, float]:
        """Trains; median seconds per optimizer step, of it as a whole and of its sections."""
        self.start("train.py", self.words(steps, **changes))
        with (self.folder / str(self.number) / "metrics.csv").open() as stream:
            rows = list(csv.DictReader(stream))[WARM_UP_ROWS:]
        names = ("step_s", "encode_s", "data_wait_s", "encoders_s")
        return {name: statistics.median(float(row[name] or 0) for row in rows) for name in names}

    def size_autoencoder(self, share: float) -> None:
        """Replaces the pipeline's by that of `SIZES` which comes closest, after up to six runs: the first one tells how
        long a FLOP takes, every later one corrects it."""
        settings = json.loads((self.pipeline / "vae" / "config.json").read_text())
        settings = {name: value for name, value in settings.items() if not name.startswith("_")}
        measured, counts = dict[tuple[int, ...], float](), dict[tuple[int, ...], int]()
        picture = torch.zeros(1, 3, SIDE, SIDE, device="meta")
        for widths in SIZES:
            with torch.device("meta"):
                network = autoencoder(widths, settings)
            counts[widths] = flops(lambda encode=network.encode: encode(picture))

        def distance(widths: tuple[int, ...]) -> float:
            return abs(measured[widths] - share)

        widths = (32, 32, 32, 32)
        while widths not in measured and len(measured) < 6:
            torch.manual_seed(0)
            autoencoder(widths, settings).save_pretrained(self.pipeline / "vae")
            seconds = self.median_s(SEARCH_STEPS)
            training_s = seconds["step_s"] - seconds["encode_s"] - seconds["data_wait_s"]
            measured[widths] = seconds["encode_s"] / training_s
            print(f"widths {widths}: encoding takes {measured[widths]:.3f} of a training step", flush=True)
            best = min(measured, key=distance)
            if distance(best) > CLOSE:
                wanted = counts[best] * share / measured[best]
                widths = min(SIZES, key=lambda tried: abs(counts[tried] - wanted))
        torch.manual_seed(0)
        autoencoder(best, settings).save_pretrained(self.pipeline / "vae")
        print(f"widths {best} are taken")


def main() -> None:
    """Measure and print."""
    given = {"share": "0.9", "turns": "5", "steps": "120"} | dict(word.split("=") for word in sys.argv[1:])
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores"
    print(f"{versions}; load before this: {os.getloadavg()[0]:.1f}, which should be near 0")
    with tempfile.TemporaryDirectory() as name:
        runs, steps = Runs(Path(name)), int(given["steps"])
        runs.size_autoencoder(float(given["share"]))
        cache = runs.folder / "cache"
        runs.start("scripts/cache_latents.py", [*runs.words(steps), f"out={cache}", "dtype=fp32"])
        ways = {"inline": {}, "encoder": {"distributed.encoders": 1}, "cached": {"dataset.cache.path": cache}}
        steps_s: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(int(given["turns"])):
            for way, changes in ways.items():
                seconds = runs.median_s(steps, **changes)
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
