"""The nearest known key."""

import pytest

from sd_training.config.fields import groups, options
from sd_training.config.suggest import suggest


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("system.batchsize", "system.batch_size"),
        ("experiment.nmae", "experiment.name"),
        ("learning_rate", "optimizer.params.learning_rate"),
        ("optimiser.params.learning_rate", "optimizer.params.learning_rate"),
        ("optimizer.learning_rate", "optimizer.params.learning_rate"),
        ("dataset.batch_size", "dataset.params.batch_size"),
        ("dataset.param.path", "dataset.params.path"),
        ("modle", "model"),
        ("model.ema", "model.use_ema"),
        ("zzzzzzzz", None),
        ("", None),
    ],
)
def test_suggest(key: str, expected: str | None) -> None:
    assert suggest(key, [*options(), *groups()]) == expected
