"""Pictures while training: previews from fixed prompts, evaluation images from a caption file at each save, and what
the network is trained on.

Drawn pictures are split over the ranks. They use generators of their own, so training is the same with and without
them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor

from sd_training.callbacks.base import OptimizerStepCallback, RunState, log_picture
from sd_training.callbacks.ema import Ema, export_weights
from sd_training.config.schema import Config
from sd_training.data.samples.captions import Tokenizer
from sd_training.export.draw import comparison_grid, draw_images, drawing_options, picture_grid
from sd_training.log import get_logger
from sd_training.models.family import autocast
from sd_training.parallel.strategies import strategy_of
from sd_training.training import TrainedModule
from sd_training.types import PixelBatch

log = get_logger(__name__)

_GRID_COLUMNS = 8
_GRID_PICTURES = 64
_DENOISING_STEPS = 8
"""Pictures in a row of the denoising."""
_RECONSTRUCTIONS, _RECONSTRUCTIONS_PER_ROW = 16, 4


@dataclass(eq=False)
class Pictures(OptimizerStepCallback):
    """Draws the pictures of one set of prompts on all ranks."""

    section = "drawing"

    run_dir: Path
    """The run folder, with `samples/`."""
    config: Config
    """Its resolution, steps, guidance, first seed and batch size."""
    pipeline: Callable[[], DiffusionPipeline]
    """Makes the pipeline around the live modules."""
    precision: str
    """Autocast type, as in training."""
    ema: Ema | None
    """The average to draw with, if there is one."""
    state: RunState
    """Has the limit on the time of drawing."""
    name: str
    """Folder below `samples/step_N/`, and tag in the loggers."""
    every: int
    """Optimizer steps between drawings; also drawn at the end of the run."""
    prompts: Sequence[tuple[str, str]]
    """(file stem, caption) pairs."""
    at_start: bool = False
    """Draw also before the first step of a new run, with the untrained model."""
    denoising: str | None = None
    """Folder and tag of rows of the denoising; None: there are none."""

    @property
    def state_key(self) -> str:
        """Two sets of one run are two callbacks."""
        return f"Pictures.{self.name}"

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Draw before the first step if requested; a resumed run has done so."""
        super().on_train_start(trainer, pl_module)
        if self.at_start and trainer.global_step == 0:
            self._draw(trainer, pl_module, 0)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Draw when due."""
        if self.is_due(trainer, step, self.every):
            self._draw(trainer, module, step)

    def _draw(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective; left out when the run was asked to stop. Pictures that cannot be written are lost, and the run
        continues."""
        if trainer.should_stop:
            return
        folder = self.run_dir / "samples" / f"step_{step}"
        columns = {self.name: _GRID_COLUMNS} | ({self.denoising: 1} if self.denoising else {})
        with self.state.watched("validate"):
            with export_weights(module, self.ema):
                drawn = dict(zip(columns, self._local_images(trainer), strict=False))
            try:
                for name, images in drawn.items():
                    (folder / name).mkdir(parents=True, exist_ok=True)
                    for i, image in images.items():
                        image.save(folder / name / f"{self.prompts[i][0]}.png")
            except OSError as error:
                log.error(f"pictures {self.name!r} of step {step:,} could not be written: {error}")
            trainer.strategy.barrier("pictures drawn")
            if trainer.is_global_zero:
                try:
                    for name, count in columns.items():
                        self._publish(trainer, folder / name, step, count)
                except OSError as error:
                    log.error(f"pictures {self.name!r} of step {step:,} could not be published: {error}")

    def _local_images(self, trainer: pl.Trainer) -> tuple[dict[int, Image.Image], dict[int, Image.Image]]:
        """This rank's pictures by number of the prompt, which the seed depends on, not on the rank, and their rows of
        the denoising, if asked for. Where a forward pass is collective, all ranks draw equally many: some draw again
        what another draws as well, which gives the same picture."""
        strategy, count, sampling = strategy_of(trainer), len(self.prompts), self.config.sampling
        numbers, missing = strategy.split_over_ranks(count)
        if strategy.has_collective_forward:
            numbers += [strategy.data_rank % count] * missing
        if not numbers:
            return {}, {}
        device, last = trainer.strategy.root_device, sampling.num_inference_steps - 1
        frames: list[list[Image.Image]] = [[] for _ in numbers]

        def keep(start: int, images: list[Image.Image]) -> None:
            for own, image in zip(frames[start:], images, strict=False):
                own.append(image)

        # Compiled modules run as they were written: other batch sizes and shapes make no graphs.
        with torch.no_grad(), autocast(device, self.precision), torch.compiler.set_stance("force_eager"):
            images = draw_images(
                self.pipeline(),
                [self.prompts[i][1] for i in numbers],
                [sampling.seed + i for i in numbers],
                **drawing_options(self.config),
                on_step=keep if self.denoising else None,
                steps={round(last * k / max(min(_DENOISING_STEPS - 1, last), 1)) for k in range(_DENOISING_STEPS)},
            )
            pictures = dict(zip(numbers, images, strict=True))  # drawn while they are taken
        return pictures, {i: picture_grid(own, len(own)) for i, own in zip(numbers, frames, strict=True) if own}

    def _publish(self, trainer: pl.Trainer, folder: Path, step: int, columns: int) -> None:
        """Grid picture, loggers."""
        shown = [folder / f"{stem}.png" for stem, _ in self.prompts[:_GRID_PICTURES]]
        grid = picture_grid([Image.open(path) for path in shown], columns)
        grid.save(folder.with_name(f"{folder.name}_grid.png"))
        log_picture(trainer, folder.name, grid, step)


