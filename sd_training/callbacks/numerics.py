"""Non-finite steps and loss spikes: describes them, goes back to an older checkpoint, and ends a run in a dead end.

A non-finite step is skipped on the device, in the optimizer (see `TrainedModule.configure_gradient_clipping`); what is
done here reads losses and flags once per logging interval. docs/numerics.md says what is promised.

Going back to an older checkpoint inside a run: weights, optimizer state and averages, but neither the step nor the
data.

The optimizer step goes on counting, so the batches that did the damage, and those since the checkpoint, are behind the
run for good; no order of the data, name of a checkpoint or row of the metrics has two meanings.

Replicas of the weights must stay equal to the bit: they start alike and are updated with the same gradients.

Memory errors, a broken device or a lost message make them differ without anybody noticing: each replica then trains
something else, and a checkpoint, which is dealt out over the processes, mixes them.

A number that stands for the bits of many tensors, computed where they lie.
"""

import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sd_training.callbacks.anomalies import (
    SKIPPED,
    Anomaly,
    AnomalyDetector,
    RollbackReason,
    SampleReport,
    StepReport,
    StepWindow,
)
from sd_training.callbacks.base import OptimizerStepCallback, TrainingTimer, gather_ranks
from sd_training.callbacks.ema import Ema
from sd_training.callbacks.incidents import FOLDER, Incidents
from sd_training.callbacks.save import Saves, cpu_group_of
from sd_training.checkpoint.folder import folder_name, sealed_checkpoints, step_of, verify_checkpoint
from sd_training.config.schema import NumericsConfig
from sd_training.data.problems import printable
from sd_training.errors import IntegrityError, NumericError
from sd_training.log import get_logger
from sd_training.parallel.cpu_group import CpuGroup
from sd_training.training.base_module import TrainedModule


class Rollback(NamedTuple):
    """One that was done."""

    at: int
    """Optimizer steps completed when it was done; training goes on from here."""
    to: int
    """Optimizer steps of the checkpoint whose weights it goes on with."""
    first_bad: int
    """The first step that was wrong [optimizer steps completed before it]."""
    kind: str
    """What was wrong: `skipped` or `spike`."""


def older_checkpoint(trainer: pl.Trainer, root: Path, before: int, done: Sequence[Rollback]) -> Path | None:
    """Collective: the newest checkpoint of fewer than `before` optimizer steps that verifies, the same everywhere.

    Those that a rollback has already left behind are not taken.
    """
    step = cpu_group_of(trainer).on_rank0(lambda: newest_before(root, before, done))
    return None if step is None else root / folder_name(step)


def newest_before(root: Path, before: int, done: Sequence[Rollback]) -> int | None:
    """As `older_checkpoint`, on the process that looks."""
    for folder in reversed(sealed_checkpoints(root)):
        step = step_of(folder)
        is_left_behind = any(rollback.to < step < rollback.at for rollback in done)
        if step < before and not is_left_behind and not verify_checkpoint(folder):
            return step
    return None


def restore(trainer: pl.Trainer, module: TrainedModule, folder: Path, ema: Ema | None) -> None:
    """Collective: training goes on from the weights, optimizer state and averages of a checkpoint.

    Raises:
        CheckpointError: it is of another format or network.
    """
    strategy: Any = trainer.strategy
    checkpoint = strategy.open_checkpoint(folder)
    strategy.load_model_state_dict(checkpoint)
    strategy.load_optimizer_state_dict(checkpoint)
    precision = trainer.precision_plugin
    if type(precision).__qualname__ in checkpoint:
        precision.load_state_dict(checkpoint[type(precision).__qualname__])
    if ema is not None:
        ema.finish_update()
        ema.on_load_checkpoint(trainer, module, checkpoint)


log = get_logger(__name__)

_STATE = "numerics"
"""Key of a checkpoint."""
_WORDS = {"skipped": "a non-finite loss or gradient", "spike": "a loss spike"}
_REMEDY = (
    "Lower optimizer.params.learning_rate, set optimizer.max_grad_norm, or look at the samples that the file names; "
    "scripts/replay_step.py runs the step again"
)

NameOf = Callable[[int], tuple[str, str]]
"""Sample id → location of its shard, and key."""


