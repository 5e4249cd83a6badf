"""Batch arithmetic and the sentence that tells it."""

import pytest

from sd_training.config.plan import BatchPlan
from sd_training.errors import ConfigError


def test_sentence() -> None:
    plan = BatchPlan(micro_batch=32, accumulation=2, processes=4, num_examples=1_000_000)
    assert plan.sentence() == (
        "batch_size 32 × accumulation 2 × 4 processes = 256 images per optimizer step; 1,000,000 images = 3,906 steps"
    )


def test_sentence_in_the_singular() -> None:
    plan = BatchPlan(micro_batch=1, accumulation=1, processes=1, num_examples=1)
    assert plan.sentence() == (
        "batch_size 1 × accumulation 1 × 1 process = 1 image per optimizer step; 1 image = 1 step"
    )


@pytest.mark.parametrize(("examples", "steps"), [(256, 1), (511, 1), (512, 2)])
def test_only_whole_steps_count(examples: int, steps: int) -> None:
    assert BatchPlan(32, 2, 4, examples).num_steps == steps


def test_less_than_one_step_is_an_error_that_names_the_options() -> None:
    with pytest.raises(ConfigError, match=r"experiment\.num_examples_to_see: is 255, .* 4 processes = 256 images"):
        BatchPlan(32, 2, 4, 255).sentence()
