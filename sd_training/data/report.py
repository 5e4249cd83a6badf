"""What the data is, in a few lines: for the dry run and the start of a run."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from sd_training.config.batch_plan import counted
from sd_training.data.buckets import NO_BUCKET, BucketTable, histogram
from sd_training.data.captions import Tokenizer
from sd_training.data.draws import generator
from sd_training.data.locations import shown
from sd_training.data.opened import OpenDataset
from sd_training.data.problems import BadSample
from sd_training.data.run_order import RunOrder
from sd_training.data.selection import filter_lines
from sd_training.data.sources import UNITS

_PERCENTILES = (5, 50, 95, 100)
_MANY_ENLARGED, _MANY_EPOCHS, _SMALL_SET = 0.05, 100, 100_000
"""From which share of enlarged images, and from how many repeats of how few samples on, a warning is due."""
_MANY_CUT = 0.01
"""As above, of captions that are cut off."""


@dataclass(frozen=True)
class DatasetReport:
    """One data set."""

    location: str
    """Of its first unit."""
    unit: str
    """What a unit is called: shard, file, table or folder."""
    num_units: int
    num_samples: int
    """Samples with an image, in all units."""
    num_usable: int
    """Of these, with caption or known class."""
    num_survivors: int
    """Of these, passing all filters, with a bucket."""
    num_without_bucket: int
    """Passing all filters, but too small for any bucket, of unknown size, or in a bucket that is left out."""
    num_over_limit: int
    """Passing all filters, but more than `tags.limit_images`."""
    filter_lines: list[str]
    """Survivors of each filter alone."""
    buckets: list[tuple[tuple[int, int], int]]
    """(height, width) [pixels] and samples of each bucket in use; empty without buckets."""
    merge_lines: list[str]
    """Buckets that had fewer samples than one optimizer step takes."""
    caption_lengths: list[tuple[int, int]]
    """Percentile and caption length [bytes]; empty where captions have none."""
    problem_counts: dict[str, int]
    problem_text: str
    num_enlarged: int
    """Of the survivors: smaller than the size that they are trained at."""
    enlargement: tuple[float, float]
    """Median and largest factor by which these are enlarged; 1 without any."""
    num_steps: int | None
    """Optimizer steps that draw from it; None without a run."""
    epochs: float | None
    """How often the run sees each sample; None without a run."""

    @property
    def place(self) -> str:
        """How many samples are where."""
        return f"{counted(self.num_samples, 'sample')} in {counted(self.num_units, self.unit)}"

    def warnings(self) -> list[str]:
        """What is allowed but probably not meant."""
        found, share = [], self.num_enlarged / self.num_survivors
        if share >= _MANY_ENLARGED:
            found.append(
                f"dataset.params.resolution: {share:.0%} of the images are smaller than the size they are trained at; "
                f"they are enlarged {self.enlargement[0]:.1f} times (median), at most {self.enlargement[1]:.1f} times, "
                "and blurred by it. Lower the resolution, leave them out (dataset.params.filters.width='>=…'), or use "
                "dataset.params.buckets.mode=ladder with upscale=false"
            )
        if self.epochs is not None and self.epochs > _MANY_EPOCHS and self.num_survivors < _SMALL_SET:
            found.append(
                f"experiment.num_examples_to_see: {counted(self.num_survivors, 'sample')} {self.epochs:,.0f} times "
                "each; so many repeats of a small set are learnt by heart. Give more data or a shorter run"
            )
        return found

    def lines(self) -> list[str]:
        """For a terminal."""
        lines = [f"data: {self.place}; {self.num_usable:,} have all members"]
        lines += [f"  filter {line}" for line in self.filter_lines]
        if self.num_without_bucket:
            why = (
                "too small, or of unknown size" if not self.merge_lines else "too small, of unknown size, or see below"
            )
            lines.append(f"  without a bucket ({why}): {counted(self.num_without_bucket, 'sample')}")
        if self.num_over_limit:
            lines.append(f"  left out by dataset.params.tags.limit_images: {counted(self.num_over_limit, 'sample')}")
        if self.filter_lines or self.num_survivors < self.num_usable:
            lines.append(f"  left: {counted(self.num_survivors, 'sample')}")
        if self.buckets:
            shown = ", ".join(f"{h}×{w} {count:,}" for (h, w), count in self.buckets)
            lines.append(f"  buckets (height×width samples): {shown}")
        lines += [f"  {line}" for line in self.merge_lines]
        if self.caption_lengths:
            shown = ", ".join(f"{percentile} % {length:,}" for percentile, length in self.caption_lengths)
            lines.append(f"  caption lengths in bytes: up to {shown}")
        if self.problem_text:
            lines.append(f"  problems: {self.problem_text}")
        if self.num_enlarged:
            median, largest = self.enlargement
            lines.append(
                f"  enlarged to the size they are trained at: {counted(self.num_enlarged, 'image')} "
                f"({self.num_enlarged / self.num_survivors:.1%}), {median:.2f} times (median), at most {largest:.2f}"
            )
        if self.epochs is not None and self.num_steps is not None:
            samples, steps = counted(self.num_survivors, "sample"), counted(self.num_steps, "step")
            lines.append(f"  the run sees {samples} {self.epochs:,.2f} times each, in {steps}")
        return lines


@dataclass(frozen=True)
class DataReport:
    """All data sets of a run."""

    datasets: list[DatasetReport]

    @property
    def num_samples(self) -> int:
        """Samples with an image, in all data sets."""
        return sum(dataset.num_samples for dataset in self.datasets)

    @property
    def num_survivors(self) -> int:
        """Samples that take part."""
        return sum(dataset.num_survivors for dataset in self.datasets)

    @property
    def problem_counts(self) -> dict[str, int]:
        """Problems by reason."""
        reasons = sorted({reason for dataset in self.datasets for reason in dataset.problem_counts})
        return {reason: sum(d.problem_counts.get(reason, 0) for d in self.datasets) for reason in reasons}

    def text(self) -> str:
        """Several lines for a terminal."""
        lines = []
        for number, dataset in enumerate(self.datasets):
            if len(self.datasets) > 1:
                lines.append(f"data set {number + 1} of {len(self.datasets)}: {dataset.location}")
            lines += dataset.lines()
        return "\n".join(lines)


def make_report(datasets: Sequence[OpenDataset], order: RunOrder, table: BucketTable, *, of_run: bool) -> DataReport:
    """Sums the data sets up.

    Args:
        of_run: whether to say what the run draws from them.
    """
    steps = order.mixture.counts(len(datasets))
    triples = zip(datasets, steps, order.orders, strict=True)
    return DataReport(
        [_of_dataset(d, num_steps, own.samples_before(num_steps), table, of_run) for d, num_steps, own in triples]
    )


def _of_dataset(dataset: OpenDataset, num_steps: int, num_seen: int, table: BucketTable, of_run: bool) -> DatasetReport:
    selection, index = dataset.selection, dataset.index
    num_enlarged, enlargement = _enlarged(dataset, table)
    return DatasetReport(
        location=shown(index.units[0].location),
        unit=UNITS[dataset.kind],
        num_units=len(index.units),
        num_samples=len(index),
        num_usable=selection.num_usable,
        num_survivors=len(dataset.survivors),
        num_without_bucket=dataset.num_without_bucket,
        num_over_limit=dataset.num_over_limit,
        filter_lines=filter_lines(index, selection),
        buckets=histogram(dataset.bucket_of, table) if len(table.sizes) > 1 else [],
        merge_lines=[_merge_line(table, merge) for merge in dataset.merges],
        caption_lengths=_caption_lengths(dataset),
        problem_counts=dict(selection.problems.counts),
        problem_text=selection.problems.text(),
        num_enlarged=num_enlarged,
        enlargement=enlargement,
        num_steps=num_steps if of_run else None,
        epochs=num_seen / len(dataset.survivors) if of_run else None,
    )


def _enlarged(dataset: OpenDataset, table: BucketTable) -> tuple[int, tuple[float, float]]:
    """How many survivors are smaller than their bucket, and by which factor (median, largest): an image is resized to
    cover its bucket. Images of unknown size are left out."""
    target = np.array(table.sizes, dtype=np.float64)[dataset.bucket_of]
    heights = dataset.index.numbers("height")[dataset.survivors]
    widths = dataset.index.numbers("width")[dataset.survivors]
    known = (heights > 0) & (widths > 0)
    factors = np.maximum(target[known, 0] / heights[known], target[known, 1] / widths[known])
    factors = factors[factors > 1]
    return len(factors), (float(np.median(factors)), float(factors.max())) if len(factors) else (1.0, 1.0)


def _merge_line(table: BucketTable, merge: tuple[int, int, int]) -> str:
    source, target, count = merge
    height, width = table.sizes[source]
    fate = "they are left out, because only larger buckets are in use and nothing is to be enlarged"
    if target != NO_BUCKET:
        fate = "they join {}×{}".format(*table.sizes[target])
    return f"bucket {height}×{width} has {counted(count, 'sample')}, fewer than one optimizer step takes; {fate}"


def _caption_lengths(dataset: OpenDataset) -> list[tuple[int, int]]:
    lengths = dataset.index.numbers("caption_length")[dataset.survivors]
    lengths = lengths[lengths >= 0]
    if not len(lengths):
        return []
    return [(p, int(value)) for p, value in zip(_PERCENTILES, np.percentile(lengths, _PERCENTILES), strict=True)]


@dataclass(frozen=True)
class CutCaptions:
    """How many captions of a sample of the data are longer than a text encoder reads."""

    encoder: str
    limit: int
    """Tokens that the encoder reads."""
    num_read: int
    """Captions looked at."""
    num_cut: int
    """Of these, cut off."""
    longest: int
    """Tokens of the longest caption."""

    def sentence(self) -> str:
        """For a terminal."""
        share = self.num_cut / max(1, self.num_read)
        return (
            f"{self.encoder}: {self.num_cut:,} of {counted(self.num_read, 'caption')} looked at ({share:.1%}) "
            f"{'has' if self.num_cut == 1 else 'have'} more than its {self.limit} tokens and "
            f"{'is' if self.num_cut == 1 else 'are'} cut off; the longest has {self.longest:,}"
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
        count = min(len(dataset.survivors), max(1, most // len(datasets)))
        for number, place in enumerate(np.arange(count) * len(dataset.survivors) // count):
            if time.monotonic() > end_s:
                break
            try:
                caption = dataset.captioner(int(dataset.survivors[place]), partial(_chance, seed, number))
            except BadSample:
                continue
            for name, tokenizer in tokenizers.items():
                _, mask, num_cut = tokenizer.encode_counted(caption)
                lengths[name].append(int(mask.sum()) + num_cut)
    return [
        CutCaptions(name, limit, len(found), sum(length > limit for length in found), max(found))
        for name, found in lengths.items()
        if found
        for limit in [tokenizers[name].length]
    ]


def _chance(seed: int, position: int, purpose: str) -> np.random.Generator:
    return generator(seed, purpose, position)
