"""What the data of a run is: a few lines for the dry run and the start of a run, and what is probably not intended."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from sd_training.config.plan import counted
from sd_training.data.dataset import OpenDataset
from sd_training.data.index.selection import filter_lines
from sd_training.data.order.buckets import NO_BUCKET, BucketTable, histogram
from sd_training.data.order.order import RunOrder, generator
from sd_training.data.samples.captions import Tokenizer
from sd_training.data.storage.files import shown
from sd_training.errors import BadSample

_MANY_ENLARGED, _MANY_CUT = 0.05, 0.01
"""From which share of enlarged images, and of truncated captions, on a warning is due."""
_MANY_EPOCHS, _SMALL_SET = 100, 100_000
"""From how many repeats of how few samples on a warning is due."""
_CAPTIONS_READ, _CAPTIONS_S = 1_000, 10.0
"""Captions whose tokens are counted, in all data sets together, and the longest time for it [s]."""


class DatasetReport:
    """One data set.

    Args:
        dataset: number `number` of those that `order` draws from.
        order: of the run.
        number: place of the data set in the run, from 0.
        table: the sizes that are trained on.
        of_run: whether there is a run to report on.
        is_size_known: whether `table` has the sizes of a run; otherwise enlarged images are not counted.
    """

    def __init__(
        self, dataset: OpenDataset, order: RunOrder, number: int, table: BucketTable, of_run: bool, is_size_known: bool
    ) -> None:
        self.dataset, self.table, self.of_run = dataset, table, of_run
        index, noun, count = dataset.index, dataset.reader.source.shard_noun, len(order.orders)
        self.heading = f"data set {number + 1} of {count}" if count > 1 else ""
        self.location = shown(index.shards[0].location)
        """Of the first shard."""
        self.place = f"{counted(len(index), 'sample')} in {counted(len(index.shards), noun)}"
        """How many samples are where."""
        self.num_selected = len(dataset.selected)
        """Samples with caption or known class that pass all filters and have a bucket."""
        self.num_steps = order.steps_before(order.num_steps, number)
        """Optimizer steps that draw from it."""
        self.epochs = self.num_steps * order.orders[number].global_batch / self.num_selected
        """How often the run sees each sample."""
        height, width = (index.numbers(side)[dataset.selected] for side in ("height", "width"))
        target = np.array(table.sizes)[dataset.bucket_of]
        is_smaller = (height > 0) & (width > 0) & ((height < target[:, 0]) | (width < target[:, 1]))
        self.num_enlarged = int(is_smaller.sum()) if is_size_known else 0
        """Images that are enlarged to cover their bucket; those of unknown size are not counted."""

    def warnings(self) -> list[str]:
        """What is allowed but probably not intended."""
        found, share = [], self.num_enlarged / self.num_selected
        if share >= _MANY_ENLARGED:
            found.append(
                f"dataset.params.resolution: {share:.0%} of the images are smaller than the size they are trained at; "
                "they are enlarged, and blurred by it. Lower the resolution, leave them out "
                "(dataset.params.filters.width='>=…'), or use dataset.params.buckets.mode=ladder with upscale=false"
            )
        if self.of_run and self.epochs > _MANY_EPOCHS and self.num_selected < _SMALL_SET:
            found.append(
                f"the length of the run: {counted(self.num_selected, 'sample')} {self.epochs:,.0f} times "
                "each; a model memorises a small set that is repeated so often. Give more data or a shorter run"
            )
        return found

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        dataset, selection, table = self.dataset, self.dataset.selection, self.table
        filters, samples = filter_lines(dataset.index, selection), counted(self.num_selected, "sample")
        if self.heading:
            yield f"{self.heading}: {self.location}"
        yield f"data: {self.place}; {selection.num_usable:,} have all members"
        yield from (f"  {line}" for line in filters)
        if dataset.num_without_bucket:
            why = "too small, of unknown size, or see below" if dataset.merges else "too small, or of unknown size"
            yield f"  without a bucket ({why}): {counted(dataset.num_without_bucket, 'sample')}"
        if dataset.num_over_limit:
            over = counted(dataset.num_over_limit, "sample")
            yield f"  left out by dataset.params.max_samples or tags.limit_images: {over}"
        if filters or self.num_selected < selection.num_usable:
            yield f"  left: {samples}"
        if len(table.sizes) > 1:
            buckets = (f"{h}×{w} {count:,}" for (h, w), count in histogram(dataset.bucket_of, table))
            yield f"  buckets (height×width samples): {', '.join(buckets)}"
        for source, target, count in dataset.merges:
            fate = "they are left out, because only larger buckets are in use and nothing is to be enlarged"
            if target != NO_BUCKET:
                fate = "they join {}×{}".format(*table.sizes[target])
            few = f"has {counted(count, 'sample')}, fewer than one optimizer step takes"
            yield "  bucket {}×{} {}; {}".format(*table.sizes[source], few, fate)
        if problems := selection.problems.text():
            yield f"  problems: {problems}"
        if self.num_enlarged:
            share = self.num_enlarged / self.num_selected
            yield f"  enlarged to the size they are trained at: {counted(self.num_enlarged, 'image')} ({share:.1%})"
        if self.of_run:
            yield f"  the run sees {samples} {self.epochs:,.2f} times each, in {counted(self.num_steps, 'step')}"


def report_text(reports: Sequence[DatasetReport]) -> str:
    """All data sets of a run, for a terminal."""
    return "\n".join(line for report in reports for line in report.lines())


def cut_captions(
    datasets: Sequence[OpenDataset], tokenizers: Mapping[str, Tokenizer], seed: int
) -> list[tuple[str, bool]]:
    """Looks at captions at equal distances in the data, as training would draw them.

    Args:
        datasets: opened data sets.
        tokenizers: text encoder → tokenizer.
        seed: of the run.

    Returns:
        For each text encoder, how many of them are longer than it reads, and whether a warning is due.
    """
    end_s, captions = time.monotonic() + _CAPTIONS_S, list[str]()
    for dataset in datasets if tokenizers else ():
        count = min(len(dataset.selected), max(1, _CAPTIONS_READ // len(datasets)))
        for number, place in enumerate(np.arange(count) * len(dataset.selected) // count):
            if time.monotonic() < end_s:
                with suppress(BadSample):
                    rng = partial(generator, seed, position=number)
                    captions.append(dataset.captioner(int(dataset.selected[place]), rng))
    cuts = []
    for name, tokenizer in tokenizers.items() if captions else ():
        num_cut = sum(map(tokenizer.is_cut, captions))
        have, are = ("has", "is") if num_cut == 1 else ("have", "are")
        sentence = (
            f"{name}: {num_cut:,} of {counted(len(captions), 'caption')} looked at ({num_cut / len(captions):.1%}) "
            f"{have} more than its {tokenizer.length} tokens and {are} cut off"
        )
        cuts.append((sentence, num_cut >= _MANY_CUT * len(captions)))
    return cuts