class NumericGuard(OptimizerStepCallback):
    """Looks every `every` optimizer steps, and whenever the run is saved; goes back only at a multiple of `every`, so
    that a save or a signal does not move the moment.

    Args:
        config: limits and thresholds.
        every: optimizer steps between looks.
        run_dir: the run folder, with `checkpoints/` and `incidents/`.
        name_of: names samples in incidents.
        timer: stands still while going back.
        facts: gives further entries of every incident.
        ema: goes back as well.
        saves: writes a checkpoint after going back; null where nothing is ever saved.
    """

    def __init__(
        self,
        config: NumericsConfig,
        every: int,
        run_dir: Path,
        name_of: NameOf,
        timer: TrainingTimer,
        facts: Callable[[], Mapping[str, Any]] = dict,
        ema: Ema | None = None,
        saves: Saves | None = None,
    ) -> None:
        self.config, self.every, self.name_of, self.ema = config, every, name_of, ema
        self.timer, self.saves = timer, saves
        self.checkpoints = run_dir / "checkpoints"
        self.incidents = Incidents(run_dir / FOLDER, facts)
        self.judge = AnomalyDetector(config)
        self.rollbacks: list[Rollback] = []
        self._window = StepWindow()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps what the module remembers of each micro-batch."""
        assert isinstance(pl_module, TrainedModule)
        self._window.add_micro_batch(pl_module.last_micro_batch)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective where it is due."""
        self._window.end_step(step - 1, module.was_step_skipped)
        if not self.is_due(trainer, step, self.every):
            return
        self._look(trainer, module)
        if self.judge.trouble is not None and step % self.every == 0:
            with self.timer.excluded("save"):
                self._go_back(trainer, module, step, self.judge.trouble)

    def _look(self, trainer: pl.Trainer, module: TrainedModule) -> None:
        """Collective: judges the steps since the last look, and describes those that were wrong."""
        for report in self._window.read(trainer):
            finding = self.judge.add(report)
            if finding is not None:
                samples = self._window.samples(trainer, report.step)
                if trainer.is_global_zero:
                    self._describe(module, report, finding, samples)

    def _describe(
        self, module: TrainedModule, report: StepReport, finding: Anomaly, samples: list[SampleReport]
    ) -> None:
        positions = sorted(sample.position for sample in samples)
        plan = module.optimization
        facts: dict[str, Any] = {
            "loss": report.loss,
            "losses_by_rank": dict(enumerate(report.losses)),
            "ranks_with_non_finite_loss": report.ranks,
            "learning_rate": plan.learning_rate * plan.schedule(report.step),
            "first_position": positions[0],
            "last_position": positions[-1],
            "num_samples": len(samples),
        }
        if finding.spike is not None:
            facts |= finding.spike._asdict()
        facts["samples"] = [self._named(sample) for sample in samples]
        self.incidents.write(report.step, finding.kind, facts)
        where = f"positions {positions[0]} to {positions[-1]}; {self.incidents.path(report.step, finding.kind)}"
        if finding.kind == SKIPPED:
            log.warning(f"optimizer step {report.step} skipped: non-finite loss or gradient ({where})")
        else:
            log.warning(f"loss spike at optimizer step {report.step}: {report.loss:.4g} ({where})")

    def _named(self, sample: SampleReport) -> dict[str, Any]:
        shard, key = self.name_of(sample.sample_id)
        return {**sample._asdict(), "shard": shard, "key": key}

    def _go_back(self, trainer: pl.Trainer, module: TrainedModule, step: int, trouble: RollbackReason) -> None:
        """Collective: to the newest checkpoint from before the trouble; the step and the data go on.

        Raises:
            NumericError: there is none, or it was done too often.
        """
        if len(self.rollbacks) >= self.config.max_rollbacks:
            raise NumericError(
                self._hopeless(trouble, f"numerics.max_rollbacks={self.config.max_rollbacks} is reached")
            )
        if self.saves is not None:
            self.saves.settle()  # what is written in the background may be what to go back to
        target = older_checkpoint(trainer, self.checkpoints, trouble.first_step, self.rollbacks)
        if target is None:
            why = f"{self.checkpoints} has no checkpoint from before the first of them (checkpoint.keep keeps more)"
            raise NumericError(self._hopeless(trouble, why))
        restore(trainer, module, target, self.ema)
        done = Rollback(step, step_of(target), trouble.first_step, trouble.kind)
        self.rollbacks.append(done)
        self.judge.forget()
        if trainer.is_global_zero:
            self.incidents.write(trouble.last_step, "rollback", done._asdict())
        log.warning(
            f"{_WORDS[trouble.kind]} since optimizer step {trouble.first_step:,}: went back to the weights of "
            f"{target.name} and goes on with optimizer step {step:,}"
        )
        try:  # so that a resume goes on from here, and not from a checkpoint that was left behind
            if self.saves is not None:
                self.saves.write_checkpoint(trainer, step)
        except OSError as error:
            log.error(f"the run goes on, but a resume would go back once more: {error}")

    def _hopeless(self, trouble: RollbackReason, why: str) -> str:
        files = self.incidents.path(trouble.last_step, trouble.kind)
        return (
            f"optimizer steps {trouble.first_step:,} to {trouble.last_step:,} had {_WORDS[trouble.kind]}, and the run "
            f"cannot go back: {why}. See {files}. {_REMEDY}."
        )

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Collective: a checkpoint knows of every step before it."""
        assert isinstance(pl_module, TrainedModule)
        self._look(trainer, pl_module)
        checkpoint[_STATE] = self.judge.state() | {"rollbacks": [list(done) for done in self.rollbacks]}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """What was counted before the checkpoint; older checkpoints say nothing."""
        state = checkpoint.get(_STATE)
        if state is not None:
            self.judge.load(state)
            self.rollbacks = [Rollback(*done) for done in state["rollbacks"]]


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → integers of that size."""
_CHUNK = 1 << 22
"""Elements at once: what is needed beside the tensors is 64 MiB."""


