"""Spikes are found soon, and noise is no spike."""

import math

import numpy as np
import pytest

from sd_training.callbacks.anomalies import MIN_HISTORY, RECENT, Spike, SpikeDetector

STEPS = 10_000


def noisy_losses(seed: int, steps: int = STEPS, *, scale: float = 0.1, freedom: float = 3.0) -> np.ndarray:
    """A falling loss with heavy tails: exp of Student's t around a trend, much wilder than means of a batch are."""
    chance = np.random.default_rng(seed)
    trend = np.log(0.1) + 1.5 * np.exp(-np.arange(steps) / 300)
    return np.exp(trend + scale * chance.standard_t(freedom, steps))


def found(losses: np.ndarray, threshold: float = 6.0) -> list[Spike]:
    detector = SpikeDetector(threshold)
    return [spike for step, loss in enumerate(losses) if (spike := detector.add(step, float(loss)))]


@pytest.mark.parametrize("freedom", [3.0, 30.0])
def test_ten_thousand_clean_steps_have_no_spike(freedom: float) -> None:
    assert found(noisy_losses(0, freedom=freedom)) == []


def test_a_jump_is_found_in_three_steps_and_told_once() -> None:
    losses = noisy_losses(1, 2000, freedom=30.0)
    losses[1000:1040] *= 4  # about 13 standard deviations
    (spike,) = found(losses)
    assert spike.first_step == 1000 and spike.score > 6 and spike.level == pytest.approx(0.1, rel=0.2)
    detector = SpikeDetector(6.0)
    when = [step for step, loss in enumerate(losses) if detector.add(step, float(loss))]
    assert when == [1000 + RECENT // 2]


def test_two_bad_batches_are_no_spike() -> None:
    losses = noisy_losses(2, 1000, freedom=30.0)
    losses[[500, 502]] *= 1000
    assert found(losses) == []


def test_a_level_that_stays_is_told_once_and_a_second_spike_again() -> None:
    losses = np.full(1500, 0.1)
    losses[500:900] *= 3
    losses[1200:1210] *= 3
    assert [spike.first_step for spike in found(losses)] == [500, 1200]


def test_nothing_is_judged_before_there_is_a_level() -> None:
    losses = np.full(MIN_HISTORY + 2 * RECENT, 0.1)
    losses[MIN_HISTORY - RECENT : MIN_HISTORY] = 10
    assert found(losses) == []


def test_losses_that_have_no_logarithm_are_left_out() -> None:
    detector = SpikeDetector(6.0)
    assert not any(detector.add(step, loss) for step in range(200) for loss in (-1.0, 0.0, math.nan, math.inf))
    assert detector.state()["history"] == []


def test_the_state_goes_on_as_if_it_had_never_stopped() -> None:
    losses = noisy_losses(3, 400, freedom=30.0)
    losses[300:310] *= 5
    whole = SpikeDetector(6.0)
    expected = [whole.add(step, float(loss)) for step, loss in enumerate(losses)]
    for cut in (49, 298, 301, 305):
        detector = SpikeDetector(6.0)
        told = [detector.add(step, float(loss)) for step, loss in enumerate(losses[:cut])]
        other = SpikeDetector(6.0)
        other.load(detector.state())
        told += [other.add(step, float(loss)) for step, loss in enumerate(losses[cut:], cut)]
        assert told == expected
