"""Snapshots of the tracks of an average, from which other widths are rebuilt after the training (docs/ema.md)."""

from collections.abc import Mapping
from pathlib import Path

import pytorch_lightning as pl
from torch import Tensor

from sd_training.callbacks.ema import Ema, averaged_parameters, placement_of, track_part
from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.config.schema import EmaConfig
from sd_training.export.ema_snapshots import write_snapshot
from sd_training.rank_log import get_logger
from sd_training.training.base_module import TrainedModule

log = get_logger(__name__)


class EmaSnapshots(OptimizerStepCallback):
    """Writes each track every so many optimizer steps, and at the last update of the run.

    Args:
        run_dir: the run folder.
        config: widths and interval.
        ema: keeps the tracks.
    """

    def __init__(self, run_dir: Path, config: EmaConfig, ema: Ema) -> None:
        self.run_dir, self.config, self.ema = run_dir, config, ema

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective: tracks are put together one after the other, each written by another process."""
        if step % self.config.update_every or not self.is_due(trainer, step, self.config.snapshot_every):
            return
        self.ema.finish_update()
        placement, parameters = placement_of(trainer), averaged_parameters(module)
        for number, sigma_rel in enumerate(self.config.tracks):
            shares, is_writer = (
                self.ema.averages[track_part(sigma_rel)],
                number % trainer.world_size == trainer.global_rank,
            )
            whole = {}
            for name, parameter in parameters.items():
                tensor = placement.gather(parameter, shares[name])
                if is_writer:
                    whole[name] = tensor.detach().to("cpu", copy=True)
            if is_writer:
                self._write(step, sigma_rel, whole)
        trainer.strategy.barrier("snapshots written")

    def _write(self, step: int, sigma_rel: float, whole: Mapping[str, Tensor]) -> None:
        """One that cannot be written is missing later; the run goes on."""
        try:
            write_snapshot(self.run_dir, step, sigma_rel, whole)
        except OSError as error:
            log.error(str(error))
