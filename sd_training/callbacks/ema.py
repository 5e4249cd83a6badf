"""Exponential moving average of the trained network, in fp32 on the CPU, each process its share.

Lightning's `WeightAveraging` averages the whole LightningModule on its device and cannot do sharded ones; here only the
trained network is averaged, off the device, once per optimizer step, and nothing is gathered for it.

Weights on their way from the device to where they are averaged, while training goes on.

The copy runs on a stream of its own, beside the next forward pass; only the next optimizer step waits for it, on the
device. The averaging runs in threads (PyTorch's kernels release the interpreter lock), so that the thread that feeds
the device has nothing to do with it. torchrun gives a process one OpenMP thread, hence several Python threads.

Snapshots of the tracks of an average, from which other widths are rebuilt after the training (docs/ema.md).

The weights to draw, save and compare with: for schedule-free optimizers they are not those that are trained.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, distributed, nn

from sd_training.callbacks.base import OptimizerStepCallback
from sd_training.config.schema import EmaConfig
from sd_training.errors import CheckpointError
from sd_training.export.ema_snapshots import width_name, write_snapshot
from sd_training.log import get_logger
from sd_training.optim.power_function_ema import decay, gamma_of
from sd_training.parallel.sharding import ParameterSharding
from sd_training.parallel.strategies import strategy_of
from sd_training.training.base_module import TrainedModule

_MOST_THREADS = 4
"""Per process. Averaging is bound by memory bandwidth, which a few threads use up."""


class WeightStaging:
    """Copies of one set of weights in CPU memory, used again and again."""

    def __init__(self) -> None:
        local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.num_threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // local_processes - 1))
        self.copies: dict[str, Tensor] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._running: list[Future[None]] = []
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def copy(self, weights: Mapping[str, Tensor]) -> None:
        """Start copying; on CUDA into pinned memory, without waiting. What `run` started last must be done: `wait`."""
        for name, weight in weights.items():
            if name not in self.copies:
                self.copies[name] = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda)
        device = next((weight.device for weight in weights.values() if weight.is_cuda), None)
        if device is None:
            for name, weight in weights.items():
                self.copies[name].copy_(weight)
            return
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for name, weight in weights.items():
                self.copies[name].copy_(weight, non_blocking=True)
                weight.record_stream(self._stream)
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def before_weights_change(self) -> None:
        """The device, not the host, waits until the copy has left it."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def run(self, average: Callable[[Sequence[str]], None]) -> None:
        """Start `average` on the names of the copies, dealt out to threads, once the copies have arrived."""
        self._threads = self._threads or ThreadPoolExecutor(self.num_threads, "averaging")
        names = sorted(self.copies, key=lambda name: -self.copies[name].numel())
        shares = [names[first :: self.num_threads] for first in range(self.num_threads)]
        self._running = [self._threads.submit(self._arrived, average, share) for share in shares if share]

    def _arrived(self, average: Callable[[Sequence[str]], None], names: Sequence[str]) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        average(names)

    def wait(self) -> None:
        """Until what `run` started is done; its errors come up here, at every call: an average that is half updated is
        never a whole one again."""
        for future in self._running:
            future.result()
        self._running = []


