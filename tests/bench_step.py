"""Speed of a training step: this trainer, bare Lightning and a hand-written loop, alternating in one process.

    python -m tests.bench_step                      # quickstart UNet, batch 64
    python -m tests.bench_step --model sd2 --batch 32 --resolution 512 --precision bf16
    python -m tests.bench_step --variants compiled channels_last recompute   # against it without

All train the same network from the same weights on the same batches in memory, with AdamW and clipping; the loop and
this trainer also keep an EMA on the CPU. They take turns of a few steps, and a ratio is that of neighbouring turns, so
that a busy machine slows all of them alike.
"""

import argparse
import copy
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeAlias

from sd_training.log import quiet_libraries

quiet_libraries()

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import Strategy
from torch import nn

from sd_training.callbacks.base import RunState
from sd_training.callbacks.ema import Ema
from sd_training.callbacks.metrics import COLUMNS, MetricRows, Metrics
from sd_training.callbacks.numerics import NumericGuard
from sd_training.callbacks.save import Save
from sd_training.checkpoint.folder import NO_LOCK
from sd_training.cli import run_cli
from sd_training.config.schema import (
    Config,
    EmaConfig,
    LRScheduleConfig,
    LRScheduleParams,
    OptimizerConfig,
)
from sd_training.diffusion import Objective
from sd_training.models.family import autocast
from sd_training.optim import Optimization, lr_schedule
from sd_training.parallel.strategies import SingleProcessStrategy
from sd_training.training import DiffusionModule
from sd_training.types import PixelBatch
from tests.bench_subjects import VARIANTS, Subject, make_subject, plain_objective, variant_of

LEARNING_RATE = 1e-4
EMA_DECAY = 0.999
MAX_GRAD_NORM = 1.0


class Turns:
    """Contestants run in threads of their own, one at a time, `steps` optimizer steps a turn."""

    def __init__(self, names: list[str], steps: int, device: torch.device) -> None:
        self.waiting = list(names)
        self.steps = steps
        self.device = device
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self.step_bytes: dict[str, int] = {}
        """CUDA: the most that a step takes on top of what stays between steps, activations above all."""
        self._changed = threading.Condition()

    def take(self, name: str) -> None:
        """Wait until it is the contestant's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self.waiting[0] == name)

    def pass_on(self, *, leave: bool = False) -> None:
        """Let the next one run; whoever leaves gets no further turn."""
        with self._changed:
            name = self.waiting.pop(0)
            if not leave:
                self.waiting.append(name)
            self._changed.notify_all()


class TurnLoader:
    """Batches in memory. Everything a contestant does between two batches falls into its turn, and is timed."""

    def __init__(self, turns: Turns, name: str, batches: list[PixelBatch], num_turns: int) -> None:
        self.turns, self.name, self.batches, self.num_turns = turns, name, batches, num_turns

    def __len__(self) -> int:
        # The last batch only closes the last turn.
        return self.num_turns * self.turns.steps + 1

    def __iter__(self) -> Iterator[PixelBatch]:
        for _ in range(self.num_turns):
            self.turns.take(self.name)
            synchronize(self.turns.device)
            stays_bytes = memory_bytes(self.turns.device)
            start_s = time.perf_counter()
            for step in range(self.turns.steps):
                yield self.batches[step % len(self.batches)]
            synchronize(self.turns.device)
            self.turns.seconds[self.name].append((time.perf_counter() - start_s) / self.turns.steps)
            self.turns.step_bytes[self.name] = peak_bytes(self.turns.device) - stays_bytes
            self.turns.pass_on()
        self.turns.take(self.name)
        yield self.batches[0]


def synchronize(device: torch.device) -> None:
    """Wait for the device, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_bytes(device: torch.device) -> int:
    """Allocated now; the peak counts from here. 0 without CUDA."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device) -> int:
    """The most allocated since `memory_bytes`. 0 without CUDA."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


class BareModule(pl.LightningModule):
    """The least that Lightning can train: what Lightning itself costs."""

    def __init__(self, subject: Subject, unet: nn.Module) -> None:
        super().__init__()
        self.unet, self.subject = unet, subject
        self.objective = plain_objective(subject)

    def training_step(self, batch: PixelBatch, batch_index: int) -> torch.Tensor:
        return loss_of(self.unet, self.subject, self.objective, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.unet.parameters(), lr=LEARNING_RATE, fused=True)


def loss_of(unet: nn.Module, subject: Subject, objective: Objective, batch: PixelBatch) -> torch.Tensor:
    """The plain training loss."""
    pixels, family = batch.pixels.float() / 127.5 - 1.0, subject.family
    latents = family.draw_latents(family.moments(pixels, subject.precision), batch.posterior_noise)
    with torch.no_grad(), autocast(subject.device, subject.precision):
        text_states = family.encode(batch).states[0]
    noised = objective.draw(latents, batch)
    return objective.loss(unet(noised.noised_latents, noised.timesteps, text_states).sample, noised).mean()