def bit_digest(tensors: Iterable[Tensor]) -> Tensor:
    """[] int64: the sum of every element's bits, as an integer, times an odd number of its own, modulo 2^64.

    One flipped bit always changes it: a power of two below 2^64 times an odd number is no multiple of 2^64. Several
    differences cancel with a probability of about 2^-64.

    Args:
        tensors: on one device, in the same order on every process; of a DTensor the local block counts.
    """
    total: Tensor | None = None
    start = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        bits = local.detach().contiguous().view(-1).view(_INTEGERS[local.element_size()])
        for chunk in bits.split(_CHUNK):
            factors = torch.arange(start, start + len(chunk), device=chunk.device).mul_(2).add_(1)
            part = factors.mul_(chunk).sum()
            total = part if total is None else total + part
            start += len(chunk)
    return torch.zeros((), dtype=torch.int64) if total is None else total


log = get_logger(__name__)


class ReplicaDigest(OptimizerStepCallback):
    """Compares digests of the trained weights every `every` optimizer steps, and before every save.

    Args:
        every: optimizer steps between comparisons; 0 never compares.
        incidents: gets a file when replicas differ.
    """

    def __init__(self, every: int, incidents: Incidents) -> None:
        self.every, self.incidents = every, incidents
        self._compared_at = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """They start from the same weights."""
        super().on_train_start(trainer, pl_module)
        self._compared_at = trainer.global_step
        if self.every and trainer.world_size > 1 and _num_replicas(trainer) == 1:
            log.info("numerics.digest_every: no process has a copy of another's weights, so none are compared")

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective where it is due."""
        if self.every and step % self.every == 0:
            self._compare(trainer, module, step)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Collective: no checkpoint is made of replicas that differ."""
        step = trainer.global_step
        if self.every and step != self._compared_at:
            assert isinstance(pl_module, TrainedModule)
            self._compare(trainer, pl_module, step)

    def _compare(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective.

        Raises:
            IntegrityError: replicas differ; on every process.
        """
        replicas = _num_replicas(trainer)
        if replicas == 1:
            return
        digests = gather_ranks(trainer, bit_digest(p for _, p in module.named_trained() if p.requires_grad)).tolist()
        # Processes that hold the same block of the weights are as far apart as a replica has processes.
        ranks, has_majority = odd_ranks(digests, trainer.world_size // replicas)
        if ranks:
            self._stop(trainer, digests, ranks, has_majority, step)
        self._compared_at = step

    def _stop(
        self, trainer: pl.Trainer, digests: Sequence[int], ranks: list[int], has_majority: bool, step: int
    ) -> NoReturn:
        # Processes of their own: those of the saves may be at work in the background.
        timeout = getattr(trainer.strategy, "collective_timeout", None)
        hosts = CpuGroup(trainer.global_rank, trainer.world_size, timeout).all_gather(socket.gethostname())
        path = self.incidents.path(step, "replicas")
        if trainer.is_global_zero:
            each = [
                {"rank": rank, "host": hosts[rank], "digest": f"{digest % 2**64:016x}"}
                for rank, digest in enumerate(digests)
            ]
            facts = {"differing_ranks": ranks, "has_majority": has_majority, "equal_at": self._compared_at}
            self.incidents.write(step, "replicas", facts | {"ranks": each})
        who = ", ".join(f"rank {rank} on {printable(hosts[rank])}" for rank in ranks)
        verdict = "unlike the majority" if has_majority else "without a majority that says which is wrong"
        raise IntegrityError(
            f"the weights of replicas differ after {step:,} optimizer steps: {who}, {verdict}. They were equal after "
            f"{self._compared_at:,} steps, and nothing was saved since; see {path}. The same command goes on from "
            "the newest checkpoint; leave a machine out that does this twice. Unlike devices may round differently: "
            "then set numerics.digest_every=0"
        )


def odd_ranks(digests: Sequence[int], distance: int) -> tuple[list[int], bool]:
    """The ranks that do not agree with the majority of their copies, or all copies where there is no majority, and
    whether there was one.

    Args:
        digests: of each rank.
        distance: ranks r, r + distance, r + 2 × distance … are copies of each other.
    """
    odd, has_majority = list[int](), True
    for first in range(distance):
        group = range(first, len(digests), distance)
        ((common, count),) = Counter(digests[rank] for rank in group).most_common(1)
        is_clear = 2 * count > len(group)
        has_majority &= is_clear
        odd += [rank for rank in group if not is_clear or digests[rank] != common]
    return sorted(odd), has_majority


def _num_replicas(trainer: pl.Trainer) -> int:
    count: int = getattr(trainer.strategy, "num_replicas", 1)
    return count
