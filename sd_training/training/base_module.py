"""What every trained module shares: optimizer, learning rate, clipping, and the numbers that are logged.

Nothing here waits for the device: losses, norms, flags and the record of a micro-batch stay tensors until a callback
reads them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from sd_training.config.changes import Change
from sd_training.errors import CheckpointError
from sd_training.optim.optimizers import Optimization, clip_gradients, make_optimizer
from sd_training.parallel.strategies import strategy_of
from sd_training.types import PixelBatch


class MicroBatchRecord(NamedTuple):
    """One forward pass of this process. Nothing here holds a graph."""

    sample_losses: Tensor
    """[B]."""
    positions: Tensor
    """[B] int64, as in the batch."""
    sample_ids: Tensor
    """[B] int64, as in the batch."""
    timesteps: Tensor | None
    """[B] the denoiser's timestep input; None for autoencoders."""


PART = "denoiser"
"""The trained network's name in `optimizer.rates_by_part`."""


def changed_requirements(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The error of a checkpoint that was trained with other options; empty where none has changed."""
    changed = [Change(key, before[key], value) for key, value in now.items() if before.get(key, value) != value]
    if not changed:
        return ""
    return (
        f"the checkpoint belongs to a run with other options: {'; '.join(change.sentence() for change in changed)}. "
        "Restore them, or take another experiment.name and start from the exported pipeline (model.pretrained)"
    )


class TrainedModule(pl.LightningModule):
    """A LightningModule that trains exactly one network, `self.network`; everything else it uses is no child of it.

    Args:
        network: the trained network; the only thing wrapped, averaged and checkpointed.
        optimization: optimizer, peak learning rate and schedule.
    """

    def __init__(self, network: nn.Module, optimization: Optimization) -> None:
        super().__init__()
        # Loaded networks come in evaluation mode.
        self.network = network.train()
        self.optimization = optimization
        self.reset_logged()
        self.was_step_skipped: Tensor | None = None
        self.last_micro_batch: MicroBatchRecord | None = None
        """The latest micro-batch."""
        self._has_dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in network.modules())

    def reset_logged(self) -> None:
        """Start a new logging window."""
        self.logged_sums: dict[str, Tensor] = {}
        self.logged_micro_batches = 0
        self.grad_norm: Tensor | None = None

    def training_step(self, batch: PixelBatch, batch_index: int) -> Tensor:
        """[] what is minimised: the mean loss of a micro-batch. Keeps, on the device, what is logged and what an
        incident's report needs.

        Where the loss is not finite, its gradient is NaN, which the average over processes carries to all of them: an
        infinite loss may have a finite gradient, and the gradient alone decides whether a step is skipped. No bit of a
        finite loss or of its gradient changes: both are multiplied by 1.
        """
        losses, timesteps, logged = self.sample_losses(batch, self.trainer.global_step)
        loss = losses.mean()
        for name, value in {"loss": loss, **logged}.items():
            value = value.detach().float()
            self.logged_sums[name] = self.logged_sums[name] + value if name in self.logged_sums else value
        self.logged_micro_batches += 1
        self.last_micro_batch = MicroBatchRecord(losses.detach(), batch.positions, batch.sample_ids, timesteps)
        return loss * (loss.detach() * 0.0 + 1.0)

    def on_train_batch_start(self, batch: PixelBatch, batch_index: int) -> None:
        """Dropout layers alone use torch's global generator: key it by rank and step, so that resume is exact."""
        if self._has_dropout:
            strategy = strategy_of(self.trainer)
            torch.manual_seed(batch_index * strategy.data_ranks + strategy.data_rank)

    def move_frozen_to(self, device: torch.device) -> None:
        """Move what the training step uses, but is no child module, to `device`."""

    def sample_losses(self, batch: PixelBatch, step: int) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """[B] loss of each sample after `step` optimizer steps, with gradients; [B] the denoiser's timestep input, None
        without a denoiser; and [] further scalars to log."""
        raise NotImplementedError

    def held_out_losses(self, batch: PixelBatch, quantiles: Sequence[float]) -> tuple[Tensor, Tensor | None]:
        """[K, B] loss of each sample at K quantiles of the timestep density, and [K, B] the denoiser's timestep input;
        None without a denoiser. Nothing is logged or recorded, and nothing depends on the step."""
        raise NotImplementedError

    def configure_model(self) -> None:
        """Strategies that shard weights do so here, before the optimizer is made."""
        strategy_of(self.trainer).shard_network()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer over the network's trainable parameters; the learning rate is set before each step."""
        return make_optimizer(self.optimization, [(name, p) for name, p in self.named_trained() if p.requires_grad])

    def named_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Everything that the optimizer updates; names begin with the part."""
        for name, parameter in self.network.named_parameters():
            yield f"{PART}.{name}", parameter

    def resume_requirements(self) -> dict[str, Any]:
        """Option → value that a run resumed from a checkpoint must have."""
        names, config = ("name", "no_decay_on_norms_and_biases"), self.optimization.config
        return {f"optimizer.{name}": getattr(config, name) for name in names}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Records what a resumed run must have in common."""
        checkpoint["trained_as"] = self.resume_requirements()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses to go on with another optimizer or objective, whose state and weights mean something else.

        Raises:
            CheckpointError: naming every option that has changed.
        """
        if changed := changed_requirements(checkpoint["trained_as"], self.resume_requirements()):
            raise CheckpointError(changed)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next optimizer step."""
        return self.optimization.learning_rate * self.optimization.schedule(self.trainer.global_step)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Set the learning rate: a pure function of the optimizer step, hence nothing to restore on resume."""
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate * group["lr_factor"]

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip once per optimizer step, and mark a non-finite gradient so that the optimizer skips the step.

        The gradient is already averaged over ranks, so every rank sees the same norm and decides alike; a loss that is
        not finite has made its gradient so (`training_step`). Fused AdamW reads `found_inf` on the device; the
        host does not wait. With other optimizers it does (see `make_optimizer`). DeepSpeed does all of this itself.
        """
        if strategy_of(self.trainer).clips_gradients:
            return
        self.grad_norm = clip_gradients((p for _, p in self.named_trained()), self.optimization.config.max_grad_norm)
        if not self.optimization.has_gradient_scaler:
            self.was_step_skipped = (~torch.isfinite(self.grad_norm)).float()
            optimizer.found_inf = self.was_step_skipped

    def _pixels(self, batch: PixelBatch) -> Tensor:
        """[B, 3, H, W] float32 in [-1, 1] from the loader's bytes."""
        return batch.pixels.float().div_(127.5).sub_(1.0)