def by_hand(subject: Subject, loader: TurnLoader) -> None:
    """The loop that a researcher would write."""
    unet = copy.deepcopy(subject.unet).train()
    objective = plain_objective(subject)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=LEARNING_RATE, fused=True)
    ema = [p.detach().cpu().clone() for p in unet.parameters()]
    for batch in loader:
        batch = batch.to(subject.device)
        with autocast(subject.device, subject.precision):
            loss = loss_of(unet, subject, objective, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(ema, [p.detach().cpu() for p in unet.parameters()], 1 - EMA_DECAY)


def lightning_trainer(
    subject: Subject, callbacks: list[pl.Callback], steps: int, strategy: Strategy | str = "auto"
) -> pl.Trainer:
    """A trainer as sd_training makes it."""
    return pl.Trainer(
        accelerator=subject.device.type,
        devices=1,
        strategy=strategy,
        max_steps=steps,
        precision="bf16-mixed" if subject.precision == "bf16" else "32-true",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )


def bare_lightning(subject: Subject, loader: TurnLoader) -> None:
    """Lightning around the plain loss; no EMA."""
    module = BareModule(subject, copy.deepcopy(subject.unet).train())
    trainer = lightning_trainer(subject, [], len(loader))
    trainer.gradient_clip_val = MAX_GRAD_NORM
    trainer.fit(module, train_dataloaders=loader)


def this_trainer(subject: Subject, loader: TurnLoader, variant: str = "") -> None:
    """sd_training's module with EMA, guard and metrics."""
    batch = len(subject.batches[0].pixels)
    constant = LRScheduleConfig(params=LRScheduleParams(warmup_length=0))
    schedule = lr_schedule(constant, num_steps=len(loader), global_batch=batch)
    own = variant_of(subject, variant)
    optimization = Optimization(OptimizerConfig(max_grad_norm=MAX_GRAD_NORM), LEARNING_RATE, schedule)
    own_precision, objective = subject.precision, plain_objective(subject)
    module = DiffusionModule(own, objective, optimization, vae_precision=own_precision, text_precision=own_precision)
    with tempfile.TemporaryDirectory() as folder:
        ema = Ema(EmaConfig(decay=EMA_DECAY, warmup=False), Path())
        rows = MetricRows(Path(folder) / "metrics.csv", COLUMNS)
        state, experiment = RunState(), {"log_dir": folder, "name": "bench", "num_examples_to_see": batch * len(loader)}
        config = Config.model_validate({"experiment": experiment, "dataset": {"params": {"path": "none"}}})
        metrics = Metrics([rows], config.logging.every, batch, ema, state)
        saves = Save(Path(folder), config, lambda _: None, ema, state, NO_LOCK)  # does not act
        guard = NumericGuard(saves, lambda sample: ("", str(sample)), dict)
        trainer = lightning_trainer(
            subject, [ema, guard, metrics], len(loader), SingleProcessStrategy(device=subject.device)
        )
        trainer.fit(module, train_dataloaders=loader)


Contestants: TypeAlias = Mapping[str, Callable[[Subject, TurnLoader], None]]


def contestants_for(variants: list[str]) -> Contestants:
    """Loops against this trainer; or this trainer against itself with variants. The first is what others are compared
    with."""
    if variants:
        return {"sd_training": this_trainer} | {name: partial(this_trainer, variant=name) for name in variants}
    return {"hand-written loop": by_hand, "bare Lightning": bare_lightning, "sd_training": this_trainer}


def compete(contestants: Contestants, subject: Subject, num_turns: int, steps: int) -> Turns:
    """Every contestant in turn; the first turn, in which kernels are chosen and compiled, is not kept."""
    turns = Turns(list(contestants), steps, subject.device)

    def run(name: str) -> None:
        turns.take(name)
        try:
            contestants[name](subject, TurnLoader(turns, name, subject.batches, num_turns + 1))
        finally:
            turns.pass_on(leave=True)

    threads = [threading.Thread(target=run, args=(name,)) for name in contestants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    turns.seconds = {name: values[1:] for name, values in turns.seconds.items()}
    return turns


def known_variant(text: str) -> str:
    """An argument of `--variants`."""
    if unknown := set(text.split("+")) - set(VARIANTS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: unknown; there are {', '.join(VARIANTS)}")
    return text


def main() -> None:
    """Alternate, then print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("quickstart", "sd2"), default="quickstart")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--resolution", type=int, default=16, help="pixels")
    parser.add_argument("--precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of a turn")
    parser.add_argument("--turns", type=int, default=20, help="turns of each contestant")
    parser.add_argument(
        "--variants", nargs="+", default=[], type=known_variant, help=f"{', '.join(VARIANTS)}, or several joined by +"
    )
    arguments = parser.parse_args()
    subject = make_subject(arguments.model, arguments.batch, arguments.resolution, arguments.precision)
    contestants = contestants_for(arguments.variants)
    turns = compete(contestants, subject, arguments.turns, arguments.steps)
    reference = next(iter(contestants))
    size = sum(p.numel() for p in subject.unet.parameters()) / 1e6
    print(
        f"{arguments.model} UNet, {size:.2f} M parameters, batch {arguments.batch}, {arguments.resolution} px, "
        f"{subject.device}, precision {arguments.precision}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s)"
    )
    for name, values in turns.seconds.items():
        ratios = [first / own for first, own in zip(turns.seconds[reference], values, strict=True)]
        middle = statistics.median(values)
        memory = f"  memory of a step {turns.step_bytes[name] / 2**30:.2f} GiB" if subject.device.type == "cuda" else ""
        print(
            f"{name:18s} {middle * 1e3:8.2f} ms/step  {arguments.batch / middle:9.1f} images/s  "
            f"speed ratio to the {reference} {statistics.median(ratios):.3f}{memory}"
        )


if __name__ == "__main__":
    run_cli(main)
