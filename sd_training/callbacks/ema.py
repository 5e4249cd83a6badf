"""Exponential moving average of the trained network, in fp32 on the CPU, each process its share.

Lightning's `WeightAveraging` averages the whole LightningModule on its device and cannot do sharded ones; here only the
trained network is averaged, off the device, once per optimizer step, and nothing is gathered for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, distributed, nn

from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.callbacks.weight_staging import WeightStaging
from sd_training.config.schema import EmaConfig
from sd_training.distributed.placement import Placement
from sd_training.distributed.saves import AVERAGES
from sd_training.errors import CheckpointError
from sd_training.export.ema_snapshots import width_name
from sd_training.optim.evaluation_weights import evaluation_weights
from sd_training.optim.power_function_ema import decay, gamma_of
from sd_training.rank_log import get_logger
from sd_training.training.base_module import TrainedModule

log = get_logger(__name__)

PART = "ema"
"""Name of the average in a checkpoint."""
_ALLOW = "'experiment.allow_changed=[model.use_ema]'"


def decay_at(step: int, config: EmaConfig) -> float:
    """Decay of one update after `step` optimizer steps: min(decay, (1 + n) / (10 + n)) during warm-up (the ramp of the
    original latent-diffusion code), to the power of the steps since the last update."""
    decay = min(config.decay, (1 + step) / (10 + step)) if config.warmup else config.decay
    return decay**config.update_every


class Ema(OptimizerStepCallback):
    """Keeps the average; `averaged_weights` lends it to previews and exports.

    Args:
        config: decay, interval and warm-up, and the widths of further averages (tracks).
        initial: weights by parameter name to start from; null starts from the network's own.
        may_begin_late: a run that is resumed from a checkpoint without an average begins one there.
    """

    def __init__(
        self, config: EmaConfig, initial: Mapping[str, Tensor] | None = None, *, may_begin_late: bool = False
    ) -> None:
        self.config = config
        self.may_begin_late = may_begin_late
        self._initial = initial
        self.averages: dict[str, dict[str, Tensor]] = {}
        """Part of a checkpoint → parameter of the network → this process's share of its average, fp32 on the CPU."""
        self.staging: WeightStaging | None = None
        """Takes weights off a device in the background; on CPUs they are averaged where they are."""
        self._now: Mapping[str, Tensor] = {}

    @property
    def shares(self) -> dict[str, Tensor]:
        """The average that previews and exports use, as in `averages`."""
        return self.averages[PART]

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        """Continue from a checkpoint's average, which is kept beside the raw weights that training resumes from."""
        averages = checkpoint[AVERAGES]
        assert isinstance(averages, Mapping) and isinstance(pl_module, TrainedModule)
        for part in self._parts():
            if part == PART and part not in averages and self.may_begin_late:
                log.warning("model.use_ema: the checkpoint has no average; one begins with the weights of today")
                continue
            if part not in averages:
                option = "model.use_ema: true" if part == PART else f"ema.tracks: {part}"
                raise CheckpointError(
                    f"{option}, but the checkpoint has no such average; resume without it, take another "
                    "experiment.name and start from the exported pipeline (model.pretrained)"
                    + (f", or begin one now: {_ALLOW}" if part == PART else "")
                )
            self._begin(trainer, pl_module, part, averages[part], prefix="network.")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the average from `ema.path` or the initial weights, unless it goes on from a checkpoint."""
        super().on_train_start(trainer, pl_module)
        assert isinstance(pl_module, TrainedModule)
        for part in self._parts():
            if part not in self.averages:
                self._begin(trainer, pl_module, part, self._initial if part == PART else None)
        self._initial = None

    def _parts(self) -> dict[str, float | None]:
        """Part of a checkpoint → width of the track; the average itself has none."""
        return {PART: None} | {track_part(sigma_rel): sigma_rel for sigma_rel in self.config.tracks}

    def _begin(
        self,
        trainer: pl.Trainer,
        module: TrainedModule,
        part: str,
        source: Mapping[str, Tensor] | None,
        prefix: str = "",
    ) -> None:
        """Take this process's shares of whole tensors, or of the weights as they are."""
        placement, parameters = placement_of(trainer), averaged_parameters(module)
        missing = [] if source is None else [name for name in parameters if prefix + name not in source]
        if missing:
            raise CheckpointError(
                f"the EMA weights do not fit the network: {len(missing)} names are missing, e.g. {missing[0]}"
            )
        shares = self.averages.setdefault(part, {})
        for name, parameter in parameters.items():
            own = placement.share(parameter) if source is None else placement.take(parameter, source[prefix + name])
            shares[name] = own.detach().to("cpu", torch.float32, copy=True).contiguous()

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Average every `update_every` optimizer steps."""
        if step % self.config.update_every:
            return
        self.finish_update()
        placement = placement_of(trainer)
        kept_here = {name: p for name, p in averaged_parameters(module).items() if self.shares[name].numel()}
        shares = {name: placement.share(parameter) for name, parameter in kept_here.items()}
        if any(share.is_cuda for share in shares.values()):
            self.staging = self.staging or WeightStaging()
        if self.staging is None:
            self._now = shares
            self._average(step, list(shares))
            return
        self.staging.copy(shares)
        self._now = self.staging.copies
        self.staging.run(partial(self._average, step))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """The weights must not change under a copy that is on its way."""
        if self.staging is not None:
            self.staging.before_weights_change()

    @torch.no_grad()
    def _average(self, step: int, names: Sequence[str]) -> None:
        """average ← decay · average + (1 - decay) · weights."""
        weights = [self._now[name].to("cpu", torch.float32) for name in names]
        for part, sigma_rel in self._parts().items():
            averages = [self.averages[part][name] for name in names]
            torch._foreach_lerp_(averages, weights, 1.0 - self._decay(sigma_rel, step))

    def finish_update(self) -> None:
        """Wait for an update in the background; called before the average is read."""
        if self.staging is not None:
            self.staging.wait()

    def _decay(self, sigma_rel: float | None, step: int) -> float:
        if sigma_rel is None:
            return decay_at(step, self.config)
        return decay(step, gamma_of(sigma_rel), self.config.update_every)

    @torch.no_grad()
    def measures(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> dict[str, float]:
        """Collective: the decay per optimizer step, and ‖average − weights‖ over all parameters (on a device, of the
        weights at the last update); 0 before the first update."""
        self.finish_update()
        placement, total = placement_of(trainer), torch.zeros((), dtype=torch.float64)
        for name, parameter in averaged_parameters(module).items():
            if name in self._now:
                difference = self.shares[name] - self._now[name]
                total += difference.double().square().sum() / placement.copies(parameter)
        if trainer.world_size > 1:
            total = total.to(trainer.strategy.root_device)
            distributed.all_reduce(total)
        decay = decay_at(step, self.config) ** (1 / self.config.update_every)
        return {"ema_decay": decay, "ema_distance": float(total.sqrt())}

    @contextmanager
    def averaged_weights(self, module: TrainedModule) -> Iterator[None]:
        """The network holds the average inside this scope, on all ranks, and its own weights to the bit afterwards.

        Collective.
        """
        self.finish_update()
        placement, parameters = placement_of(module.trainer), averaged_parameters(module)
        kept = {name: placement.keep(parameter) for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                placement.lend(parameter, self.shares[name])
            yield
        finally:
            placement.settle()
            for name, parameter in parameters.items():
                placement.give_back(parameter, kept[name])

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        """Hands the shares to the save, which puts them together tensor by tensor."""
        self.finish_update()
        checkpoint[AVERAGES] = {
            part: {f"network.{name}": share for name, share in shares.items()} for part, shares in self.averages.items()
        }


class NoEma(pl.Callback):
    """In place of `Ema`, in a run that keeps no average.

    Args:
        may_drop: a run that is resumed from a checkpoint with an average goes on without it.
    """

    def __init__(self, *, may_drop: bool) -> None:
        self.may_drop = may_drop

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, object]
    ) -> None:
        """What was exported so far is the average of the checkpoint.

        Raises:
            CheckpointError: it has one, and the run was not asked to drop it.
        """
        averages = checkpoint[AVERAGES]
        assert isinstance(averages, Mapping)
        if PART not in averages:
            return
        if not self.may_drop:
            raise CheckpointError(
                "model.use_ema: false, but the checkpoint has an average, and current_pipeline holds it; set it to "
                "true, take another experiment.name, or drop the average and export the raw weights from now on: "
                f"{_ALLOW}"
            )
        log.warning("model.use_ema: the checkpoint's average is dropped; exports hold the raw weights from now on")


def track_part(sigma_rel: float) -> str:
    """Name of a track in a checkpoint."""
    return f"{PART}-{width_name(sigma_rel)}"


def averaged_parameters(module: TrainedModule) -> dict[str, nn.Parameter]:
    """Trained parameters of the network by name."""
    return {name: p for name, p in module.network.named_parameters() if p.requires_grad}


def placement_of(trainer: pl.Trainer) -> Placement:
    """Where the strategy keeps weights and optimizer state."""
    placement: Placement = trainer.strategy.placement  # type: ignore[attr-defined]
    return placement


@contextmanager
def export_weights(module: TrainedModule, ema: Ema | None) -> Iterator[None]:
    """The network in evaluation mode with the weights that previews and exports use: the average where there is one,
    else its own. Collective."""
    was_training = module.network.training
    module.network.eval()
    try:
        if ema is not None:
            with ema.averaged_weights(module):
                yield
        else:
            with evaluation_weights(module.trainer.optimizers[0]):
                yield
    finally:
        placement_of(module.trainer).settle()
        module.network.train(was_training)


def whole_weights(trainer: pl.Trainer, module: TrainedModule, ema: Ema | None) -> dict[str, Tensor]:
    """Collective: what is exported, put together on the CPU of the first process, by name in the network; empty on the
    others."""
    placement, weights = placement_of(trainer), {}
    if ema is not None:
        ema.finish_update()
    for name, parameter in module.network.named_parameters():
        share = None if ema is None else ema.shares.get(name)
        whole = placement.whole(parameter) if share is None else placement.gather(parameter, share)
        if trainer.is_global_zero:
            weights[name] = whole.detach().to("cpu", copy=True)
    return weights
