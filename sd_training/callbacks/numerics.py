"""Numbers that go wrong: records them as incidents, goes back to an older checkpoint, ends a run that cannot go on.

A non-finite step is skipped on the device, in the optimizer (`TrainedModule.configure_gradient_clipping`). Here losses
and flags of all ranks are read once per logging interval, `anomalies.py` decides what is wrong, and `NumericGuard`
acts. `ReplicaDigest` compares replicas of the weights, which must stay equal to the bit: a memory error or a broken
device makes each replica train something else, and a checkpoint, written by all of them, mixes them.
docs/numerics.md says what is promised.
"""

import math
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sd_training.callbacks.anomalies import SKIPPED, SPIKE, Anomaly, AnomalyDetector, RollbackReason, StepReport
from sd_training.callbacks.base import OptimizerStepCallback, TrainingTimer, gather_ranks
from sd_training.callbacks.ema import Ema
from sd_training.callbacks.save import Save
from sd_training.checkpoint.folder import folder_name, sealed_checkpoints, step_of, verify_checkpoint
from sd_training.checkpoint.lightning_state import restore_precision
from sd_training.checkpoint.save import load_checkpoint, open_checkpoint
from sd_training.config.plan import counted
from sd_training.config.schema import NumericsConfig
from sd_training.data.problems import printable
from sd_training.errors import IntegrityError, NumericError
from sd_training.incidents import incident_path, write_incident
from sd_training.log import get_logger
from sd_training.parallel.cpu_group import CpuGroup
from sd_training.parallel.strategies import strategy_of
from sd_training.training.base_module import MicroBatchRecord, TrainedModule

log = get_logger(__name__)

_STATE = "numerics"
"""Key of a checkpoint."""
_WORDS = {SKIPPED: "a non-finite loss or gradient", SPIKE: "a loss spike"}
_REMEDY = (
    "Lower optimizer.params.learning_rate, set optimizer.max_grad_norm, or look at the samples that the file names; "
    "scripts/replay_step.py runs the step again"
)


class Rollback(NamedTuple):
    """A return to an older checkpoint: weights, optimizer state and averages, but neither the step nor the data."""

    at: int
    """Optimizer steps completed when it was done; training continues from here."""
    to: int
    """Optimizer steps of the checkpoint whose weights were loaded."""
    first_bad: int
    """The first wrong step [optimizer steps completed before it]."""
    kind: str
    """What was wrong: `skipped` or `spike`."""


class _Step(NamedTuple):
    """An optimizer step of this rank whose losses and flag are still on the device."""

    step: int
    """Optimizer steps completed before it."""
    micro_batches: list[MicroBatchRecord]
    skipped: Tensor | None
    """Not 0 where it was skipped; None where the engine does not say."""


