"""What the data of a run is: a few lines for the dry run and the start of a run, and what is probably not intended."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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

_PERCENTILES = (5, 50, 95, 100)
_MANY_ENLARGED, _MANY_EPOCHS, _SMALL_SET = 0.05, 100, 100_000
"""From which share of enlarged images, and from how many repeats of how few samples on, a warning is due."""
_MANY_CUT = 0.01
"""As above, of captions that are truncated."""


@dataclass(frozen=True)
class DatasetReport:
    """One data set."""

    dataset: OpenDataset
    table: BucketTable
    num_steps: int
    """Optimizer steps that draw from it."""
    epochs: float
    """How often the run sees each sample."""
    of_run: bool = True
    """Whether there is a run to report on."""
    is_size_known: bool = True
    """Whether `table` has the sizes of a run; otherwise enlarged images are not counted."""

    @property
    def location(self) -> str:
        """Of its first shard."""
        return shown(self.dataset.index.shards[0].location)

    @property
    def num_selected(self) -> int:
        """Samples with caption or known class that pass all filters and have a bucket."""
        return len(self.dataset.selected)

    @property
    def place(self) -> str:
        """How many samples are where."""
        index, noun = self.dataset.index, SHARD_NOUNS.get(self.dataset.kind, "shard")
        return f"{counted(len(index), 'sample')} in {counted(len(index.shards), noun)}"

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
        filters = filter_lines(dataset.index, selection)
        yield f"data: {self.place}; {selection.num_usable:,} have all members"
        yield from (f"  {line}" for line in filters)
        if dataset.num_without_bucket:
            why = "too small, of unknown size, or see below" if dataset.merges else "too small, or of unknown size"
            yield f"  without a bucket ({why}): {counted(dataset.num_without_bucket, 'sample')}"
        if dataset.num_over_limit:
            yield f"  left out by dataset.params.tags.limit_images: {counted(dataset.num_over_limit, 'sample')}"
        if filters or self.num_selected < selection.num_usable:
            yield f"  left: {counted(self.num_selected, 'sample')}"
        if len(table.sizes) > 1:
            buckets = (f"{h}×{w} {count:,}" for (h, w), count in histogram(dataset.bucket_of, table))
            yield f"  buckets (height×width samples): {', '.join(buckets)}"
        for source, target, count in dataset.merges:
            fate = "they are left out, because only larger buckets are in use and nothing is to be enlarged"
            if target != NO_BUCKET:
                fate = "they join {}×{}".format(*table.sizes[target])
            few = f"has {counted(count, 'sample')}, fewer than one optimizer step takes"
            yield "  bucket {}×{} {}; {}".format(*table.sizes[source], few, fate)
        lengths = dataset.index.numbers("caption_length")[dataset.selected]
        if len(lengths := lengths[lengths >= 0]):
            values = zip(_PERCENTILES, np.percentile(lengths, _PERCENTILES), strict=True)
            yield f"  caption lengths in bytes: up to {', '.join(f'{p} % {int(value):,}' for p, value in values)}"
        if problems := selection.problems.text():
            yield f"  problems: {problems}"
        if len(factors := self.enlargement()):
            yield (
                f"  enlarged to the size they are trained at: {counted(len(factors), 'image')} "
                f"({len(factors) / self.num_selected:.1%}), {np.median(factors):.2f} times (median), at most "
                f"{factors.max():.2f}"
            )
        if self.of_run:
            samples, steps = counted(self.num_selected, "sample"), counted(self.num_steps, "step")
            yield f"  the run sees {samples} {self.epochs:,.2f} times each, in {steps}"


@dataclass(frozen=True)
class DataReport:
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


def make_report(
    datasets: Sequence[OpenDataset], order: RunOrder, table: BucketTable, of_run: bool, is_size_known: bool
) -> DataReport:
    """Summarises the data sets.

    Args:
        of_run: whether to report what the run draws from them.
        is_size_known: as in `DatasetReport`.
    """
    reports = []
    for number, (dataset, own) in enumerate(zip(datasets, order.orders, strict=True)):
        num_steps = order.steps_before(order.num_steps, number)
        epochs = num_steps * own.settings.global_batch / len(dataset.selected)
        reports.append(DatasetReport(dataset, table, num_steps, epochs, of_run, is_size_known))
    return DataReport(reports)


class CutCaptions(NamedTuple):
    """How many captions of a sample of the data are longer than a text encoder reads."""

    encoder: str
    limit: int
    """Tokens that the encoder reads."""
    num_read: int
    """Captions looked at."""
    num_cut: int
    """Of these, truncated."""
    longest: int
    """Tokens of the longest caption."""

    def sentence(self) -> str:
        """For a terminal."""
        have, are = ("has", "is") if self.num_cut == 1 else ("have", "are")
        return (
            f"{self.encoder}: {self.num_cut:,} of {counted(self.num_read, 'caption')} looked at "
            f"({self.num_cut / max(1, self.num_read):.1%}) {have} more than its {self.limit} tokens and {are} cut off; "
            f"the longest has {self.longest:,}"
        )

    def is_much(self) -> bool:
        """Whether a warning is due."""
        return self.num_cut >= _MANY_CUT * max(1, self.num_read)


def cut_captions(
    datasets: Sequence[OpenDataset],
    tokenizers: Mapping[str, Tokenizer],
    seed: int,
    *,
    most: int = 1_000,
    limit_s: float = 10.0,
) -> list[CutCaptions]:
    """Counts the tokens of captions at equal distances in the data, as training would draw them.

    Args:
        datasets: opened data sets.
        tokenizers: text encoder → tokenizer.
        seed: of the run.
        most: captions to look at in all data sets together.
        limit_s: no further caption is read after this time [s].
    """
    end_s, lengths = time.monotonic() + limit_s, {name: list[int]() for name in tokenizers}
    for dataset in datasets if tokenizers else ():
        count = min(len(dataset.selected), max(1, most // len(datasets)))
        for number, place in enumerate(np.arange(count) * len(dataset.selected) // count):
            if time.monotonic() > end_s:
                break
            try:
                rng = partial(generator, seed, position=number)
                caption = dataset.captioner(int(dataset.selected[place]), rng)
            except BadSample:
                continue
            for name, tokenizer in tokenizers.items():
                _, mask, num_cut = tokenizer.encode_counted(caption)
                lengths[name].append(int(mask.sum()) + num_cut)
    limits = {name: tokenizer.length for name, tokenizer in tokenizers.items()}
    return [
        CutCaptions(name, limits[name], len(found), sum(length > limits[name] for length in found), max(found))
        for name, found in lengths.items()
        if found
    ]
