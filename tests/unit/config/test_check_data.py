"""Rules between the options of the data."""

import pytest

from tests.unit.config.loading import BASE, only

MIX = "dataset.mix=[{{params: {{path: a.tar{more}}}, start_step: {start}}}]"


def test_an_option_of_another_source_is_refused_in_a_mix_too() -> None:
    line = only(*BASE, "dataset.type=Table", MIX.format(more=", image_column: jpg", start=0))
    assert line.startswith('dataset.mix.0.params.image_column: is "jpg", but is only read with dataset.mix.0.type=')


@pytest.mark.parametrize("option", ["non_caption_tag_prefixes=['']", "replacements={'': x}"])
def test_empty_texts_that_every_tag_begins_with_are_refused(option: str) -> None:
    """They would leave out every tag, or put the replacement between all letters."""
    line = only(*BASE, "dataset.type=TagFolder", f"dataset.params.tags.{option}")
    assert line.startswith(f"dataset.params.tags.{option.partition('=')[0]}")