class NumericGuard(OptimizerStepCallback):
    """Reads losses every `every` optimizer steps, and before every save. Goes back only at a multiple of `every`, so
    that a save or a signal does not change when that happens.

    The optimizer step counts on after a rollback, so the batches that did the damage, and those since the checkpoint,
    are used up; no order of the data, name of a checkpoint or row of the metrics gets two meanings.

    Args:
        config: limits and thresholds.
        every: optimizer steps between reads.
        run_dir: the run folder, with `checkpoints/` and `incidents/`.
        name_of: sample id → location of its shard, and key.
        timer: does not count the time of a rollback.
        run_metadata: further entries of an incident, asked when one is written.
        ema: goes back as well.
        saves: writes a checkpoint after a rollback; null where nothing is saved.
    """

    def __init__(
        self,
        config: NumericsConfig,
        every: int,
        run_dir: Path,
        name_of: Callable[[int], tuple[str, str]],
        timer: TrainingTimer,
        run_metadata: Callable[[], Mapping[str, Any]] = dict,
        ema: Ema | None = None,
        saves: Save | None = None,
    ) -> None:
        self.config, self.every, self.run_dir, self.name_of = config, every, run_dir, name_of
        self.timer, self.run_metadata, self.ema, self.saves = timer, run_metadata, ema, saves
        self.detector = AnomalyDetector(config)
        self.rollbacks: list[Rollback] = []
        self._micro_batches: list[MicroBatchRecord] = []
        self._unread: list[_Step] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps what the module recorded of each micro-batch."""
        assert isinstance(pl_module, TrainedModule)
        if pl_module.last_micro_batch is not None:
            self._micro_batches.append(pl_module.last_micro_batch)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective where it is due."""
        self._unread.append(_Step(step - 1, self._micro_batches, module.was_step_skipped))
        self._micro_batches = []
        if not self.is_due(trainer, step, self.every):
            return
        self._read(trainer, module)
        if self.detector.rollback_reason is not None and step % self.every == 0:
            with self.timer.excluded("save"):
                self._roll_back(trainer, module, step, self.detector.rollback_reason)

    def _read(self, trainer: pl.Trainer, module: TrainedModule) -> None:
        """Collective: reads the steps since the last call, and records those that were wrong. The host waits for the
        device, once."""
        steps, self._unread = self._unread, []
        if not steps or not steps[0].micro_batches:
            return
        losses = torch.stack([record.loss.float() for step in steps for record in step.micro_batches])
        flags = [losses.new_zeros(()) if s.skipped is None else s.skipped.to(losses.device).float() for s in steps]
        rows = torch.cat([torch.stack(flags)[:, None], losses.view(len(steps), -1)], dim=1)
        by_rank = gather_ranks(trainer, rows).tolist()
        for i, step in enumerate(steps):
            report = StepReport(step.step, [rows[i][1:] for rows in by_rank], any(rows[i][0] for rows in by_rank))
            anomaly = self.detector.add(report)
            if anomaly is not None:
                samples = self._samples(trainer, step)
                if trainer.is_global_zero:
                    self._record(module, report, anomaly, samples)

    def _samples(self, trainer: pl.Trainer, step: _Step) -> list[dict[str, Any]]:
        """Collective: the samples of a step, those with a non-finite loss first, then by loss."""
        rows = []
        for record in step.micro_batches:
            losses = record.sample_losses
            times = torch.full_like(losses, -1.0) if record.timesteps is None else record.timesteps
            columns = (record.positions, record.sample_ids, losses, times)
            rows.append(torch.stack([column.cpu().double() for column in columns], dim=1))
        by_rank = gather_ranks(trainer, torch.stack(rows)).tolist()
        samples = [
            {"rank": rank, "micro_batch": micro, "position": int(position), "sample_id": int(sample), "loss": loss}
            | {"timestep": None if time < 0 else time}
            for rank, micro_batches in enumerate(by_rank)
            if rank % strategy_of(trainer).tensor_parallel_size == 0
            for micro, of_one in enumerate(micro_batches)
            for position, sample, loss, time in of_one
        ]
        return sorted(samples, key=lambda s: (True, -s["loss"]) if math.isfinite(s["loss"]) else (False, 0.0))

    def _record(
        self, module: TrainedModule, report: StepReport, anomaly: Anomaly, samples: list[dict[str, Any]]
    ) -> None:
        positions = [sample["position"] for sample in samples]
        plan = module.optimization
        names = [dict(zip(("shard", "key"), self.name_of(sample["sample_id"]), strict=True)) for sample in samples]
        spike = {} if anomaly.kind == SKIPPED else anomaly._asdict()
        facts = {
            "loss": report.loss,
            "losses_by_rank": dict(enumerate(report.losses)),
            "ranks_with_non_finite_loss": report.non_finite_ranks,
            "learning_rate": plan.learning_rate * plan.schedule(report.step),
            "first_position": min(positions),
            "last_position": max(positions),
            "num_samples": len(samples),
            **{name: value for name, value in spike.items() if name != "kind"},
            "samples": [sample | name for sample, name in zip(samples, names, strict=True)],
        }
        write_incident(self.run_dir, anomaly.kind, report.step, **facts, **self.run_metadata())
        path = incident_path(self.run_dir, report.step, anomaly.kind)
        where = f"positions {min(positions)} to {max(positions)}; {path}"
        if anomaly.kind == SKIPPED:
            log.warning(f"optimizer step {report.step} skipped: non-finite loss or gradient ({where})")
        else:
            log.warning(f"loss spike at optimizer step {report.step}: {report.loss:.4g} ({where})")

    def _roll_back(self, trainer: pl.Trainer, module: TrainedModule, step: int, reason: RollbackReason) -> None:
        """Collective: loads the newest checkpoint from before the anomaly.

        Raises:
            NumericError: there is none, or it was done too often.
        """
        if len(self.rollbacks) >= self.config.max_rollbacks:
            raise self._no_way_back(reason, f"numerics.max_rollbacks={self.config.max_rollbacks} is reached")
        if self.saves is not None:
            self.saves.finish_pending()  # it may be the checkpoint to go back to
        root = self.run_dir / "checkpoints"
        strategy, before = strategy_of(trainer), reason.first_step
        found = strategy.cpu_group.on_rank0(lambda: newest_before(root, before, self.rollbacks))
        if found is None:
            why = f"{root} has no checkpoint from before the first of them (checkpoint.keep keeps more)"
            raise self._no_way_back(reason, why)
        stored = open_checkpoint(root / folder_name(found))
        load_checkpoint(stored, module, strategy.sharding)
        restore_precision(trainer, stored.state)
        if self.ema is not None:
            self.ema.load_averages(trainer, module, stored.averages())
        done = Rollback(step, found, before, reason.kind)
        self.rollbacks.append(done)
        self.detector.reset()
        if trainer.is_global_zero:
            facts = {"at": done.at, "to": done.to, "first_bad": done.first_bad, "reason": done.kind}
            write_incident(self.run_dir, "rollback", reason.last_step, **facts)
        log.warning(
            f"{_WORDS[reason.kind]} since optimizer step {before:,}: loaded the weights of {folder_name(found)}; "
            f"training continues with optimizer step {step:,}"
        )
        try:  # a resume must continue from here, not from a checkpoint that was left behind
            if self.saves is not None:
                self.saves.write_checkpoint(trainer, step)
        except OSError as error:
            log.error(f"training continues, but a resume would go back once more: {error}")

    def _no_way_back(self, reason: RollbackReason, why: str) -> NumericError:
        return NumericError(
            f"optimizer steps {reason.first_step:,} to {reason.last_step:,} had {_WORDS[reason.kind]}, and the run "
            f"cannot go back: {why}. See {incident_path(self.run_dir, reason.last_step, reason.kind)}. {_REMEDY}."
        )

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Collective: a checkpoint knows of every step before it."""
        assert isinstance(pl_module, TrainedModule)
        self._read(trainer, pl_module)
        checkpoint[_STATE] = self.detector.state() | {"rollbacks": [list(done) for done in self.rollbacks]}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """What was counted before the checkpoint; those of older versions have no such entry."""
        state = checkpoint.get(_STATE)
        if state is not None:
            self.detector.load(state)
            self.rollbacks = [Rollback(*done) for done in state["rollbacks"]]


def newest_before(root: Path, before: int, done: Sequence[Rollback]) -> int | None:
    """Step of the newest checkpoint of fewer than `before` optimizer steps that verifies, without those that a rollback
    has already left behind; None: there is none."""
    for folder in reversed(sealed_checkpoints(root)):
        step = step_of(folder)
        is_left_behind = any(rollback.to < step < rollback.at for rollback in done)
        if step < before and not is_left_behind and not verify_checkpoint(folder):
            return step
    return None


class ReplicaDigest(OptimizerStepCallback):
    """Compares digests of the trained weights every `every` optimizer steps, and before every save.

    Args:
        every: optimizer steps between comparisons; 0 disables them.
        run_dir: gets an incident when replicas differ.
    """

    def __init__(self, every: int, run_dir: Path) -> None:
        self.every, self.run_dir = every, run_dir
        self._compared_at = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replicas start from the same weights."""
        super().on_train_start(trainer, pl_module)
        self._compared_at = trainer.global_step
        if self.every and trainer.world_size > 1 and strategy_of(trainer).num_replicas == 1:
            log.info("numerics.digest_every: no rank has a copy of another's weights, so none are compared")

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective where it is due."""
        if self.every and step % self.every == 0:
            self._compare(trainer, module, step)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Collective: no checkpoint is made of replicas that differ."""
        if self.every and trainer.global_step != self._compared_at:
            assert isinstance(pl_module, TrainedModule)
            self._compare(trainer, pl_module, trainer.global_step)

    def _compare(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective.

        Raises:
            IntegrityError: replicas differ; on every rank.
        """
        replicas = strategy_of(trainer).num_replicas
        if replicas == 1:
            return
        digests = gather_ranks(trainer, bit_digest(p for _, p in module.named_trained() if p.requires_grad)).tolist()
        # Ranks that hold the same block of the weights are as far apart as a replica has ranks.
        ranks, has_majority = odd_ranks(digests, trainer.world_size // replicas)
        if ranks:
            self._end(trainer, digests, ranks, has_majority, step)
        self._compared_at = step

    def _end(
        self, trainer: pl.Trainer, digests: Sequence[int], ranks: list[int], has_majority: bool, step: int
    ) -> NoReturn:
        # A group of its own: a save in the background may be using the strategy's.
        group = CpuGroup(trainer.global_rank, trainer.world_size, strategy_of(trainer).collective_timeout)
        hosts = group.all_gather(socket.gethostname())
        if trainer.is_global_zero:
            each = [
                {"rank": rank, "host": hosts[rank], "digest": f"{digest % 2**64:016x}"}
                for rank, digest in enumerate(digests)
            ]
            facts = {"differing_ranks": ranks, "has_majority": has_majority, "equal_at": self._compared_at}
            write_incident(self.run_dir, "replicas", step, **facts, ranks=each)
        named = ", ".join(f"rank {rank} on {printable(hosts[rank])}" for rank in ranks)
        verdict = "unlike the majority" if has_majority else "without a majority that says which is wrong"
        raise IntegrityError(
            f"the weights of replicas differ after {counted(step, 'optimizer step')}: {named}, {verdict}. "
            "They were equal after "
            f"{counted(self._compared_at, 'step')}, and nothing was saved since; see "
            f"{incident_path(self.run_dir, step, 'replicas')}. The same command continues from the newest checkpoint; "
            "leave a machine out that does this twice. Unlike devices may round differently: then set "
            "numerics.digest_every=0"
        )


def odd_ranks(digests: Sequence[int], distance: int) -> tuple[list[int], bool]:
    """The ranks that do not agree with the majority of their copies, or all copies where there is no majority, and
    whether there was one.

    Args:
        digests: by rank.
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


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → integers of that size."""
_CHUNK = 1 << 22
"""Elements at once: 64 MiB are needed beside the tensors."""


def bit_digest(tensors: Iterable[Tensor]) -> Tensor:
    """[] int64: the sum of every element's bits, as an integer, times an odd number of its own, modulo 2^64.

    One flipped bit always changes it: a power of two below 2^64 times an odd number is no multiple of 2^64. Several
    differences cancel with a probability of about 2^-64.

    Args:
        tensors: on one device, in the same order on every rank; of a DTensor the local shard counts.
    """
    total, start = torch.zeros((), dtype=torch.int64), 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        bits = local.detach().contiguous().view(-1).view(_INTEGERS[local.element_size()])
        for chunk in bits.split(_CHUNK):
            factors = torch.arange(start, start + len(chunk), device=chunk.device).mul_(2).add_(1)
            total = total.to(chunk.device) + factors.mul_(chunk).sum()
            start += len(chunk)
    return total
