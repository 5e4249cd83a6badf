"""The pictures that are evaluated: which weights draw them, and the folder that keeps them."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from sd_training.checkpoint.folder import MANIFEST_NAME, folder_name, whole_file
from sd_training.checkpoint.save import WEIGHTS, open_checkpoint
from sd_training.config.schema import Config, ModelConfig
from sd_training.errors import ConfigError, DataError
from sd_training.export.draw import draw_images, drawing_options
from sd_training.export.pipeline import CURRENT, KEPT, exported_step, load_pipeline, trained_parts
from sd_training.models.family import autocast

_TRAINED, _AVERAGE = "trained", "average"
"""As in `validation.csv`."""
_NETWORK = "network."
"""Begins the names in a checkpoint."""


@dataclass(frozen=True)
class Weights:
    """What draws."""

    step: int
    """Optimizer steps; 0 of a pipeline that is of no run."""
    name: str
    """`trained` or `average`."""
    pipeline: Path
    checkpoint: Path | None = None
    """Has the trained weights; None: they are those of the pipeline."""

    def fingerprint(self) -> str:
        """Changes when the weights do."""
        files = [path for path in sorted(self.pipeline.rglob("*")) if path.suffix in (".json", ".safetensors")]
        known = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        manifest = "" if self.checkpoint is None else (self.checkpoint / MANIFEST_NAME).read_text(encoding="utf-8")
        return f"{known} {manifest}"

    def load(self) -> Any:
        """The pipeline, on the CPU.

        Raises:
            DataError: it cannot be loaded, the weights of the checkpoint have no place in it, or the run has replaced
                it meanwhile.
        """
        pipeline = load_pipeline(self.pipeline)
        if self.checkpoint is not None:
            load_trained(pipeline, self.checkpoint)
        if self.pipeline.name == CURRENT and exported_step(self.pipeline.parent) not in (self.step, -1):
            raise DataError(f"{self.pipeline}: the run has exported another step than {self.step} meanwhile")
        return pipeline


def load_trained(pipeline: Any, checkpoint: Path) -> None:
    """Puts the trained weights of a checkpoint into the pipeline that was exported with it.

    Raises:
        DataError: they have no place there.
    """
    stored = open_checkpoint(checkpoint).parts[WEIGHTS]
    names = [name.removeprefix(_NETWORK) for name in stored if name.startswith(_NETWORK)]
    for prefix, module in trained_parts(pipeline, names).items():
        own = {name.removeprefix(prefix): stored[_NETWORK + name] for name in names if name.startswith(prefix)}
        if odd := module.load_state_dict(own, strict=False).unexpected_keys:  # frozen ones are not in a checkpoint
            raise DataError(f"{checkpoint}: its weights are not those of the pipeline: there is no {odd[0]}")


def weights_of_run(run_dir: Path, step: int | None, model: ModelConfig) -> Iterator[Weights]:
    """Those exported at a step and, where that is an average of all weights with a checkpoint beside it, the trained
    ones.

    Args:
        step: None: the newest export.
        model: of the run.

    Raises:
        DataError: there is no pipeline of that step.
    """
    newest = exported_step(run_dir)
    step = newest if step is None else step
    pipeline = run_dir / KEPT / f"step_{step}"
    if not pipeline.is_dir() and step == newest:
        pipeline = run_dir / CURRENT
    if step < 0 or not pipeline.is_dir():
        there = f"of step {newest}, the only one that is kept" if newest >= 0 else "still missing: it has not saved yet"
        raise DataError(f"{run_dir}: has no pipeline of step {step}; the newest is {there}")
    yield Weights(step, _AVERAGE if model.use_ema else _TRAINED, pipeline)
    checkpoint = run_dir / "checkpoints" / folder_name(step)
    if model.use_ema and not model.lora.rank and (checkpoint / MANIFEST_NAME).is_file():
        yield Weights(step, _TRAINED, pipeline, checkpoint)


def weights_of_pipeline(folder: Path) -> Weights:
    """Of a folder by itself; the step is known where it lies in that of a run."""
    step = folder.name.removeprefix("step_")
    newest = max(exported_step(folder.parent), 0) if folder.name == CURRENT else 0
    return Weights(int(step) if step.isdigit() else newest, _TRAINED, folder)


@dataclass(frozen=True)
class DrawnSet:
    """Picture i is drawn from prompt i and `sampling.seed` + i; the folder is another one for each way to draw."""

    weights: Weights
    prompts: Sequence[str]
    config: Config
    root: Path
    """Of the folders."""

    @cached_property
    def files(self) -> list[Path]:
        """All of them, also those that are still to be drawn."""
        config = self.config
        way = [self.weights.fingerprint(), list(self.prompts), config.dataset.params.resolution]
        others = {"every", "prompts", "batch_size", "raw", "denoising"}  # which change no picture
        way += [config.model.mixed_precision, config.sampling.model_dump(exclude=others)]
        digest = hashlib.sha256(json.dumps(way).encode()).hexdigest()[:8]
        folder = self.root / f"step_{self.weights.step}" / f"{self.weights.name}-{digest}"
        return [folder / f"{i:06d}.png" for i in range(len(self.prompts))]

    def draw(self, device: torch.device, rank: int, world: int) -> None:
        """Draws what is missing of this process's share.

        Raises:
            UserError: as `Weights.load`; they cannot be written; the device has too little memory.
        """
        files, sampling = self.files, self.config.sampling
        numbers = [i for i in range(rank, len(files), world) if not files[i].is_file()]
        if not numbers:
            return
        pipeline = self.weights.load().to(device)
        precision = self.config.model.mixed_precision if device.type == "cuda" else "no"
        prompts, seeds = [self.prompts[i] for i in numbers], [sampling.seed + i for i in numbers]
        with torch.no_grad(), autocast(device, precision):
            images = draw_images(pipeline, prompts, seeds, **drawing_options(self.config))
            title = f"step {self.weights.step}, {self.weights.name} weights"
            shown = tqdm(images, title, len(numbers), unit="images", disable=rank > 0)
            try:
                files[0].parent.mkdir(parents=True, exist_ok=True)
                for i, image in zip(numbers, shown, strict=True):
                    with whole_file(files[i], os.getpid()) as beside:
                        image.save(beside, format="PNG")
            except torch.OutOfMemoryError:
                count = f"{sampling.batch_size} pictures at once"
                raise ConfigError(f"sampling.batch_size: {count} do not fit into {device}; give fewer") from None
            except OSError as error:
                raise DataError(f"{files[0].parent}: cannot be written: {error.strerror}") from error
