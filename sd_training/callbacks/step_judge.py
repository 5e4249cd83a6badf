"""Which steps of a run were wrong, and when to go back. The same on every process, and after a resume."""

from typing import Any, NamedTuple

from sd_training.callbacks.spikes import Spike, SpikeDetector
from sd_training.callbacks.step_window import StepReport
from sd_training.config.numerics_schema import NumericsConfig

SKIPPED, SPIKE = "skipped", "spike"
"""Kinds of findings; also the kinds of their incidents."""


class Trouble(NamedTuple):
    """Why the run should go back to an older checkpoint."""

    kind: str
    first_step: int
    """The first step that was wrong [optimizer steps completed before it]."""
    last_step: int


class Finding(NamedTuple):
    """What is wrong with a step."""

    kind: str
    spike: Spike | None = None


class StepJudge:
    """Takes every step of the run in order.

    Args:
        config: limits and thresholds.

    Attributes:
        trouble: set until `forget`.
    """

    def __init__(self, config: NumericsConfig) -> None:
        self.config = config
        self.trouble: Trouble | None = None
        self._detector = SpikeDetector(config.spike_threshold)
        self._in_a_row = 0
        self._first_in_a_row = 0

    def add(self, report: StepReport) -> Finding | None:
        """What is wrong with the next step, if anything."""
        if report.was_skipped or not report.is_loss_finite:
            self._count_skipped(report.step)
            return Finding(SKIPPED)
        self._in_a_row = 0
        spike = self._detector.add(report.step, report.loss)
        if spike is None:
            return None
        if self.config.on_spike == "rollback":
            self.trouble = self.trouble or Trouble(SPIKE, spike.first_step, report.step)
        return Finding(SPIKE, spike)

    def _count_skipped(self, step: int) -> None:
        if self._in_a_row == 0:
            self._first_in_a_row = step
        self._in_a_row += 1
        if self._in_a_row >= self.config.max_skipped_in_a_row:
            self.trouble = self.trouble or Trouble(SKIPPED, self._first_in_a_row, step)

    def forget(self) -> None:
        """After a rollback: the last steps belong to weights that are gone."""
        self.trouble = None
        self._in_a_row = 0
        self._detector.forget_recent()

    def state(self) -> dict[str, Any]:
        """Plain values; `load` is the way back."""
        return {
            "in_a_row": self._in_a_row,
            "first_in_a_row": self._first_in_a_row,
            "trouble": None if self.trouble is None else list(self.trouble),
            "detector": self._detector.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on as if it had never stopped."""
        self._in_a_row, self._first_in_a_row = int(state["in_a_row"]), int(state["first_in_a_row"])
        self.trouble = None if state["trouble"] is None else Trouble(*state["trouble"])
        self._detector.load(state["detector"])