@contextmanager
def evaluation_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside this scope the parameters of a schedule-free optimizer hold the average x (Defazio et al. 2024,
    arXiv:2405.15682, eq. 5); afterwards they hold the trained point y again, to the bit. Others are left as they are.

    To be opened around previews and exports, on all ranks. Not around checkpoints: these hold y, from which x follows.
    A copy of the weights is kept on the CPU meanwhile. Not to be nested.
    """
    swapped: Any = optimizer if is_schedule_free(optimizer) else None
    if swapped is None:
        yield
        return
    weights = [weight for group in swapped.param_groups for weight in group["params"]]
    trained = [weight.detach().to("cpu", copy=True) for weight in weights]
    swapped.eval()
    try:
        yield
    finally:
        # `train()` would compute y from x, and so lose the last bits.
        with torch.no_grad():
            for weight, value in zip(weights, trained, strict=True):
                weight.copy_(value)
        for group in swapped.param_groups:
            group["train_mode"] = True


def is_schedule_free(optimizer: torch.optim.Optimizer) -> bool:
    """Whether training and evaluation use different weights."""
    return all("train_mode" in group for group in optimizer.param_groups)


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

    def load_averages(
        self, trainer: pl.Trainer, module: TrainedModule, averages: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Continue from a checkpoint's averages, which are kept beside the raw weights that training resumes from.

        Args:
            averages: part → full tensors by parameter of the module.

        Raises:
            CheckpointError: an average is missing.
        """
        self.finish_update()
        for part in self._parts():
            if part == PART and part not in averages and self.may_begin_late:
                log.warning("model.use_ema: the checkpoint has no average; one begins with the weights of today")
                continue
            if part not in averages:
                option = "model.use_ema: true" if part == PART else f"ema.sigma_rels: {part}"
                raise CheckpointError(
                    f"{option}, but the checkpoint has no such average; resume without it, take another "
                    "experiment.name and start from the exported pipeline (model.pretrained)"
                    + (f", or begin one now: {_ALLOW}" if part == PART else "")
                )
            self._begin(trainer, module, part, averages[part], prefix="network.")

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
        return {PART: None} | {track_part(sigma_rel): sigma_rel for sigma_rel in self.config.sigma_rels}

    def _begin(
        self,
        trainer: pl.Trainer,
        module: TrainedModule,
        part: str,
        source: Mapping[str, Tensor] | None,
        prefix: str = "",
    ) -> None:
        """Take this process's shares of whole tensors, or of the weights as they are."""
        sharding, parameters = sharding_of(trainer), averaged_parameters(module)
        missing = [] if source is None else [name for name in parameters if prefix + name not in source]
        if missing:
            raise CheckpointError(
                f"the EMA weights do not fit the network: {len(missing)} names are missing, e.g. {missing[0]}"
            )
        shares = self.averages.setdefault(part, {})
        for name, parameter in parameters.items():
            own = (
                sharding.local_shard(parameter)
                if source is None
                else sharding.shard_of(parameter, source[prefix + name])
            )
            shares[name] = own.detach().to("cpu", torch.float32, copy=True).contiguous()

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Average every `update_every` optimizer steps."""
        if step % self.config.update_every:
            return
        self.finish_update()
        sharding = sharding_of(trainer)
        kept_here = {name: p for name, p in averaged_parameters(module).items() if self.shares[name].numel()}
        shares = {name: sharding.local_shard(parameter) for name, parameter in kept_here.items()}
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
        sharding, total = sharding_of(trainer), torch.zeros((), dtype=torch.float64)
        for name, parameter in averaged_parameters(module).items():
            if name in self._now:
                difference = self.shares[name] - self._now[name]
                total += difference.double().square().sum() / sharding.copies(parameter)
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
        sharding, parameters = sharding_of(module.trainer), averaged_parameters(module)
        kept = {name: sharding.backup(parameter) for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                sharding.swap_in(parameter, self.shares[name])
            yield
        finally:
            sharding.reshard()
            for name, parameter in parameters.items():
                sharding.restore(parameter, kept[name])

    def averages_by_module_name(self) -> dict[str, dict[str, Tensor]]:
        """Part of a checkpoint → parameter of the module → this rank's shard."""
        self.finish_update()
        return {
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
        averages = checkpoint["averages"]
        assert isinstance(averages, list)
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


def sharding_of(trainer: pl.Trainer) -> ParameterSharding:
    """Where the strategy keeps weights and optimizer state."""
    return strategy_of(trainer).sharding


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
        sharding_of(module.trainer).reshard()
        module.network.train(was_training)


def whole_weights(trainer: pl.Trainer, module: TrainedModule, ema: Ema | None) -> dict[str, Tensor]:
    """Collective: what is exported, put together on the CPU of the first process, by name in the network; empty on the
    others."""
    sharding, weights = sharding_of(trainer), {}
    if ema is not None:
        ema.finish_update()
    for name, parameter in module.network.named_parameters():
        share = None if ema is None else ema.shares.get(name)
        whole = sharding.full_tensor(parameter) if share is None else sharding.gather(parameter, share)
        if trainer.is_global_zero:
            weights[name] = whole.detach().to("cpu", copy=True)
    return weights


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
        sharding, parameters = sharding_of(trainer), averaged_parameters(module)
        for number, sigma_rel in enumerate(self.config.sigma_rels):
            shares, is_writer = (
                self.ema.averages[track_part(sigma_rel)],
                number % trainer.world_size == trainer.global_rank,
            )
            whole = {}
            for name, parameter in parameters.items():
                tensor = sharding.gather(parameter, shares[name])
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
