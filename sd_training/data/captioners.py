"""The caption of a visit, for each kind of data set."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from sd_training.data.caption_choice import CAPTION, CaptionRules, choose_caption, finish_caption
from sd_training.data.captions import Prompts, class_name
from sd_training.data.index import DatasetIndex
from sd_training.data.source import SampleReader
from sd_training.data.tag_rules import TagRules, read_tags, tag_caption

Chance = Callable[[str], np.random.Generator]
"""Purpose → the generator of this visit for it."""


class Captioner(Protocol):
    """Sample → caption; copied into loader processes."""

    def __call__(self, sample: int, chance: Chance) -> str:
        """Raises BadSample (skip it) or DataError (stop)."""


class ClassCaptions:
    """A prompt of the sample's class, one of several drawn per visit, in the place of a caption."""

    def __init__(self, index: DatasetIndex, prompts: Prompts, rules: CaptionRules) -> None:
        self.index, self.prompts, self.rules = index, prompts, rules

    def __call__(self, sample: int, chance: Chance) -> str:
        choices = self.prompts[class_name(self.index.text("cls", sample) or "")]
        prompt = choices[0] if len(choices) == 1 else choices[chance("caption").integers(len(choices))]
        return finish_caption(prompt, lambda field: self.index.metadata_text(field, sample), self.rules, chance)


class ChosenCaptions:
    """The sample's own caption or a metadata field, by rules."""

    def __init__(self, index: DatasetIndex, reader: SampleReader, rules: CaptionRules) -> None:
        self.index, self.reader, self.rules = index, reader, rules

    def __call__(self, sample: int, chance: Chance) -> str:
        return choose_caption(lambda field: self._text(field, sample), self.rules, chance)

    def _text(self, field: str, sample: int) -> str | None:
        if field != CAPTION:
            return self.index.metadata_text(field, sample)
        return self.reader.caption(sample) if self.index.numbers("caption_length")[sample] >= 0 else None


class TagCaptions:
    """Tags put together anew at every visit."""

    def __init__(self, index: DatasetIndex, rules: TagRules) -> None:
        self.index, self.rules = index, rules

    def __call__(self, sample: int, chance: Chance) -> str:
        return tag_caption(read_tags(self.index.text("caption", sample) or ""), self.rules, chance)
