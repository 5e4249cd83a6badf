"""Rules between the options of the data."""

import pytest

from sd_training.config.check import warnings
from sd_training.config.load import load_config
from tests.unit.config.loading import BASE, only

MIX = "dataset.mix=[{{params: {{path: a.tar{more}}}, start_step: {start}}}]"


@pytest.mark.parametrize(("start", "is_warned"), [(3124, False), (3125, True)])
def test_a_data_set_that_starts_after_the_end_is_a_warning(start: int, is_warned: bool) -> None:
    found = warnings(load_config([*BASE, MIX.format(more="", start=start)]))  # 100,000 images, 32 per step
    assert any(line.startswith(f"dataset.mix.0.start_step: is {start:,}") for line in found) == is_warned


def test_an_option_of_another_source_is_refused_in_a_mix_too() -> None:
    line = only(*BASE, "dataset.type=Table", MIX.format(more=", image_column: jpg", start=0))
    assert line.startswith('dataset.mix.0.params.image_column: is "jpg", but is only read with dataset.mix.0.type=')
