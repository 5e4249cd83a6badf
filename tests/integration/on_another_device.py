"""Trains every family for a few steps on the simulated device, and writes what went between host and device in one."""

import json
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.accelerators.cpu import CPUAccelerator

import sd_training.build.run
from sd_training.parallel.strategies import SingleProcessStrategy
from tests import makers, simulated_device
from tests.family_makers import PIPELINES, save_pipeline
from tests.integration.training import Interrupted, options, train

STEP = 2
"""Is looked at, and then the run is given up."""


class Look(pl.Callback):
    """What crosses in one micro-batch, its upload aside."""

    def __init__(self) -> None:
        self.crossings: dict[str, int] = {}

    def on_train_batch_start(self, *_: Any) -> None:
        simulated_device.crossings.clear()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP:
            self.crossings = dict(simulated_device.crossings)
            raise Interrupted


def main(words: list[str]) -> None:
    """Args: an empty folder. Writes `crossings.json` there: run → what crossed → how often."""
    folder, found = Path(words[0]), dict[str, Any]()
    device = simulated_device.begin()
    sd_training.build.run._strategy = lambda *_: SingleProcessStrategy(device=device)  # type: ignore[assignment]
    CPUAccelerator.setup_device = lambda *_: None  # type: ignore[method-assign]
    shards, held_out = (makers.caption_shards(folder / name) for name in ("shards", "held_out"))
    measured = {"validation__path": held_out, "validation__every": 2, "validation__num_samples": 2}
    drawn = {"sampling__every": 2, "sampling__num_inference_steps": 1, "sampling__prompts": "[a red picture]"}
    features = {"objective__reconstruction__perceptual_path": makers.perceptual_folder(folder / "perceptual")}
    adversary = {"objective__adversarial__weight": 0.1, "objective__adversarial__layers": 1}
    runs: dict[str, dict[str, Any]] = {name: {"model__use_ema": False, "logging__every": 100} for name in PIPELINES}
    runs["everything"] = {**measured, **drawn, "validation__num_levels": 1, "model__lora__rank": 2}
    runs["autoencoder"] = {**features, **adversary, "model__train": "vae", "logging__batch_every": 2}
    for name, changes in runs.items():
        family = name if name in PIPELINES else "stable_diffusion"
        pipeline = folder / family
        if not pipeline.exists():
            save_pipeline(family, pipeline)
        look = Look()
        try:
            train(options(folder / f"run_{name}", pipeline, shards, system__batch_size=2, **changes), look)
        except Interrupted:
            found[name] = look.crossings
    (folder / "crossings.json").write_text(json.dumps(found))
