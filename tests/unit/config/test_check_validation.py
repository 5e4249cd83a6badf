"""Options of the held-out data that contradict each other."""

import pytest

from sd_training.config.check import warnings
from sd_training.config.load import load_config
from sd_training.errors import ConfigError

RUN = (
    "experiment.log_dir=runs",
    "experiment.name=x",
    "experiment.num_examples_to_see=1000",
    "experiment.save_every=100",
    "model.pretrained=stabilityai/x",
    "dataset.params.path=a.tar",
)


BEST = ["checkpoint.keep_best=1", "validation.path=b.tar"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["validation.path=a.tar"], "validation.path: is the data that is trained on"),
        (["checkpoint.keep_best=1"], "checkpoint.keep_best: is 1, which needs validation.path"),
        (
            ["checkpoint.best_by=loss", "validation.path=b.tar", "validation.every=50"],
            'checkpoint.best_by: is "loss", but this option is gone: there is only "validation_loss" now',
        ),
        (
            BEST,
            "validation.every: 1,000 does not divide experiment.save_every=100",
        ),
        (
            ["evaluation.every=150", "evaluation.clip=c", "evaluation.path=b.tar"],
            "evaluation.every: 150 is no multiple of experiment.save_every=100",
        ),
        (["evaluation.every=200", "evaluation.path=b.tar"], "evaluation.every: needs a network"),
        (["evaluation.every=200", "evaluation.clip=c"], "evaluation.every: needs real pictures"),
    ],
)
def test_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*RUN, *words])
    assert [problem.startswith(told) for problem in caught.value.problems] == [True], caught.value


def test_options_that_nothing_reads_are_told() -> None:
    told = "validation.every: is not used, because validation.path"
    for words, is_told in ((["validation.every=5"], True), (["validation.every=5", "validation.path=b.tar"], False)):
        assert any(line.startswith(told) for line in warnings(load_config([*RUN, *words]))) == is_told


def test_allowed() -> None:
    words = ["checkpoint.best_by=validation_loss", "checkpoint.keep_best=1", "validation.path=[b.tar,c.tar]"]
    config = load_config([*RUN, *words, "validation.every=50"])
    assert config.validation.path == ["b.tar", "c.tar"]


def test_the_former_way_to_choose_the_best_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    words = ["checkpoint.best_by=training_loss", "checkpoint.keep_best=1", "validation.path=b.tar"]
    assert load_config([*RUN, *words, "validation.every=50"]).checkpoint.keep_best == 1
    told = 'checkpoint.best_by: "training_loss" is not read any more; there is only "validation_loss" now'
    assert told in caplog.text
