"""Spikes are found soon, noise is no spike, and a run goes back when it should."""

import math

import numpy as np
import pytest

from sd_training.callbacks.numerics import (
    MIN_HISTORY,
    RECENT,
    SKIPPED,
    SPIKE,
    Anomaly,
    AnomalyDetector,
)
from sd_training.config.schema import NumericsConfig

STEPS = 10_000


def noisy_losses(seed: int, steps: int = STEPS, *, scale: float = 0.1, freedom: float = 3.0) -> np.ndarray:
    """A falling loss with heavy tails: exp of Student's t around a trend, much wilder than means of a batch are."""
    chance = np.random.default_rng(seed)
    trend = np.log(0.1) + 1.5 * np.exp(-np.arange(steps) / 300)
    return np.exp(trend + scale * chance.standard_t(freedom, steps))


def detector_of(**changes: object) -> AnomalyDetector:
    return AnomalyDetector(NumericsConfig(**{"spike_threshold": 6.0, **changes}))  # type: ignore[arg-type]


def found(losses: np.ndarray) -> list[tuple[int, Anomaly]]:
    """Step at which a spike is found, and the spike."""
    detector = detector_of()
    added = [(step, detector.add(step, float(loss))) for step, loss in enumerate(losses)]
    return [(step, anomaly) for step, anomaly in added if anomaly is not None]


@pytest.mark.parametrize("freedom", [3.0, 30.0])
def test_ten_thousand_clean_steps_have_no_spike(freedom: float) -> None:
    assert found(noisy_losses(0, freedom=freedom)) == []


def test_a_jump_is_found_in_three_steps_and_reported_once() -> None:
    losses = noisy_losses(1, 2000, freedom=30.0)
    losses[1000:1040] *= 4  # about 13 standard deviations
    ((when, spike),) = found(losses)
    assert when == 1000 + RECENT // 2 and (spike.kind, spike.first_step) == (SPIKE, 1000)
    assert spike.score > 6 and spike.level == pytest.approx(0.1, rel=0.2)


def test_two_bad_batches_are_no_spike() -> None:
    losses = noisy_losses(2, 1000, freedom=30.0)
    losses[[500, 502]] *= 1000
    assert found(losses) == []


def test_a_level_that_stays_is_reported_once_and_a_second_spike_again() -> None:
    losses = np.full(1500, 0.1)
    losses[500:900] *= 3
    losses[1200:1210] *= 3
    assert [spike.first_step for _, spike in found(losses)] == [500, 1200]


def test_nothing_is_decided_before_there_is_a_level() -> None:
    losses = np.full(MIN_HISTORY + 2 * RECENT, 0.1)
    losses[MIN_HISTORY - RECENT : MIN_HISTORY] = 10
    assert found(losses) == []


def test_losses_that_have_no_logarithm_are_left_out() -> None:
    detector = detector_of()
    assert not any(detector.add(step, float(loss)) for step in range(200) for loss in (-1.0, 0.0))
    assert detector.state()["history"] == []


def test_the_state_continues_as_if_it_had_never_stopped() -> None:
    losses = noisy_losses(3, 400, freedom=30.0)
    losses[300:310] *= 5
    whole = detector_of()
    expected = [whole.add(step, float(loss)) for step, loss in enumerate(losses)]
    for cut in (49, 298, 301, 305):
        detector, other = detector_of(), detector_of()
        reported = [detector.add(step, float(loss)) for step, loss in enumerate(losses[:cut])]
        other.load(detector.state())
        reported += [other.add(step, float(loss)) for step, loss in enumerate(losses[cut:], cut)]
        assert reported == expected


def test_a_spike_leads_back_only_where_it_was_asked_for() -> None:
    losses = np.full(600, 0.1)
    losses[500:510] *= 3
    for on_spike, expected in (("record", None), ("rollback", (SPIKE, 500, 502))):
        detector = detector_of(on_spike=on_spike)
        for step, loss in enumerate(losses):
            detector.add(step, float(loss))
        assert (detector.rollback_reason and detector.rollback_reason[:3]) == expected


@pytest.mark.parametrize(("bad", "expected"), [({1, 2, 4, 5, 7, 8}, None), ({1, 2, 4, 5, 6}, (SKIPPED, 4, 6))])
def test_only_skipped_steps_in_a_row_lead_back(bad: set[int], expected: tuple[str, int, int] | None) -> None:
    detector = detector_of(max_skipped_in_a_row=3)
    for step in range(20):
        detector.add(step, 0.1, was_skipped=step in bad)
    assert (detector.rollback_reason and detector.rollback_reason[:3]) == expected


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_skipped_step(loss: float) -> None:
    assert detector_of().add(3, loss)[:2] == (SKIPPED, 3)  # type: ignore[index]


def test_after_a_rollback_new_losses_are_compared_with_the_level_before() -> None:
    detector = detector_of()
    for step in range(300):
        detector.add(step, 0.1)
    detector.reset()
    found = [detector.add(step, 0.5) for step in range(300, 306)]
    assert [anomaly and anomaly[:3] for anomaly in found] == [None] * 4 + [(SPIKE, 300, 304), None]
