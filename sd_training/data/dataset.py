"""One data set of a run: its source indexed, filtered, assigned to buckets and ready to be read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sd_training.config.data_schema import DatasetParams, SourceParams, SourceType, read_class_prompts
from sd_training.config.filters import parse_filters
from sd_training.config.plan import counted
from sd_training.config.value_types import output_path
from sd_training.data.index.selection import Selection, evaluate, exclusion_lines, select
from sd_training.data.index.store import load_index
from sd_training.data.order.buckets import NO_BUCKET, BucketTable, Merge, merge_small
from sd_training.data.samples import captions
from sd_training.data.sources.base import DatasetIndex, IndexedReader
from sd_training.data.sources.choose import make_source
from sd_training.data.sources.files import limited
from sd_training.data.storage.files import shown
from sd_training.errors import ConfigError, DataError


@dataclass(frozen=True)
class OpenDataset:
    """What the order, the reader and the report need of one data set."""

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
    """Samples that pass the filters but are more than `max_samples`, or `tags.limit_images`."""
    reader: IndexedReader
    captioner: captions.Captioner
    all_captions: Callable[[int], list[str]]
    """Sample → every caption that `captioner` may draw."""

    def exclusion(self, sample: int, table: BucketTable) -> str:
        """Why a sample of the index is not trained on; empty where it is.

        Args:
            table: the sizes that the data set was opened with.
        """
        index, selection = self.index, self.selection
        if sample in self.selected:
            return ""
        row = index.columns.slice(sample, 1)
        if failed := [f"filter {rule}" for rule, _ in selection.rules if not evaluate(rule, row, 1).item()]:
            return ", ".join(failed)
        width, height = (index.numbers(side)[sample : sample + 1] for side in ("width", "height"))
        size = f"{width.item()} × {height.item()} pixels"
        if sample not in selection.selected:
            return f"no caption, a class without a prompt, or too large ({size})"
        bucket = int(table.assign(width, height).item())
        if bucket == NO_BUCKET:
            return f"no bucket for {size} (0 is unknown)"
        left_out = {merge.source for merge in self.merges if merge.target == NO_BUCKET}
        joined = {merge.source: merge.target for merge in self.merges}
        while bucket in joined and bucket not in left_out:
            bucket = joined[bucket]
        return f"too few samples in the bucket for {size}" if bucket in left_out else "max_samples or tags.limit_images"


def open_dataset(
    kind: SourceType,
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
        DataError: the data cannot be used, or fewer samples are left than one optimizer step takes.
    """
    rules, problems = parse_filters(source_params.filters)
    prompts = None
    if kind == "ClassificationWebDataset":
        prompts, wrong = read_class_prompts(source_params)
        problems = problems + wrong
    caption_rules = source_params.captions
    captions_needed = captions_needed and caption_rules.text is None
    caption_fields = set(captions.caption_weights(caption_rules))
    if not caption_fields:
        problems = [*problems, f"{captions.OPTION}.fields: every weight is 0; give one field a weight above 0"]
    if problems:
        raise ConfigError(problems)
    fields = (caption_fields if captions_needed else set[str]()).union(*(rule.fields() for rule in rules))
    folder = None if params.index_dir is None else output_path(params.index_dir)
    source = make_source(kind, source_params, params.remote)
    index = load_index(source, folder, fields - {captions.CAPTION})
    reader = source.reader(index)
    own_rules = source_params.tags if kind == "TagFolder" else caption_rules
    if prompts is None and captions_needed:
        captions.check_fields(caption_rules, index.fields | {captions.CAPTION})
    selection = select(index, rules, prompts, caption_rules if captions_needed else None, params.max_image_pixels)
    chosen = selection.selected
    limits = (source_params.max_samples, source_params.tags.limit_images if kind == "TagFolder" else None)
    if any(limit is not None and limit < len(chosen) for limit in limits):
        smallest = min(limit for limit in limits if limit is not None)
        chosen = chosen[limited([index.name(int(sample))[1] for sample in chosen], smallest)]
    assigned = table.assign(index.numbers("width")[chosen], index.numbers("height")[chosen])
    fits = assigned != NO_BUCKET
    bucket_of, merges = merge_small(assigned[fits], table, batch_size)
    is_kept = bucket_of != NO_BUCKET
    selected, bucket_of = chosen[fits][is_kept], bucket_of[is_kept]
    num_left, without = len(selected), len(chosen) - len(selected)
    # Where a step may repeat samples, one sample is enough for the last bucket that is left.
    needed = 1 if params.resampled else batch_size
    if num_left < needed:
        first, others = shown(index.shards[0].location), len(index.shards) - 1
        more = f" ({without:,} more fit no bucket or have no readable size)" if without else ""
        few = (
            f"{counted(num_left, 'sample')} of {first}{' and further' if others else ''} "
            f"{'is' if num_left == 1 else 'are'} left{more}, fewer than one optimizer step of {needed:,} takes; give "
            "more data, loosen dataset.params.filters, or lower system.batch_size × system.gradient_accumulation × "
            "processes" + (", or set dataset.params.resampled=true, which repeats samples" if num_left else "")
        )
        if not len(selection.selected):
            few = f"no sample is left of the {len(index):,} in {first}{f' and {others:,} more' if others else ''}"
        raise DataError("\n".join([f"dataset.params.path: {few}", *exclusion_lines(index, selection)]))
    captioner = partial(captions.draw_caption, reader, own_rules, prompts)
    all_captions = partial(captions.all_captions, reader, own_rules, prompts)
    over_limit = len(selection.selected) - len(chosen)
    return OpenDataset(
        index, selection, selected, bucket_of, merges, without, over_limit, reader, captioner, all_captions
    )
