"""What is drawn beside a sample. How requests become batches is shown by `tests/unit/data/test_datamodule.py`."""

import numpy as np
import pytest

from sd_training.config.schema import ConditioningConfig
from sd_training.data.samples.sample import NO_DROPOUT, draw_dropout


def dropped(rule: ConditioningConfig, samples: int = 4000) -> dict[str, np.ndarray]:
    rows = [draw_dropout(rule, 3, position, ("clip", "t5")) for position in range(samples)]
    return {name: np.array([row[name] for row in rows]) for name in ("clip", "t5")}


def test_joint_dropout_takes_all_or_none() -> None:
    draws = dropped(NO_DROPOUT.replace(dropout_prob=0.3))
    assert np.array_equal(draws["clip"], draws["t5"])
    assert draws["clip"].mean() == pytest.approx(0.3, abs=0.03)


def test_independent_dropout_draws_for_each() -> None:
    draws = dropped(NO_DROPOUT.replace(encoder_dropout_prob=0.3))
    assert [draws[name].mean() for name in draws] == pytest.approx([0.3, 0.3], abs=0.03)
    assert (draws["clip"] & draws["t5"]).mean() == pytest.approx(0.09, abs=0.02)


def test_dropout_of_one_conditioner_does_not_depend_on_others() -> None:
    rule = NO_DROPOUT.replace(encoder_dropout_prob=0.5)
    for position in range(200):
        both = draw_dropout(rule, 3, position, ("clip", "t5"))
        assert draw_dropout(rule, 3, position, ("t5",))["t5"] == both["t5"]
        assert draw_dropout(rule, 3, position, ("t5", "clip")) == both


@pytest.mark.parametrize("prob", ["dropout_prob", "encoder_dropout_prob"])
def test_dropout_never_and_always(prob: str) -> None:
    for value in (0.0, 1.0):
        draws = dropped(NO_DROPOUT.replace(**{prob: value}), 100)
        assert (draws["clip"] == bool(value)).all() and (draws["t5"] == bool(value)).all()
    assert draw_dropout(NO_DROPOUT.replace(dropout_prob=0.5, encoder_dropout_prob=0.5), 3, 0, ()) == {
        "size": False,
        "crop": False,
    }


def test_joint_and_independent_dropout_add_up() -> None:
    """P(all) = d + (1 - d) pⁿ, P(one encoder) = d + (1 - d) p; size and crop by themselves."""
    rule, names = (
        NO_DROPOUT.replace(dropout_prob=0.1, encoder_dropout_prob=0.4, size_dropout_prob=0.2, crop_dropout_prob=0.3),
        ["clip", "t5"],
    )
    rows = [draw_dropout(rule, 5, position, names) for position in range(8000)]
    share = {name: np.mean([row[name] for row in rows]) for name in (*names, "size", "crop")}
    assert share == {
        "clip": pytest.approx(0.46, abs=0.02),
        "t5": pytest.approx(0.46, abs=0.02),
        "size": pytest.approx(0.2, abs=0.02),
        "crop": pytest.approx(0.3, abs=0.02),
    }
    assert np.mean([row["clip"] and row["t5"] for row in rows]) == pytest.approx(0.1 + 0.9 * 0.16, abs=0.02)
    assert np.mean([row["size"] and row["crop"] for row in rows]) == pytest.approx(0.06, abs=0.01)
