"""What every trained module shares: optimizer, learning rate, clipping, and the numbers that are logged.

Nothing here waits for the device: losses, norms and flags stay tensors until a callback reads them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from sd_training.config.changes import Change
from sd_training.config.schema import OptimizerConfig
from sd_training.errors import CheckpointError
from sd_training.optim.clipping import clip_gradients
from sd_training.optim.lr_schedules import LRSchedule
from sd_training.optim.optimizers import make_optimizer
from sd_training.training.seen import SeenMicroBatch
from sd_training.types import PixelBatch

PART = "denoiser"
"""The trained network's name in `optimizer.rates_by_part`."""


@dataclass(frozen=True)
class Optimization:
    """How the trained module is updated."""

    config: OptimizerConfig
    learning_rate: float
    """Peak learning rate."""
    schedule: LRSchedule
    """Optimizer step → factor of the peak."""
    fused: bool = True
    """Fused kernels; not with a gradient scaler (see `make_optimizer`)."""
    is_offloaded: bool = False
    """DeepSpeed keeps the optimizer state in CPU memory and updates there."""
    seed: int = 0
    """Of stochastic rounding."""


def changed_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The error of a checkpoint that was trained with other options; empty where none has changed."""
    changed = [Change(key, before[key], value) for key, value in now.items() if before.get(key, value) != value]
    if not changed:
        return ""
    return (
        f"the checkpoint belongs to a run with other options: {'; '.join(change.sentence() for change in changed)}. "
        "Restore them, or take another experiment.name and start from the exported pipeline (model.pretrained)"
    )


def spread_non_finite(loss: Tensor) -> Tensor:
    """[] `loss`; where it is not finite, its gradient is NaN, which the average over processes carries to all of them.

    An infinite loss may have a finite gradient, and the gradient alone decides whether a step is skipped. No bit of a
    finite loss or of its gradient changes: both are multiplied by 1.
    """
    return loss * (loss.detach() * 0.0 + 1.0)


class TrainedModule(pl.LightningModule):
    """A LightningModule that trains exactly one network, `self.network`; everything else it uses is no child of it.

    Args:
        network: the trained network; the only thing wrapped, averaged and checkpointed.
        optimization: optimizer, peak learning rate and schedule.
        has_gradient_scaler: fp16 training; then the scaler, not this module, skips non-finite steps.
    """

    def __init__(self, network: nn.Module, optimization: Optimization, *, has_gradient_scaler: bool = False) -> None:
        super().__init__()
        # Loaded networks come in evaluation mode.
        self.network = network.train()
        self.optimization = optimization
        self.has_gradient_scaler = has_gradient_scaler
        self.reset_logged()
        self.was_step_skipped: Tensor | None = None
        self.seen: SeenMicroBatch | None = None
        """The latest micro-batch."""
        self._has_dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in network.modules())

    def reset_logged(self) -> None:
        """Start a new logging window."""
        self.logged_sums: dict[str, Tensor] = {}
        self.logged_micro_batches = 0
        self.grad_norm: Tensor | None = None

    def remember(self, **values: Tensor) -> None:
        """Add scalars of a micro-batch to the logging window, on the device."""
        for name, value in values.items():
            value = value.detach().float()
            self.logged_sums[name] = self.logged_sums[name] + value if name in self.logged_sums else value
        self.logged_micro_batches += 1

    def remember_samples(self, batch: PixelBatch, loss: Tensor, losses: Tensor, timesteps: Tensor | None) -> None:
        """Keep what an incident tells of the micro-batch, on the device.

        Args:
            batch: as the loader delivered it.
            loss: [] what is minimised.
            losses: [B] of each sample.
            timesteps: [B], where there are any.
        """
        self.seen = SeenMicroBatch(loss.detach(), losses.detach(), batch.positions, batch.sample_ids, timesteps)

    def on_train_batch_start(self, batch: PixelBatch, batch_index: int) -> None:
        """Dropout layers alone use torch's global generator: key it by rank and step, so that resume is exact."""
        if self._has_dropout:
            strategy: Any = self.trainer.strategy
            torch.manual_seed(batch_index * strategy.data_ranks + strategy.data_rank)

    def bring_companions(self, device: torch.device) -> None:
        """Put what the training step uses, but is no child module, on `device`."""

    def sample_losses(self, batch: PixelBatch, step: int) -> tuple[Tensor, Tensor | None]:
        """[B] loss of each sample after `step` optimizer steps, and [B] what the denoiser was told of the noise level,
        where there is a denoiser. With gradients; nothing is remembered."""
        raise NotImplementedError

    def held_out_losses(self, batch: PixelBatch, quantiles: Sequence[float]) -> tuple[Tensor, Tensor | None]:
        """[K, B] loss of each sample at K quantiles of the timestep density, and [K, B] what the denoiser was told of
        the noise level, where there is a denoiser. Nothing is remembered, and nothing depends on the step."""
        raise NotImplementedError

    def configure_model(self) -> None:
        """Lets strategies that cut weights do so, before the optimizer is made."""
        cut = getattr(self.trainer.strategy, "cut", None)
        if cut is not None:
            cut()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer over the network's trainable parameters; the learning rate is set before each step."""
        plan = self.optimization
        named = [(name, parameter) for name, parameter in self.named_trained() if parameter.requires_grad]
        fused = plan.fused and not self.has_gradient_scaler
        return make_optimizer(
            plan.config,
            named,
            learning_rate=plan.learning_rate,
            fused=fused,
            seed=plan.seed,
            is_offloaded=plan.is_offloaded,
        )

    def named_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Everything that the optimizer updates; names begin with the part."""
        for name, parameter in self.network.named_parameters():
            yield f"{PART}.{name}", parameter

    def facts(self) -> dict[str, Any]:
        """Option → value of what a checkpoint cannot be continued without."""
        config = self.optimization.config
        return {
            "optimizer.name": config.name,
            "optimizer.no_decay_on_norms_and_biases": config.no_decay_on_norms_and_biases,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Says what was trained how."""
        checkpoint["trained_as"] = self.facts()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses to go on with another optimizer or objective, whose state and weights mean something else.

        Raises:
            CheckpointError: naming every option that has changed.
        """
        before: dict[str, Any] = checkpoint.get("trained_as", {})
        if changed := changed_facts(before, self.facts()):
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
        not finite has made its gradient so (`spread_non_finite`). Fused AdamW reads `found_inf` on the device; the host
        does not wait. With other optimizers it does (see `make_optimizer`). DeepSpeed does all of this itself.
        """
        if getattr(self.trainer.strategy, "does_clip", False):
            return
        trained = [parameter for _, parameter in self.named_trained()]
        self.grad_norm = clip_gradients(trained, self.optimization.config.max_grad_norm)
        if not self.has_gradient_scaler:
            self.was_step_skipped = (~torch.isfinite(self.grad_norm)).float()
            optimizer.found_inf = self.was_step_skipped

    def _pixels(self, batch: PixelBatch) -> Tensor:
        """[B, 3, H, W] float32 in [-1, 1] from the loader's bytes."""
        return batch.pixels.float().div_(127.5).sub_(1.0)
