"""When a run should go back."""

import math

import pytest

from sd_training.callbacks.anomalies import SKIPPED, AnomalyDetector, RollbackReason, StepReport
from sd_training.config.schema import NumericsConfig


def judge_of(bad: set[int], steps: int = 20) -> AnomalyDetector:
    judge = AnomalyDetector(NumericsConfig(max_skipped_in_a_row=3))
    for step in range(steps):
        judge.add(StepReport(step, [[0.1], [0.1]], step in bad))
    return judge


def test_only_steps_in_a_row_count() -> None:
    assert judge_of({1, 2, 4, 5, 7, 8}).trouble is None
    assert judge_of({1, 2, 4, 5, 6}).trouble == RollbackReason(SKIPPED, 4, 6)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_on_one_rank_is_enough(loss: float) -> None:
    report = StepReport(3, [[0.1, 0.1], [0.1, loss]], False)
    finding = AnomalyDetector(NumericsConfig()).add(report)
    assert finding is not None and finding.kind == SKIPPED and report.ranks == [1]
