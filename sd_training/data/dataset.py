"""One data set of a run: its source indexed, filtered, assigned to buckets and ready to be read."""

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from sd_training.config.data_schema import DatasetParams, SourceParams, read_class_prompts
from sd_training.config.filters import parse_filters
from sd_training.config.paths import output_path
from sd_training.config.plan import counted
from sd_training.data.index.selection import Selection, filter_lines, select
from sd_training.data.index.store import DatasetIndex, load_index
from sd_training.data.order.buckets import BucketTable, Merge, merge_small
from sd_training.data.samples.captions import (
    CAPTION,
    Captioner,
    check_fields,
    check_rules,
    class_caption,
    field_caption,
    fields_needed,
    tag_folder_caption,
)
from sd_training.data.sources.base import SampleReader
from sd_training.data.sources.choose import access_of, fitting_type, make_source
from sd_training.data.sources.tags import limited
from sd_training.data.storage.locations import shown
from sd_training.errors import ConfigError, DataError


@dataclass(frozen=True)
class OpenDataset:
    """What the order, the reader and the report need of one data set."""

    kind: str
    """`dataset.type`."""
    index: DatasetIndex
    selection: Selection
    selected: NDArray[np.int64]
    """[n] samples of the index that are trained on, ascending."""
    bucket_of: NDArray[np.int32]
    """[n] bucket of each of them."""
    merges: list[Merge]
    """Buckets that had too few samples."""
    num_without_bucket: int
    """Samples that pass the filters but fit no bucket that is used, or whose size is not known."""
    num_over_limit: int
    """Samples that pass the filters but are more than `tags.limit_images`."""
    reader: SampleReader
    captioner: Captioner

    def in_bucket(self, bucket: int) -> NDArray[np.int64]:
        """Samples of the index in a bucket."""
        if bucket not in self._by_bucket:
            self._by_bucket[bucket] = self.selected[self.bucket_of == bucket]
        return self._by_bucket[bucket]

    @cached_property
    def _by_bucket(self) -> dict[int, NDArray[np.int64]]:
        return {}

    @cached_property
    def selected_of_shard(self) -> dict[str, int]:
        """Location of a shard, as it may be shown → how many of its samples are selected."""
        counts = np.bincount(self.index.numbers("unit")[self.selected], minlength=len(self.index.shards))
        return {shown(shard.location): int(count) for shard, count in zip(self.index.shards, counts, strict=True)}


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
        captions_needed: False where captions are never read; samples without one are then usable.

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
    prompts = None
    if kind == "ClassificationWebDataset":
        prompts, problems = read_class_prompts(source_params)
        if problems:
            raise ConfigError(problems)
    captions = source_params.captions
    source = make_source(kind, source_params, access_of(params.remote))
    check_rules(captions)
    fields = set().union(fields_needed(captions) if captions_needed else (), *(rule.fields() for rule in rules))
    index = load_index(source, None if params.index_dir is None else output_path(params.index_dir), fields - {CAPTION})
    if prompts is None and captions_needed:
        check_fields(captions, index.fields | {CAPTION})
    selection = select(
        index, rules, prompts, captions, captions_needed=captions_needed, max_pixels=params.max_image_pixels
    )
    chosen = selection.selected
    if kind == "TagFolder" and source_params.tags.limit_images is not None:
        chosen = chosen[limited([index.name(int(sample))[1] for sample in chosen], source_params.tags.limit_images)]

    def check_count(num_left: int, needed: int) -> None:
        if num_left < needed:
            raise DataError(_too_few(index, selection, num_left, len(chosen) - num_left, needed))

    # Where a step may repeat samples, one sample is enough for the last bucket that is left.
    needed = np.ones_like(batches) if params.resampled else batches
    assigned = table.assign(index.numbers("width")[chosen], index.numbers("height")[chosen])
    fits = assigned >= 0
    check_count(int(fits.sum()), int(needed.min()))
    bucket_of, merges = merge_small(assigned[fits], table, batches)
    is_kept = bucket_of >= 0
    selected, bucket_of = chosen[fits][is_kept], bucket_of[is_kept]
    check_count(len(selected), int(needed[bucket_of].min()))
    reader = source.reader(index)
    captioner: Captioner = partial(field_caption, index, reader, captions)
    if prompts is not None:
        captioner = partial(class_caption, index, prompts, captions)
    elif kind == "TagFolder":
        captioner = partial(tag_folder_caption, index, source_params.tags)
    without, over_limit = len(chosen) - len(selected), len(selection.selected) - len(chosen)
    return OpenDataset(kind, index, selection, selected, bucket_of, merges, without, over_limit, reader, captioner)


def _too_few(index: DatasetIndex, selection: Selection, num_left: int, num_without_bucket: int, needed: int) -> str:
    unfit = f" ({num_without_bucket:,} more fit no bucket or have no readable size)" if num_without_bucket else ""
    first = shown(index.shards[0].location) + (" and further" if len(index.shards) > 1 else "")
    repeat = ", or set dataset.params.resampled=true, which repeats samples" if num_left else ""
    lines = [
        f"dataset.params.path: {counted(num_left, 'sample')} of {first} {'is' if num_left == 1 else 'are'} "
        f"left{unfit}, fewer than one optimizer step of {needed:,} takes; give more data, loosen "
        "dataset.params.filters, or lower system.batch_size × system.gradient_accumulation × processes"
        f"{repeat}",
        *(f"filter {line}" for line in filter_lines(index, selection)),
    ]
    if selection.problems.total():
        lines.append(f"problems: {selection.problems.text()}")
    return "\n".join(lines)