@dataclass(eq=False)
class BatchPictures(OptimizerStepCallback):
    """Keeps the first pictures and captions of a step's last micro-batch, of rank 0, and what the autoencoder makes of
    the pictures. They are those of the loader; where a cache or encoder processes deliver latents, there are captions
    alone."""

    section = "drawing"

    run_dir: Path
    """The run folder, with `samples/`."""
    every: int
    """Optimizer steps between batches."""
    tokenizers: Mapping[str, Tokenizer]
    """Text encoder → what has made its tokens. The first one's are read: a caption that was dropped for it is empty."""
    precision: str
    """Autocast type, as in training."""
    _batch: PixelBatch | None = field(default=None, init=False)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The batch is held no longer than this call."""
        self._batch = batch
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._batch = None

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective: an autoencoder that is trained may lie in pieces on all ranks. What cannot be written is lost,
        and the run continues."""
        if self._batch is None or not self.is_due(trainer, step, self.every):
            return
        typed = autocast(trainer.strategy.root_device, self.precision)
        # Compiled modules run as they were written, as for drawing.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), typed, export_weights(module, None):
            pairs = module.reconstructions(self._batch, _RECONSTRUCTIONS)
        if not trainer.is_global_zero:
            return
        path = self.run_dir / "samples" / f"step_{step}" / "batch.png"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if captions := "".join(f"{line}\n" for line in self._captions(self._batch)):
                path.with_suffix(".txt").write_text(captions, encoding="utf-8")
            for name, grid in _grids(self._batch.pixels, pairs).items():
                grid.save(path.with_name(f"{name}.png"))
                log_picture(trainer, name, grid, step, captions if name == path.stem else "")
        except OSError as error:
            log.error(f"the batch of step {step:,} could not be written: {error}")

    def _captions(self, batch: PixelBatch) -> list[str]:
        """One line each, as the tokenizer reads its tokens back; none where no tokens are delivered."""
        name = next((name for name in self.tokenizers if name in batch.tokens), None)
        if name is None:
            return []
        decode, masks = self.tokenizers[name].decode, batch.token_masks[name][:_GRID_PICTURES].cpu()
        rows = zip(batch.tokens[name].cpu(), masks, strict=False)
        return [decode(tokens[mask]) for tokens, mask in rows]


def _grids(pixels: Tensor, pairs: Tensor | None) -> dict[str, Image.Image]:
    """By the name of the file; none without pictures."""
    if pairs is None:
        return {}
    shown = pixels[:_GRID_PICTURES].permute(0, 2, 3, 1).cpu().numpy()
    return {
        "batch": picture_grid([Image.fromarray(one) for one in shown], _GRID_COLUMNS),
        "batch_reconstructions": comparison_grid(pairs.cpu(), _RECONSTRUCTIONS_PER_ROW),
    }
