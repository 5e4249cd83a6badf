"""One data set, opened: indexed, filtered, put into buckets, ready to be read.

The caption of a visit, for each kind of data set.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sd_training.config.class_prompts import read_class_prompts
from sd_training.config.data_schema import DatasetParams, SourceParams
from sd_training.config.filters import parse_filters
from sd_training.config.paths import output_path
from sd_training.config.plan import counted
from sd_training.data.index.selection import Selection, filter_lines, select
from sd_training.data.index.store import DatasetIndex, load_index
from sd_training.data.order.buckets import BucketTable, Merge, merge_small
from sd_training.data.problems import Problems
from sd_training.data.samples.caption_choice import (
    CAPTION,
    CaptionRules,
    caption_rules,
    check_fields,
    choose_caption,
    fields_needed,
    finish_caption,
)
from sd_training.data.samples.captions import Prompts, class_name
from sd_training.data.sources.base import SampleReader
from sd_training.data.sources.choose import access_of, fitting_type, make_source
from sd_training.data.sources.tags import TagRules, limited, read_tags, tag_caption, tag_rules
from sd_training.data.storage.locations import shown
from sd_training.errors import ConfigError, DataError

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


@dataclass(frozen=True)
class OpenDataset:
    """Everything about one data set that the order, the reader and the report need."""

    kind: str
    """`dataset.type`."""
    index: DatasetIndex
    selection: Selection
    selected: NDArray[np.int64]
    """[n] samples of the index that take part, ascending."""
    bucket_of: NDArray[np.int32]
    """[n] bucket of each survivor."""
    merges: list[Merge]
    """Buckets that had too few samples."""
    num_without_bucket: int
    """Samples that pass the filters but fit no bucket that is used, or whose size is not known."""
    num_over_limit: int
    """Samples that pass the filters but are more than `tags.limit_images`."""
    reader: SampleReader
    captioner: Captioner

    @cached_property
    def block_of(self) -> NDArray[np.int32]:
        """[n] block of each survivor."""
        blocks: NDArray[np.int32] = self.index.numbers("block")[self.selected]
        return blocks

    def in_bucket(self, bucket: int) -> NDArray[np.int64]:
        """Samples of the index in a bucket."""
        if bucket not in self._by_bucket:
            self._by_bucket[bucket] = self.selected[self.bucket_of == bucket]
        return self._by_bucket[bucket]

    def num_selected_of(self, location: str) -> int:
        """How many survivors the units at a location have."""
        return self._survivors_by_location.get(location, 0)

    @cached_property
    def _survivors_by_location(self) -> dict[str, int]:
        counts = np.bincount(self.index.numbers("unit")[self.selected], minlength=len(self.index.shards))
        return {shown(unit.location): int(count) for unit, count in zip(self.index.shards, counts, strict=True)}

    @cached_property
    def _by_bucket(self) -> dict[int, NDArray[np.int64]]:
        return {}


def open_dataset(
    kind: str,
    source_params: SourceParams,
    params: DatasetParams,
    table: BucketTable,
    batches: NDArray[np.int64],
    *,
    captions_needed: bool = True,
) -> OpenDataset:
    """Opens one data set.

    Args:
        kind: `dataset.type`.
        source_params: which samples.
        params: processing, shared by all data sets of a run.
        table: the sizes that are trained on.
        batches: [buckets] samples that an optimizer step of each bucket takes; no bucket is left with fewer.
        captions_needed: False where captions are never read; samples without one then take part.

    Raises:
        ConfigError: an option is wrong.
        DataError: the data cannot be used.
    """
    try:
        return _open(kind, source_params, params, table, batches, captions_needed)
    except DataError as error:
        first, *others = str(error).split("\n")
        raise type(error)("\n".join([first + fitting_type(kind, source_params.path), *others])) from error


def _open(
    kind: str,
    source_params: SourceParams,
    params: DatasetParams,
    table: BucketTable,
    batches: NDArray[np.int64],
    captions_needed: bool,
) -> OpenDataset:
    rules, problems = parse_filters(source_params.filters)
    if problems:
        raise ConfigError(problems)
    prompts = _prompts(kind, source_params)
    source = make_source(kind, source_params, access_of(params.remote))
    captions = caption_rules(source_params.captions)
    of_captions = fields_needed(captions) if captions_needed else set[str]()
    fields = of_captions.union(*(rule.fields() for rule in rules))
    folder = None if params.index_dir is None else output_path(params.index_dir)
    index = load_index(source, folder, fields - {CAPTION})
    if prompts is None and captions_needed:
        check_fields(captions, index.fields | {CAPTION})
    selection = select(
        index, rules, prompts, captions, captions_needed=captions_needed, max_pixels=params.max_image_pixels
    )
    chosen = selection.selected
    if kind == "TagFolder" and source_params.tags.limit_images is not None:
        chosen = chosen[limited([index.name(int(sample))[1] for sample in chosen], source_params.tags.limit_images)]
    survivors, bucket_of, merges = _in_buckets(index, selection, chosen, table, batches, params.resampled)
    reader = source.reader(index)
    captioner: Captioner = ChosenCaptions(index, reader, captions)
    if prompts is not None:
        captioner = ClassCaptions(index, prompts, captions)
    elif kind == "TagFolder":
        captioner = TagCaptions(index, tag_rules(source_params.tags))
    without, over_limit = len(chosen) - len(survivors), len(selection.selected) - len(chosen)
    return OpenDataset(kind, index, selection, survivors, bucket_of, merges, without, over_limit, reader, captioner)


def _prompts(kind: str, params: SourceParams) -> Prompts | None:
    if kind != "ClassificationWebDataset":
        return None
    prompts, problems = read_class_prompts(params)
    if problems:
        raise ConfigError(problems)
    return prompts


def _in_buckets(
    index: DatasetIndex,
    selection: Selection,
    chosen: NDArray[np.int64],
    table: BucketTable,
    batches: NDArray[np.int64],
    may_repeat: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int32], list[Merge]]:
    """Samples that have a bucket, their buckets, and which buckets had too few.

    Where a step may repeat samples, one sample is enough for the last bucket that is left.
    """
    needed = np.ones_like(batches) if may_repeat else batches
    assigned = table.assign(index.numbers("width")[chosen], index.numbers("height")[chosen])
    fits = assigned >= 0
    _enough(index, selection, len(chosen), int(fits.sum()), int(needed.min()))
    bucket_of, merges = merge_small(assigned[fits], table, batches)
    stays = bucket_of >= 0
    survivors, bucket_of = chosen[fits][stays], bucket_of[stays]
    _enough(index, selection, len(chosen), len(survivors), int(needed[bucket_of].min()))
    return survivors, bucket_of, merges


def _enough(index: DatasetIndex, selection: Selection, num_chosen: int, num_left: int, global_batch: int) -> None:
    if num_left >= global_batch:
        return
    without = num_chosen - num_left
    unfit = f" ({without:,} more fit no bucket or have no readable size)" if without else ""
    first = shown(index.shards[0].location) + (" and further" if len(index.shards) > 1 else "")
    repeat = ", or set dataset.params.resampled=true, which repeats samples" if num_left else ""
    lines = [
        f"dataset.params.path: {counted(num_left, 'sample')} of {first} {'is' if num_left == 1 else 'are'} "
        f"left{unfit}, fewer than one optimizer step of {global_batch:,} takes; give more data, loosen "
        "dataset.params.filters, or lower "
        f"system.batch_size × system.gradient_accumulation × processes{repeat}",
        *(f"filter {line}" for line in filter_lines(index, selection)),
    ]
    if selection.problems.total():
        lines.append(f"problems: {selection.problems.text()}")
    raise DataError("\n".join(lines))


def all_problems(datasets: Sequence[OpenDataset]) -> Problems:
    """What is wrong with the shards and samples of all data sets."""
    problems = Problems()
    for dataset in datasets:
        problems.merge(dataset.selection.problems)
    return problems
