"""One data set of a run: its source indexed, filtered, assigned to buckets and ready to be read."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sd_training.config.data_schema import DatasetParams, SourceParams, read_class_prompts
from sd_training.config.filters import parse_filters
from sd_training.config.plan import counted
from sd_training.config.value_types import output_path
from sd_training.data.index.dataset_index import DatasetIndex
from sd_training.data.index.selection import Selection, exclusion_lines, select
from sd_training.data.index.store import load_index
from sd_training.data.order.buckets import NO_BUCKET, BucketTable, Merge, merge_small
from sd_training.data.samples import captions
from sd_training.data.sources.base import IndexedReader
from sd_training.data.sources.choose import access_of, make_source
from sd_training.data.sources.files import limited
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
    reader: IndexedReader
    captioner: captions.Captioner


def open_dataset(
    kind: str,
    source_params: SourceParams,
    params: DatasetParams,
    table: BucketTable,
    batch_size: int,
    *,
    captions_needed: bool = True,
) -> OpenDataset:
    """Opens one data set.

    Args:
        kind: `dataset.type`.
        source_params: which samples.
        params: processing, shared by all data sets of a run.
        table: the sizes that are trained on.
        batch_size: samples that an optimizer step takes; no bucket is left with fewer.
        captions_needed: False where captions are never read; samples without one are then usable.

    Raises:
        ConfigError: an option is wrong.
        DataError: the data cannot be used.
    """
    rules, problems = parse_filters(source_params.filters)
    prompts = None
    if kind == "ClassificationWebDataset":
        prompts, wrong = read_class_prompts(source_params)
        problems = problems + wrong
    if problems:
        raise ConfigError(problems)
    caption_rules = source_params.captions
    captions.check_rules(caption_rules)
    caption_fields = captions.fields_needed(caption_rules) if captions_needed else set[str]()
    fields = caption_fields.union(*(rule.fields() for rule in rules))
    folder = None if params.index_dir is None else output_path(params.index_dir)
    source = make_source(kind, source_params, access_of(params.remote))
    index = load_index(source, folder, fields - {captions.CAPTION})
    reader = source.reader(index)
    captioner: captions.Captioner = partial(captions.field_caption, index, reader, caption_rules)
    if prompts is not None:
        captioner = partial(captions.class_caption, index, prompts, caption_rules)
    elif kind == "TagFolder":
        captioner = partial(captions.tag_folder_caption, index, source_params.tags)
    if prompts is None and captions_needed:
        captions.check_fields(caption_rules, index.fields | {captions.CAPTION})
    selection = select(
        index, rules, prompts, caption_rules, captions_needed=captions_needed, max_pixels=params.max_image_pixels
    )
    chosen = selection.selected
    if kind == "TagFolder" and source_params.tags.limit_images is not None:
        chosen = chosen[limited([index.name(int(sample))[1] for sample in chosen], source_params.tags.limit_images)]
    # Where a step may repeat samples, one sample is enough for the last bucket that is left.
    needed = 1 if params.resampled else batch_size
    selected, bucket_of, merges = _assign_buckets(index, selection, chosen, table, batch_size, needed)
    without, over_limit = len(chosen) - len(selected), len(selection.selected) - len(chosen)
    return OpenDataset(kind, index, selection, selected, bucket_of, merges, without, over_limit, reader, captioner)


def _assign_buckets(
    index: DatasetIndex,
    selection: Selection,
    chosen: NDArray[np.int64],
    table: BucketTable,
    batch_size: int,
    needed: int,
) -> tuple[NDArray[np.int64], NDArray[np.int32], list[Merge]]:
    """The samples that fit a bucket in use, the bucket of each, and buckets that were merged.

    Raises:
        DataError: fewer are left than one optimizer step takes.
    """
    assigned = table.assign(index.numbers("width")[chosen], index.numbers("height")[chosen])
    fits = assigned != NO_BUCKET
    bucket_of, merges = merge_small(assigned[fits], table, batch_size)
    is_kept = bucket_of != NO_BUCKET
    selected, bucket_of = chosen[fits][is_kept], bucket_of[is_kept]
    if (num_left := len(selected)) < needed:
        first = shown(index.shards[0].location) + (" and further" if len(index.shards) > 1 else "")
        unfit = len(chosen) - num_left
        more = f" ({unfit:,} more fit no bucket or have no readable size)" if unfit else ""
        repeat = ", or set dataset.params.resampled=true, which repeats samples" if num_left else ""
        few = (
            f"dataset.params.path: {counted(num_left, 'sample')} of {first} {'is' if num_left == 1 else 'are'} left"
            f"{more}, fewer than one optimizer step of {needed:,} takes; give more data, loosen "
            f"dataset.params.filters, or lower system.batch_size × system.gradient_accumulation × processes{repeat}"
        )
        raise DataError("\n".join([few, *exclusion_lines(index, selection)]))
    return selected, bucket_of, merges
