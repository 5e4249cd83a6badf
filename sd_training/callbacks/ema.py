"""Exponential moving average of the trained network in fp32, each rank its shard, on the device or on the CPU
(`ema.device`).

Lightning's `WeightAveraging` averages the whole LightningModule on its device and cannot do sharded ones; here only the
trained network is averaged, once per optimizer step, and nothing is gathered for it.

On the device an update reads the weights where they are. On the CPU, weights of a device are copied on a stream of
their own, beside the next forward pass; only the next optimizer step waits for the copy, on the device. They are copied
in chunks, and threads average the first ones while the last ones are copied (PyTorch's kernels release the interpreter
lock), so that the thread that feeds the device does none of it. torchrun gives a process one OpenMP thread, hence
several Python threads.

`export_weights` and `full_export_weights` give the weights to draw, save and compare with: the average where there is
one. Averages of other widths are rebuilt after the training from snapshots of the tracks (docs/ema.md).
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from sd_training.callbacks.base import OptimizerStepCallback
from sd_training.checkpoint.folder import flush, flush_file, whole_file, write_failure
from sd_training.config.schema import EmaConfig
from sd_training.errors import CheckpointError
from sd_training.log import get_logger
from sd_training.parallel.strategies import assign_by_size, strategy_of
from sd_training.training import BEGIN_ANOTHER, TrainedModule

log = get_logger(__name__)

EMA_PART = "ema"
"""Name of the average in a checkpoint."""
_NETWORK = "network."
"""Begins the names of the network's parameters in the module, and so in checkpoints."""
_MAX_THREADS = 4
"""Per process. Averaging is bound by memory bandwidth, which a few threads saturate."""
_NUM_CHUNKS = 8
"""Of about equal size, in which weights leave a device."""
_NUM_AT_ONCE = 64
"""Tensors averaged by one call; as many weights of another type than fp32 exist in fp32 at the same time."""
_FREE_SHARE = 0.1
"""With `ema.device=auto` the average is on the device if this share of the device's memory stays free beside it."""


class WeightStaging:
    """Copies of one set of weights in CPU memory, used again and again, and threads that average them."""

    def __init__(self, num_threads: int | None = None) -> None:
        spare = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
        self.num_threads = num_threads or max(1, min(_MAX_THREADS, spare))
        self.copies: dict[str, Tensor] = {}
        self._chunks: list[list[str]] = []
        self._threads = ThreadPoolExecutor(self.num_threads, "averaging")
        self._running: list[Future[None]] = []
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def start(self, weights: Mapping[str, Tensor], average: Callable[[Sequence[str]], None]) -> None:
        """Starts copying, on CUDA into pinned memory without waiting. Threads run `average` with the names of a chunk
        as soon as its copies have arrived. What was started before must be done: `wait`."""
        device = next((weight.device for weight in weights.values() if weight.is_cuda), None)
        if device is not None:
            self._stream = self._stream or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        if not self.copies:
            for name, weight in weights.items():  # in the layout of the weight, or the device would make another copy
                self.copies[name] = torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda)
            chunk_of = assign_by_size([weight.numel() for weight in weights.values()], _NUM_CHUNKS)
            pairs = list(zip(weights, chunk_of, strict=True))
            self._chunks = [[n for n, own in pairs if own == number] for number in range(_NUM_CHUNKS)]

        def average_arrived(names: Sequence[str], copied: torch.cuda.Event | None) -> None:
            if copied is not None:
                copied.synchronize()
            average(names)

        self._running = []
        for names in filter(None, self._chunks):
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                for name in names:
                    weight = weights[name]
                    self.copies[name].copy_(weight, non_blocking=weight.is_cuda)
                    if self._stream is not None and weight.is_cuda:
                        weight.record_stream(self._stream)
                self._copied = None if self._stream is None else self._stream.record_event()
            self._running.append(self._threads.submit(average_arrived, names, self._copied))

    def before_weights_change(self) -> None:
        """The device, not the host, waits until the last copy has left it."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Until what was started is done. Raises its errors, at every call: a half updated average is never whole
        again."""
        for future in self._running:
            future.result()


def decay_at(step: int, config: EmaConfig) -> float:
    """Decay of one update after `step` optimizer steps: min(decay, (1 + n) / (10 + n)) during warm-up (the ramp of the
    original latent-diffusion code), to the power of the steps since the last update."""
    decay = min(config.decay, (1 + step) / (10 + step)) if config.warmup else config.decay
    return decay**config.update_every


def fits_on_device(needed: int, free: int, total: int) -> bool:
    """Whether averages of `needed` bytes leave a tenth of a device's `total` bytes free, when `free` are free without
    them. Other bucket sizes and previews may take more than the first step did."""
    return needed <= free - _FREE_SHARE * total


