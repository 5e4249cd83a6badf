"""Exponential moving average of the trained network, in fp32 on the CPU of the first process.

Lightning's `WeightAveraging` averages the whole LightningModule on its device; here only the trained network is
averaged, off the device, once per optimizer step.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.config.schema import EmaConfig
from sd_training.errors import CheckpointError
from sd_training.optim.evaluation_weights import evaluation_weights
from sd_training.training.base_module import TrainedModule


def decay_at(step: int, config: EmaConfig) -> float:
    """Decay of one update after `step` optimizer steps: min(decay, (1 + n) / (10 + n)) during warm-up (the ramp of the
    original latent-diffusion code), to the power of the steps since the last update."""
    decay = min(config.decay, (1 + step) / (10 + step)) if config.warmup else config.decay
    return decay**config.update_every


class Ema(OptimizerStepCallback):
    """Keeps the average; `averaged_weights` lends it to previews and exports.

    Args:
        config: decay, interval and warm-up.
        initial: weights by parameter name to start from; null starts from the network's own.
    """

    def __init__(self, config: EmaConfig, initial: Mapping[str, Tensor] | None = None) -> None:
        self.config = config
        self._initial = initial
        self.average: dict[str, Tensor] = {}
        self._staging: dict[str, Tensor] = {}
        self._staged_decay: float | None = None
        self._staged: torch.cuda.Event | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the average on the first process, from the checkpoint, `ema.path` or the initial weights."""
        assert isinstance(pl_module, TrainedModule)
        if not trainer.is_global_zero:
            return
        source = self.average or self._initial or dict(pl_module.network.named_parameters())
        weights = dict(pl_module.network.named_parameters())
        if set(source) != set(weights):
            odd = sorted(set(source) ^ set(weights))
            raise CheckpointError(f"the EMA weights do not fit the network: {len(odd)} names differ, e.g. {odd[0]}")
        self.average = {
            name: source[name].detach().to("cpu", torch.float32, copy=True).contiguous() for name in weights
        }
        self._initial = None

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Average every `update_every` optimizer steps."""
        if not trainer.is_global_zero or step % self.config.update_every:
            return
        self.finish_update()
        if module.device.type == "cuda":
            self._stage(module, decay_at(step, self.config))
        else:
            self._average({n: p.detach() for n, p in module.network.named_parameters()}, decay_at(step, self.config))

    def _stage(self, module: TrainedModule, decay: float) -> None:
        """Start copying the weights to pinned memory; they are averaged at the next update, so nothing waits."""
        for name, parameter in module.network.named_parameters():
            if name not in self._staging:
                self._staging[name] = torch.empty_like(self.average[name], pin_memory=True)
            self._staging[name].copy_(parameter.detach(), non_blocking=True)
        self._staged, self._staged_decay = torch.cuda.Event(), decay
        self._staged.record()

    def finish_update(self) -> None:
        """Average what was staged; called before the average is read."""
        if self._staged is None or self._staged_decay is None:
            return
        self._staged.synchronize()
        self._average(self._staging, self._staged_decay)
        self._staged = self._staged_decay = None

    @torch.no_grad()
    def _average(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """average ← decay · average + (1 - decay) · weights."""
        names = list(self.average)
        current = [weights[name].to("cpu", torch.float32) for name in names]
        torch._foreach_lerp_([self.average[name] for name in names], current, 1.0 - decay)

    @contextmanager
    def averaged_weights(self, module: TrainedModule) -> Iterator[None]:
        """The network holds the average inside this scope, on all ranks, and its own weights to the bit afterwards.

        Collective: the first process hands its average to the others.
        """
        self.finish_update()
        own = {name: p.detach().to("cpu", copy=True) for name, p in module.network.named_parameters()}
        was_training = module.network.training
        module.network.eval()
        with torch.no_grad():
            for name, parameter in module.network.named_parameters():
                if self.average:
                    parameter.copy_(self.average[name])
                if module.trainer.world_size > 1:
                    torch.distributed.broadcast(parameter.data, src=0)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in module.network.named_parameters():
                    parameter.copy_(own[name])
            module.network.train(was_training)

    def state_dict(self) -> dict[str, Any]:
        """The average, beside the raw weights that training resumes from."""
        self.finish_update()
        return {"ema": dict(self.average)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint's average."""
        self.average = dict(state_dict["ema"])


@contextmanager
def export_weights(module: TrainedModule, ema: Ema | None) -> Iterator[None]:
    """The weights that previews and exports use: the average where there is one, else the network's own."""
    if ema is not None:
        with ema.averaged_weights(module):
            yield
        return
    was_training = module.network.training
    module.network.eval()
    try:
        with evaluation_weights(module.trainer.optimizers[0]):
            yield
    finally:
        module.network.train(was_training)
