"""Non-finite steps and loss spikes: describes them, goes back to an older checkpoint, and ends a run in a dead end.

A non-finite step is skipped on the device, in the optimizer (see `TrainedModule.configure_gradient_clipping`); what is
done here reads losses and flags once per logging interval. docs/numerics.md says what is promised.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from sd_training.callbacks.ema import Ema
from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.callbacks.incidents import FOLDER, Incidents
from sd_training.callbacks.rollback import Rollback, older_checkpoint, restore
from sd_training.callbacks.saves import Saves
from sd_training.callbacks.step_judge import SKIPPED, Finding, StepJudge, Trouble
from sd_training.callbacks.step_window import SampleReport, StepReport, StepWindow
from sd_training.callbacks.stopwatch import Stopwatch
from sd_training.checkpoint.seal import step_of
from sd_training.config.numerics_schema import NumericsConfig
from sd_training.errors import NumericError
from sd_training.rank_log import get_logger
from sd_training.training.base_module import TrainedModule

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
        stopwatch: stands still while going back.
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
        stopwatch: Stopwatch,
        facts: Callable[[], Mapping[str, Any]] = dict,
        ema: Ema | None = None,
        saves: Saves | None = None,
    ) -> None:
        self.config, self.every, self.name_of, self.ema = config, every, name_of, ema
        self.stopwatch, self.saves = stopwatch, saves
        self.checkpoints = run_dir / "checkpoints"
        self.incidents = Incidents(run_dir / FOLDER, facts)
        self.judge = StepJudge(config)
        self.rollbacks: list[Rollback] = []
        self._window = StepWindow()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps what the module remembers of each micro-batch."""
        assert isinstance(pl_module, TrainedModule)
        self._window.add_micro_batch(pl_module.seen)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective where it is due."""
        self._window.end_step(step - 1, module.was_step_skipped)
        if not self.is_due(trainer, step, self.every):
            return
        self._look(trainer, module)
        if self.judge.trouble is not None and step % self.every == 0:
            with self.stopwatch.paused("save"):
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
        self, module: TrainedModule, report: StepReport, finding: Finding, samples: list[SampleReport]
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

    def _go_back(self, trainer: pl.Trainer, module: TrainedModule, step: int, trouble: Trouble) -> None:
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

    def _hopeless(self, trouble: Trouble, why: str) -> str:
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
