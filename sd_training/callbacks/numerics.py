"""Numeric failures: detects them, records them as incidents, rolls back to an older checkpoint, and ends a run that
cannot continue (docs/numerics.md).

A non-finite step is skipped on the device, in the optimizer (`TrainedModule.configure_gradient_clipping`). Here losses
and flags of all ranks are read once per logging interval, `AnomalyDetector` decides what is wrong, and `NumericGuard`
acts. The detector sees every step in order, on every rank, and its state is part of the checkpoint: all ranks, and a
resumed run, decide alike. Replicas of the weights must stay equal to the bit, so their digests are compared: a memory
error or a broken device makes each replica train something else, and a checkpoint, written by all of them, mixes them.

Spikes: the loss of a step of a diffusion model is noisy, with heavy tails, and falls over the run; its logarithm is
about symmetric around a slow trend. So the median of the last `RECENT` log losses is compared with the median of the
`HISTORY` before them, in units of their median absolute deviation. Fewer than half of `RECENT` outliers never count.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sd_training.callbacks.base import OptimizerStepCallback, gather_ranks
from sd_training.callbacks.save import Save
from sd_training.checkpoint.folder import folder_name, sealed_checkpoints, step_of, verify_checkpoint
from sd_training.checkpoint.save import load_checkpoint, open_checkpoint
from sd_training.config.plan import counted
from sd_training.config.schema import NumericsConfig
from sd_training.errors import IntegrityError, NumericError
from sd_training.log import get_logger, incident_path, write_incident
from sd_training.parallel.strategies import strategy_of
from sd_training.training import MicroBatchRecord, TrainedModule

log = get_logger(__name__)

RECENT = 5
HISTORY = 200
MIN_HISTORY = 50
"""Steps before the first decision about a spike."""
SKIPPED, SPIKE = "skipped", "spike"
"""Kinds of anomalies; also the kinds of their incidents."""
_SIGMA_OF_MAD = 1.4826
_MIN_SIGMA = 0.02
"""Of the log loss: where the loss hardly varies, 2 % count as one deviation."""
_STATE = "numerics"
"""Key of a checkpoint."""
_DETECTOR_STATE = ("skipped_in_a_row", "history", "recent", "is_in_spike")
_WORDS = {SKIPPED: "a non-finite loss or gradient", SPIKE: "a loss spike"}


class Anomaly(NamedTuple):
    """One wrong step, or several in a row. Steps are optimizer steps completed before."""

    kind: str
    first_step: int
    last_step: int
    score: float = math.nan
    """Of a spike: robust standard deviations above the level before."""
    level: float = math.nan
    """Of a spike: median loss of the steps before."""


@dataclass
class AnomalyDetector:
    """Takes every step of the run in order."""

    config: NumericsConfig
    """Limits and thresholds."""
    rollback_reason: Anomaly | None = None
    """Why the run should go back to an older checkpoint; set until `reset`."""
    skipped_in_a_row: int = 0
    history: list[float] = field(default_factory=list)
    recent: list[tuple[int, float]] = field(default_factory=list)
    is_in_spike: bool = False

    def add(self, step: int, loss: float, *, was_skipped: bool = False) -> Anomaly | None:
        """What is wrong with the next step, if anything. A spike is reported once, at the step that completes it.

        Args:
            step: optimizer steps completed before it.
            loss: mean over ranks and micro-batches.
            was_skipped: whether the optimizer skipped the step because the gradient was not finite.
        """
        if was_skipped or not math.isfinite(loss):
            self.skipped_in_a_row += 1
            found: Anomaly | None = Anomaly(SKIPPED, step - self.skipped_in_a_row + 1, step)
            leads_back = self.skipped_in_a_row >= self.config.max_skipped_in_a_row
        else:
            self.skipped_in_a_row = 0
            found = self._spike(step, loss)
            leads_back = self.config.on_spike == "rollback"
        if leads_back:
            self.rollback_reason = self.rollback_reason or found
        return found

    def _spike(self, step: int, loss: float) -> Anomaly | None:
        if loss <= 0:  # has no logarithm
            return None
        self.recent.append((step, math.log(loss)))
        if len(self.recent) > RECENT:
            _, oldest = self.recent.pop(0)
            self.history = [*self.history, oldest][-HISTORY:]
        if len(self.history) < MIN_HISTORY or len(self.recent) < RECENT:
            return None
        level = median(self.history)
        sigma = max(_SIGMA_OF_MAD * median(abs(value - level) for value in self.history), _MIN_SIGMA)
        threshold = self.config.spike_threshold
        score = (median(value for _, value in self.recent) - level) / sigma
        was_in_spike, self.is_in_spike = self.is_in_spike, score > threshold
        if was_in_spike or not self.is_in_spike:
            return None
        first = next(step for step, value in self.recent if value > level + threshold * sigma)
        return Anomaly(SPIKE, first, step, score, math.exp(level))

    def reset(self) -> None:
        """After a rollback: the last steps belong to discarded weights."""
        self.rollback_reason = None
        self.skipped_in_a_row = 0
        self.recent = []
        self.is_in_spike = False

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint; `load` restores them."""
        own = {name: copy(getattr(self, name)) for name in _DETECTOR_STATE}
        return own | {"rollback_reason": self.rollback_reason and list(self.rollback_reason)}

    def load(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint."""
        for name in _DETECTOR_STATE:
            setattr(self, name, state[name])
        self.rollback_reason = state["rollback_reason"] and Anomaly(*state["rollback_reason"])


class Rollback(NamedTuple):
    """A return to an older checkpoint: weights, optimizer state and averages, but neither the step nor the data."""

    at: int
    """Optimizer steps completed when it was done; training continues from here."""
    to: int
    """Optimizer steps of the checkpoint whose weights were loaded."""


class NumericGuard(OptimizerStepCallback):
    """Reads losses every `logging.every` optimizer steps, and before every save. Goes back only at a multiple of it, so
    that a save or a signal does not change when that happens. Compares replicas every `digest_every` optimizer steps,
    and before every save. Keeps `RunState.is_consistent`: the callbacks before it belong to the step (averages), those
    after it may fail without changing anything that is saved.

    The optimizer step is not turned back by a rollback, so the batches that did the damage, and those since the
    checkpoint, are used up; no data position, checkpoint name or row of the metrics gets two meanings.

    Args:
        saves: writes a checkpoint after a rollback; has the options and the average, which goes back as well.
        name_of: sample id → location of its shard, and key.
        run_metadata: further entries of an incident, called when one is written.
    """

    def __init__(
        self, saves: Save, name_of: Callable[[int], tuple[str, str]], run_metadata: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.saves, self.name_of, self.run_metadata = saves, name_of, run_metadata
        self.config, self.every, self.run_dir = saves.config.numerics, saves.config.logging.every, saves.run_dir
        self.detector = AnomalyDetector(self.config)
        self.rollbacks: list[Rollback] = []
        self._micro_batches: list[MicroBatchRecord] = []
        self._unread: list[tuple[int, list[MicroBatchRecord], Tensor | None]] = []
        """Steps whose losses and flag are still on the device: optimizer steps completed before, micro-batches, not 0
        where it was skipped (None where the engine does not report it)."""
        self._replicas_equal_at = 0

    def on_before_optimizer_step(self, *_: Any) -> None:
        """From here on until the averages have seen the step, weights and averages do not fit together."""
        self.saves.state.is_consistent = False

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keeps what the module recorded of each micro-batch."""
        if pl_module.last_micro_batch is not None:
            self._micro_batches.append(pl_module.last_micro_batch)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.saves.state.is_consistent = True

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective where it is due."""
        self._unread.append((step - 1, self._micro_batches, module.was_step_skipped))
        self._micro_batches = []
        if self.is_due(trainer, step, self.every):
            self._read(trainer, module)
            if self.detector.rollback_reason is not None and (step % self.every == 0 or step == trainer.max_steps):
                module.ledger.enter("saving")
                with self.saves.state.watched("save"):
                    self._roll_back(trainer, module, step, self.detector.rollback_reason)
        if self.config.digest_every and step % self.config.digest_every == 0:
            self._compare_replicas(trainer, module, step)

    def _read(self, trainer: pl.Trainer, module: TrainedModule) -> None:
        """Collective: reads the steps since the last call, and records those that were wrong. The host waits for the
        device, once."""
        steps, self._unread = self._unread, []
        if not steps or not steps[0][1]:
            return
        losses = torch.stack([record.sample_losses.mean().float() for _, records, _ in steps for record in records])
        flags = [losses.new_zeros(()) if flag is None else flag.to(losses.device).float() for _, _, flag in steps]
        rows = torch.cat([torch.stack(flags)[:, None], losses.view(len(steps), -1)], dim=1)
        by_rank = gather_ranks(trainer, rows).tolist()
        for i, (step, records, _) in enumerate(steps):
            of_ranks = [rows[i][1:] for rows in by_rank]
            is_finite = all(math.isfinite(loss) for losses in of_ranks for loss in losses)
            loss = math.fsum(map(math.fsum, of_ranks)) / sum(map(len, of_ranks)) if is_finite else math.nan
            anomaly = self.detector.add(step, loss, was_skipped=any(rows[i][0] for rows in by_rank))
            if anomaly is not None:
                self._record(trainer, module, anomaly, loss, of_ranks, records)

    def _record(
        self,
        trainer: pl.Trainer,
        module: TrainedModule,
        anomaly: Anomaly,
        loss: float,
        losses_by_rank: list[list[float]],
        records: list[MicroBatchRecord],
    ) -> None:
        """Collective: describes the last step of an anomaly, with all its samples: those with a non-finite loss first,
        then by loss."""
        rows = []
        for record in records:
            losses = record.sample_losses
            times = torch.full_like(losses, -1.0) if record.timesteps is None else record.timesteps
            columns = (record.positions, record.sample_ids, losses, times)
            rows.append(torch.stack([column.cpu().double() for column in columns], dim=1))
        by_rank = gather_ranks(trainer, torch.stack(rows)).tolist()
        if not trainer.is_global_zero:
            return
        samples = [
            {"rank": rank, "micro_batch": micro, "position": int(position), "sample_id": int(sample), "loss": loss}
            | {"timestep": None if time < 0 else time}
            | dict(zip(("shard", "key"), self.name_of(int(sample)), strict=True))
            for rank, micro_batches in enumerate(by_rank)
            if rank % strategy_of(trainer).tensor_parallel_size == 0
            for micro, of_one in enumerate(micro_batches)
            for position, sample, loss, time in of_one
        ]
        samples.sort(key=lambda s: (math.isfinite(s["loss"]), -s["loss"] if math.isfinite(s["loss"]) else 0.0))
        step, plan = anomaly.last_step, module.optimization
        entries = {
            "loss": loss,
            "losses_by_rank": dict(enumerate(losses_by_rank)),
            "ranks_with_non_finite_loss": [
                rank for rank, losses in enumerate(losses_by_rank) if not all(map(math.isfinite, losses))
            ],
            "learning_rate": plan.learning_rate * plan.schedule(step),
            "first_step": anomaly.first_step,
            **({"score": anomaly.score, "level": anomaly.level} if anomaly.kind == SPIKE else {}),
            "samples": samples,
        }
        write_incident(self.run_dir, anomaly.kind, step, **entries, **self.run_metadata())
        did = "skipped" if anomaly.kind == SKIPPED else f"has a loss of {loss:.4g}"
        path = incident_path(self.run_dir, step, anomaly.kind)
        log.warning(f"optimizer step {step} {did}: {_WORDS[anomaly.kind]}; {path}")

    def _roll_back(self, trainer: pl.Trainer, module: TrainedModule, step: int, reason: Anomaly) -> None:
        """Collective: loads the newest checkpoint from before the anomaly.

        Raises:
            NumericError: there is none, or it was done too often.
        """
        self.saves.finish_pending()  # it may be the checkpoint to go back to
        root, before, found = self.run_dir / "checkpoints", reason.first_step, None
        if len(self.rollbacks) >= self.config.max_rollbacks:
            problem = f"numerics.max_rollbacks={self.config.max_rollbacks} is reached"
        else:
            problem = f"{root} has no checkpoint from before the first of them (checkpoint.keep keeps more)"
            found = strategy_of(trainer).cpu_group.on_rank0(lambda: newest_before(root, before, self.rollbacks))
        if found is None:
            raise NumericError(
                f"optimizer steps {before:,} to {reason.last_step:,} had {_WORDS[reason.kind]}, and the run cannot go "
                f"back: {problem}. Lower optimizer.params.learning_rate, set optimizer.max_grad_norm, or look at the "
                f"samples in {incident_path(self.run_dir, reason.last_step, reason.kind)}; scripts/replay_step.py runs "
                "the step again."
            )
        stored = open_checkpoint(root / folder_name(found))
        load_checkpoint(stored, trainer)
        if self.saves.ema is not None:
            self.saves.ema.load_averages(trainer, module, stored.averages())
        self.rollbacks.append(Rollback(step, found))
        self.detector.reset()
        if trainer.is_global_zero:
            entries = {"at": step, "to": found, "first_bad": before, "reason": reason.kind}
            write_incident(self.run_dir, "rollback", reason.last_step, **entries)
        log.warning(
            f"{_WORDS[reason.kind]} since optimizer step {before:,}: loaded the weights of {folder_name(found)}; "
            f"training continues with optimizer step {step:,}"
        )
        try:  # a resume must continue from here, not from a checkpoint that was left behind
            self.saves.write_checkpoint(trainer, step)
        except OSError as error:
            log.error(f"training continues, but a resume would go back once more: {error}")

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Collective: a checkpoint knows of every step before it, and none is made of replicas that differ."""
        self._read(trainer, pl_module)
        if self.config.digest_every and trainer.global_step != self._replicas_equal_at:
            self._compare_replicas(trainer, pl_module, trainer.global_step)
        checkpoint[_STATE] = self.detector.state() | {"rollbacks": [list(done) for done in self.rollbacks]}

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """What was counted before the checkpoint."""
        self.detector.load(checkpoint[_STATE])
        self.rollbacks = [Rollback(*done) for done in checkpoint[_STATE]["rollbacks"]]

    def _compare_replicas(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective.

        Raises:
            IntegrityError: replicas differ; on every rank.
        """
        replicas = strategy_of(trainer).num_replicas
        if replicas == 1:
            return
        digests = gather_ranks(trainer, bit_digest(p for _, p in module.named_trained() if p.requires_grad)).tolist()
        # Ranks that hold the same block of the weights are as far apart as a replica has ranks.
        distance = trainer.world_size // replicas
        ranks = [rank for rank, digest in enumerate(digests) if digest != digests[rank % distance]]
        if ranks:
            if trainer.is_global_zero:
                write_incident(self.run_dir, "replicas", step, differing_ranks=ranks, digests_by_rank=digests)
            raise IntegrityError(
                f"the weights of replicas differ after {counted(step, 'optimizer step')}: those of ranks {ranks} are "
                f"unlike those of the first replica; nothing was saved since they were last compared; "
                f"see {incident_path(self.run_dir, step, 'replicas')}. The same command continues from "
                "the newest checkpoint; exclude a machine that does this twice. Different devices may round "
                "differently: then set numerics.digest_every=0"
            )
        self._replicas_equal_at = step


def newest_before(root: Path, before: int, done: Sequence[Rollback]) -> int | None:
    """Step of the newest checkpoint of fewer than `before` optimizer steps that verifies, without those that a rollback
    has already left behind; None: there is none."""
    for folder in reversed(sealed_checkpoints(root)):
        step = step_of(folder)
        is_left_behind = any(rollback.to < step < rollback.at for rollback in done)
        if step < before and not is_left_behind and not verify_checkpoint(folder):
            return step
    return None


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
