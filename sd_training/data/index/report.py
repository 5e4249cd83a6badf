"""What the data of a run is: a few lines for the dry run and the start of a run, and what is probably not intended."""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sd_training.config.plan import counted
from sd_training.data.dataset import OpenDataset
from sd_training.data.index.selection import filter_lines
from sd_training.data.order.buckets import NO_BUCKET, BucketTable, histogram
from sd_training.data.order.order import RunOrder, generator
from sd_training.data.problems import BadSample
from sd_training.data.samples.captions import Tokenizer
from sd_training.data.sources.choose import SHARD_NOUNS
from sd_training.data.storage.locations import shown

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
        self.dataset, self.table, self.of_run, self.is_size_known = dataset, table, of_run, is_size_known
        index, noun = dataset.index, SHARD_NOUNS.get(dataset.kind, "shard")
        self.location = shown(index.shards[0].location)
        """Of the first shard."""
        self.place = f"{counted(len(index), 'sample')} in {counted(len(index.shards), noun)}"
        """How many samples are where."""
        self.num_selected = len(dataset.selected)
        """Samples with caption or known class that pass all filters and have a bucket."""
        self.num_steps = order.steps_before(order.num_steps, number)
        """Optimizer steps that draw from it."""
        self.epochs = self.num_steps * order.orders[number].settings.global_batch / self.num_selected
        """How often the run sees each sample."""

    def enlargement(self) -> NDArray[np.float64]:
        """Factors, above 1, by which images are enlarged to cover their bucket; those of unknown size are left out."""
        if not self.is_size_known:
            return np.empty(0)
        target = np.array(self.table.sizes, dtype=np.float64)[self.dataset.bucket_of]
        sides = [self.dataset.index.numbers(side)[self.dataset.selected] for side in ("height", "width")]
        is_known = (sides[0] > 0) & (sides[1] > 0)
        factors = np.maximum(*(target[is_known, i] / side[is_known] for i, side in enumerate(sides)))
        return np.asarray(factors[factors > 1])

    def warnings(self) -> list[str]:
        """What is allowed but probably not intended."""
        found, factors = [], self.enlargement()
        if (share := len(factors) / self.num_selected) >= _MANY_ENLARGED:
            found.append(
                f"dataset.params.resolution: {share:.0%} of the images are smaller than the size they are trained at; "
                f"they are enlarged {np.median(factors):.1f} times (median), at most {factors.max():.1f} times, "
                "and blurred by it. Lower the resolution, leave them out (dataset.params.filters.width='>=…'), or use "
                "dataset.params.buckets.mode=ladder with upscale=false"
            )
        if self.of_run and self.epochs > _MANY_EPOCHS and self.num_selected < _SMALL_SET:
            found.append(
                f"experiment.num_examples_to_see: {counted(self.num_selected, 'sample')} {self.epochs:,.0f} times "
                "each; a model memorises a small set that is repeated so often. Give more data or a shorter run"
            )
        return found

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        dataset, selection, table = self.dataset, self.dataset.selection, self.table
        filters, samples = filter_lines(dataset.index, selection), counted(self.num_selected, "sample")
        yield f"data: {self.place}; {selection.num_usable:,} have all members"
        yield from (f"  {line}" for line in filters)
        if dataset.num_without_bucket:
            why = "too small, of unknown size, or see below" if dataset.merges else "too small, or of unknown size"
            yield f"  without a bucket ({why}): {counted(dataset.num_without_bucket, 'sample')}"
        if dataset.num_over_limit:
            yield f"  left out by dataset.params.tags.limit_images: {counted(dataset.num_over_limit, 'sample')}"
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
        if len(factors := self.enlargement()):
            yield (
                f"  enlarged to the size they are trained at: {counted(len(factors), 'image')} "
                f"({len(factors) / self.num_selected:.1%}), {np.median(factors):.2f} times (median), at most "
                f"{factors.max():.2f}"
            )
        if self.of_run:
            yield f"  the run sees {samples} {self.epochs:,.2f} times each, in {counted(self.num_steps, 'step')}"


class DataReport(NamedTuple):
    """All data sets of a run."""

    datasets: list[DatasetReport]

    def text(self) -> str:
        """Several lines for a terminal."""
        lines = []
        for number, report in enumerate(self.datasets, start=1):
            if len(self.datasets) > 1:
                lines.append(f"data set {number} of {len(self.datasets)}: {report.location}")
            lines += report.lines()
        return "\n".join(lines)


class CutCaptions(NamedTuple):
    """How many captions are longer than a text encoder reads, by a look at some."""

    sentence: str
    """For a terminal."""
    is_much: bool
    """Whether a warning is due."""


def cut_captions(datasets: Sequence[OpenDataset], tokenizers: Mapping[str, Tokenizer], seed: int) -> list[CutCaptions]:
    """Counts, for each text encoder, the tokens of captions at equal distances in the data, as training would draw
    them.

    Args:
        datasets: opened data sets.
        tokenizers: text encoder → tokenizer.
        seed: of the run.
    """
    end_s, lengths = time.monotonic() + _CAPTIONS_S, {name: list[int]() for name in tokenizers}
    for dataset in datasets if tokenizers else ():
        count = min(len(dataset.selected), max(1, _CAPTIONS_READ // len(datasets)))
        for number, place in enumerate(np.arange(count) * len(dataset.selected) // count):
            if time.monotonic() > end_s:
                break
            try:
                caption = dataset.captioner(int(dataset.selected[place]), partial(generator, seed, position=number))
            except BadSample:
                continue
            for name, tokenizer in tokenizers.items():
                _, mask, num_cut = tokenizer.encode_counted(caption)
                lengths[name].append(int(mask.sum()) + num_cut)
    cuts = []
    for name, found in lengths.items():
        if found:
            limit, looked_at = tokenizers[name].length, counted(len(found), "caption")
            num_cut = sum(length > limit for length in found)
            have, are = ("has", "is") if num_cut == 1 else ("have", "are")
            sentence = (
                f"{name}: {num_cut:,} of {looked_at} looked at ({num_cut / len(found):.1%}) {have} more than its "
                f"{limit} tokens and {are} cut off; the longest has {max(found):,}"
            )
            cuts.append(CutCaptions(sentence, num_cut >= _MANY_CUT * len(found)))
    return cuts