class Ema(OptimizerStepCallback):
    """Keeps the average, and further ones of other widths (tracks).

    Args:
        config: decay, interval, warm-up, device, and the widths of the tracks.
        run_dir: the run folder, where snapshots of the tracks are written.
        initial: weights by parameter name to start from; null starts from the network's own.
    """

    section = "average"

    def __init__(self, config: EmaConfig, run_dir: Path, initial: Mapping[str, Tensor] | None = None) -> None:
        self.config, self.run_dir = config, run_dir
        self._initial = initial and {f"{_NETWORK}{name}": tensor for name, tensor in initial.items()}
        self.averages: dict[str, dict[str, Tensor]] = {}
        """Part of a checkpoint → parameter of the module → this rank's shard of its average, in fp32 and the memory
        layout of the shard."""
        self.staging: WeightStaging | None = None
        """Takes weights off a device in the background; without it they are averaged where they are."""
        self._is_on_device = None if config.device == "auto" else config.device == "cuda"
        """Whether averages are beside the weights, and not on the CPU; None: not decided yet, until then on the CPU."""
        self._parameters: dict[str, nn.Parameter] = {}
        """What is averaged, found at the first update: to walk through the network at every step takes milliseconds."""
        self._tracks = {f"{EMA_PART}-{width_name(sigma_rel)}": sigma_rel for sigma_rel in config.sigma_rels}
        """Part of a checkpoint → sigma_rel."""

    @property
    def shards(self) -> dict[str, Tensor]:
        """The average that previews and exports use, as in `averages`."""
        return self.averages[EMA_PART]

    def load_averages(
        self, trainer: pl.Trainer, module: TrainedModule, averages: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Continue from a checkpoint's averages, which are kept beside the raw weights that training resumes from.

        Args:
            averages: part → full tensors by parameter of the module.

        Raises:
            CheckpointError: a track is missing, which cannot begin late.
        """
        self.finish_update()
        if missing := sorted(self._tracks.keys() - averages.keys()):
            without = f"{missing[0]}, but the checkpoint has no such average; resume without it"
            raise CheckpointError(f"ema.sigma_rels: {without}, or {BEGIN_ANOTHER}")
        for part in (EMA_PART, *self._tracks):
            self._start(trainer, module, part, averages.get(part, self._initial))  # or with the run's first weights

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Start the average from `ema.path` or the initial weights, unless a checkpoint's was loaded."""
        super().on_train_start(trainer, pl_module)
        for part in (EMA_PART, *self._tracks):  # in one order on all ranks
            if part not in self.averages:
                self._start(trainer, pl_module, part, self._initial if part == EMA_PART else None)
        self._initial = None

    def _start(self, trainer: pl.Trainer, module: TrainedModule, part: str, full: Mapping[str, Tensor] | None) -> None:
        """Takes this rank's shards of full tensors; None: of the network's own weights."""
        sharding, parameters = strategy_of(trainer).sharding, averaged_parameters(module)
        if full is not None and (missing := parameters.keys() - {*full}):
            raise CheckpointError(f"the EMA weights do not fit the network: they have no {min(missing)}")
        self.averages[part] = {}
        for name, parameter in parameters.items():
            shard = sharding.local_shard(parameter)
            values = shard if full is None else sharding.shard_of(parameter, full[name])
            self.averages[part][name] = self._placed(shard, values)

    def _placed(self, shard: Tensor, values: Tensor) -> Tensor:
        """A copy of an average's values, where it belongs: beside the weights' shard, or on the CPU."""
        device = shard.device if self._is_on_device else torch.device("cpu")
        return torch.empty_like(shard, dtype=torch.float32, device=device).copy_(values.detach())

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        """The weights must not change while they are copied."""
        if self.staging is not None:
            self.staging.before_weights_change()

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Average every `update_every` optimizer steps. Collective where snapshots are due: every so many optimizer
        steps, and at the last update of the run."""
        if step % self.config.update_every:
            return
        self.finish_update()
        sharding = strategy_of(trainer).sharding
        self._parameters = self._parameters or averaged_parameters(module)
        weights = {name: sharding.local_shard(parameter) for name, parameter in self._parameters.items()}
        weights = {name: weight for name, weight in weights.items() if weight.numel()}
        device = next((weight.device for weight in weights.values() if weight.is_cuda), None)
        if device is not None and self._is_on_device is None:
            self._choose_device(weights, *torch.cuda.mem_get_info(device))
        if device is not None and not self._is_on_device:
            self.staging = self.staging or WeightStaging()
        if self.staging is None:
            self._average(step, weights, list(weights))
        else:
            self.staging.start(weights, partial(self._average, step, self.staging.copies))
        if self.config.sigma_rels and self.is_due(trainer, step, self.config.snapshot_every):
            self._write_snapshots(trainer, module, step)

    def _choose_device(self, weights: Mapping[str, Tensor], free: int, total: int) -> None:
        """`ema.device=auto`, before the first update of a start: by then an optimizer step has taken its memory, which
        the allocator keeps. All updates of a start are made in one place, so that a resumed run gives the same bits.

        Args:
            weights: as they are averaged.
            free, total: memory of their device [bytes].
        """
        needed = len(self.averages) * sum(weight.numel() * torch.float32.itemsize for weight in weights.values())
        self._is_on_device = fits_on_device(needed, free, total)
        place = "on the device" if self._is_on_device else "on the CPU"
        log.info(f"EMA: {place}; {needed / 2**30:.2f} GiB, of the device {free / 2**30:.2f} GiB are free")
        if self._is_on_device:
            for shards in self.averages.values():
                shards.update({name: self._placed(weight, shards[name]) for name, weight in weights.items()})

    @torch.no_grad()
    def _average(self, step: int, weights: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """average ← decay · average + (1 - decay) · weights."""
        decays = {EMA_PART: decay_at(step, self.config)}
        for part, sigma_rel in self._tracks.items():
            decays[part] = track_decay(step, gamma_of(sigma_rel), self.config.update_every)
        for first in range(0, len(names), _NUM_AT_ONCE):
            some = names[first : first + _NUM_AT_ONCE]
            new = [weights[name].to(self.shards[name].device, torch.float32) for name in some]
            for part, part_decay in decays.items():
                torch._foreach_lerp_([self.averages[part][name] for name in some], new, 1.0 - part_decay)

    def finish_update(self) -> None:
        """Wait for an update in the background; called before the average is read."""
        if self.staging is not None:
            self.staging.wait()

    def _write_snapshots(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective: tracks are gathered one after the other, each written by another rank. One that cannot be written
        is missing later; the run continues."""
        self.finish_update()
        sharding, parameters = strategy_of(trainer).sharding, averaged_parameters(module)
        for number, (part, sigma_rel) in enumerate(self._tracks.items()):
            is_writer, shards = number % trainer.world_size == trainer.global_rank, self.averages[part]
            full_tensors = ((n.removeprefix(_NETWORK), sharding.gather(p, shards[n])) for n, p in parameters.items())
            copies = _copies(full_tensors, is_kept=is_writer)
            if is_writer:
                try:
                    write_snapshot(self.run_dir, step, sigma_rel, copies)
                except OSError as error:
                    log.error(str(error))
        trainer.strategy.barrier("snapshots written")

    @contextmanager
    def averaged_weights(self, module: TrainedModule) -> Iterator[None]:
        """Collective: the network holds the average inside this scope, and its own weights to the bit afterwards."""
        self.finish_update()
        sharding, parameters = strategy_of(module.trainer).sharding, averaged_parameters(module)
        backups = [sharding.backup(parameter) for parameter in parameters.values()]
        try:
            for name, parameter in parameters.items():
                sharding.swap_in(parameter, self.shards[name])
            yield
        finally:
            sharding.reshard()
            for parameter, backup in zip(parameters.values(), backups, strict=True):
                sharding.restore(parameter, backup)


def averaged_parameters(module: TrainedModule) -> dict[str, nn.Parameter]:
    """Trained parameters of the network by their names in the module."""
    return {f"{_NETWORK}{name}": p for name, p in module.network.named_parameters() if p.requires_grad}


@contextmanager
def export_weights(module: TrainedModule, ema: Ema | None) -> Iterator[None]:
    """The network in evaluation mode with the weights that previews and exports use: the average where there is one,
    else its own. Collective."""
    was_training, trainer = module.network.training, module.trainer
    module.network.eval()
    try:
        with nullcontext() if ema is None else ema.averaged_weights(module):
            yield
    finally:
        strategy_of(trainer).sharding.reshard()
        module.network.train(was_training)


def full_export_weights(module: TrainedModule, ema: Ema | None) -> dict[str, Tensor]:
    """Collective: the same weights as full tensors in the CPU memory of rank 0, by name in the network; empty on the
    other ranks. Of a network with adapters these alone."""
    sharding = strategy_of(module.trainer).sharding
    if ema is not None:
        ema.finish_update()

    def full(name: str, parameter: nn.Parameter) -> Tensor:
        if ema is None or (shard := ema.shards.get(_NETWORK + name)) is None:
            return sharding.full_tensor(parameter)
        return sharding.gather(parameter, shard).to(sharding.local_shard(parameter).dtype)

    own = (o for o in module.network.named_parameters() if o[1].requires_grad or not module.has_adapters)
    full_tensors = ((name, full(name, parameter)) for name, parameter in own)
    return _copies(full_tensors, is_kept=module.trainer.is_global_zero)


def _copies(full_tensors: Iterator[tuple[str, Tensor]], *, is_kept: bool) -> dict[str, Tensor]:
    """Collective where the tensors are: copies of all in CPU memory, or none."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in full_tensors if is_kept}


# Tracks: power-function averages of weights (Karras et al. 2024 (EDM2), "Analyzing and Improving the Training Dynamics
# of Diffusion Models", arXiv:2312.02696, section 3 and appendix C). After t optimizer steps the average is the integral
# of the weights θ(τ) over the profile
#
#     p(τ) = (γ + 1) τ^γ / t^(γ + 1),   0 ≤ τ ≤ t.
#
# Its width is a constant share of the training, `sigma_rel` = standard deviation of p / t; the larger the exponent γ,
# the shorter the average. The profile is 0 at τ = 0, so the initial weights are forgotten without a warm-up.
# Snapshots are the material of a later reconstruction (scripts/posthoc_ema.py):
#
#     RUN/ema_snapshots/step=5000/sigma_rel=0.050.safetensors
#
# holds the average of every parameter of the trained network under its name in the network's state_dict. A file is
# written beside its place, flushed and renamed: one that has its name is whole.

MAX_SIGMA_REL = 12**-0.5
"""0.2887: γ = 0, the plain mean of the whole training. Wider would mean more weight on the beginning."""
SNAPSHOTS = "ema_snapshots"
"""Folder of the snapshots in a run folder."""
STEP, WIDTH = "step=", "sigma_rel="
"""Begin the names of its folders, and of the files in them."""


def gamma_of(sigma_rel: float) -> float:
    """Exponent of the average with this width (algorithm 2): the largest root of
    γ³ + 7 γ² + (16 - σ⁻²) γ + 12 - σ⁻² = 0.

    Raises:
        ValueError: there is no such average.
    """
    if not 0.0 < sigma_rel <= MAX_SIGMA_REL:
        raise ValueError(f"sigma_rel is {sigma_rel}; it must be above 0 and at most {MAX_SIGMA_REL:.4f}")
    inverse_square = float(sigma_rel) ** -2
    return max(0.0, float(np.roots([1.0, 7.0, 16.0 - inverse_square, 12.0 - inverse_square]).real.max()))


def track_decay(step: int, gamma: float, update_every: int = 1) -> float:
    """Decay β of the update after `step` optimizer steps; average ← β · average + (1 - β) · weights.

    A snapshot of the weights stands for the k = `update_every` steps up to it, hence it gets the profile's integral
    over them, 1 - ((t - k) / t)^(γ + 1), and what is left of the older ones is

        β = (1 - k / t)^(γ + 1),

    the paper's β(t) for k = 1. The products telescope: whatever k is, the weights of step j have the profile's
    integral from j - k to j in the average at t, to the last bit of the arithmetic.

    Args:
        step: optimizer steps completed, t; a multiple of `update_every`.
        gamma: exponent.
        update_every: optimizer steps between updates, k.

    Returns:
        In [0, 1); 0 at the first update, where the average starts as the weights.
    """
    if step <= update_every:
        return 0.0
    return math.exp((gamma + 1) * math.log1p(-update_every / step))


def width_name(sigma_rel: float) -> str:
    """`sigma_rel=0.050`: three digits, or all of them where three would not distinguish two widths."""
    text = f"{sigma_rel:.3f}"
    return f"{WIDTH}{text if float(text) == sigma_rel else repr(float(sigma_rel))}"


def snapshot_path(run_dir: Path, step: int, sigma_rel: float) -> Path:
    """Where the snapshot of a track lies."""
    return run_dir / SNAPSHOTS / f"{STEP}{step}" / f"{width_name(sigma_rel)}.safetensors"


def write_snapshot(run_dir: Path, step: int, sigma_rel: float, tensors: Mapping[str, Tensor]) -> Path:
    """Writes one track; a snapshot of the same step and width is replaced.

    Args:
        run_dir: the run folder.
        step: optimizer steps completed, at an update of the average.
        sigma_rel: width of the track.
        tensors: average by parameter name, on any device.

    Returns:
        The file.

    Raises:
        OSError: it could not be written; names the file and free space. An older file is as it was.
    """
    path = snapshot_path(run_dir, step, sigma_rel)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as beside:
            save_file({n: t.detach().to("cpu", torch.float32).contiguous() for n, t in tensors.items()}, beside)
            flush_file(beside)
        for folder in (path.parent, path.parent.parent, run_dir):
            flush(folder)
    except (OSError, SafetensorError) as error:
        raise write_failure("EMA snapshot", path, error) from error
    return path
