"""What the data is, in a few lines: for the dry run and the start of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sd_training.data.buckets import NO_BUCKET, BucketTable, histogram
from sd_training.data.locations import shown
from sd_training.data.opened import OpenDataset
from sd_training.data.run_order import RunOrder
from sd_training.data.selection import filter_lines

_PERCENTILES = (5, 50, 95, 100)


@dataclass(frozen=True)
class DatasetReport:
    """One data set."""

    location: str
    """Of its first unit."""
    num_shards: int
    num_samples: int
    """Samples with an image, in all shards."""
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
    num_steps: int
    """Optimizer steps that draw from it."""
    epochs: float
    """How often the run sees each sample."""

    def lines(self) -> list[str]:
        """For a terminal."""
        lines = [
            f"data: {self.num_samples:,} samples in {self.num_shards:,} shards; {self.num_usable:,} have all members"
        ]
        lines += [f"  filter {line}" for line in self.filter_lines]
        if self.num_without_bucket:
            why = (
                "too small, or of unknown size" if not self.merge_lines else "too small, of unknown size, or see below"
            )
            lines.append(f"  without a bucket ({why}): {self.num_without_bucket:,} samples")
        if self.num_over_limit:
            lines.append(f"  left out by dataset.params.tags.limit_images: {self.num_over_limit:,} samples")
        if self.filter_lines or self.num_survivors < self.num_usable:
            lines.append(f"  left: {self.num_survivors:,} samples")
        if self.buckets:
            shown = ", ".join(f"{h}×{w} {count:,}" for (h, w), count in self.buckets)
            lines.append(f"  buckets (height×width samples): {shown}")
        lines += [f"  {line}" for line in self.merge_lines]
        if self.caption_lengths:
            shown = ", ".join(f"{percentile} % {length:,}" for percentile, length in self.caption_lengths)
            lines.append(f"  caption lengths in bytes: up to {shown}")
        if self.problem_text:
            lines.append(f"  problems: {self.problem_text}")
        lines.append(
            f"  the run sees {self.num_survivors:,} samples {self.epochs:,.2f} times each, in {self.num_steps:,} steps"
        )
        return lines


@dataclass(frozen=True)
class DataReport:
    """All data sets of a run."""

    datasets: list[DatasetReport]

    @property
    def num_samples(self) -> int:
        """Samples with an image, in all shards of all data sets."""
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


def make_report(datasets: Sequence[OpenDataset], order: RunOrder, table: BucketTable) -> DataReport:
    """Sums the data sets up."""
    steps = order.mixture.counts(len(datasets))
    triples = zip(datasets, steps, order.orders, strict=True)
    return DataReport(
        [_of_dataset(d, num_steps, own.samples_before(num_steps), table) for d, num_steps, own in triples]
    )


def _of_dataset(dataset: OpenDataset, num_steps: int, num_seen: int, table: BucketTable) -> DatasetReport:
    selection, index = dataset.selection, dataset.index
    return DatasetReport(
        location=shown(index.units[0].location),
        num_shards=len(index.units),
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
        num_steps=num_steps,
        epochs=num_seen / len(dataset.survivors),
    )


def _merge_line(table: BucketTable, merge: tuple[int, int, int]) -> str:
    source, target, count = merge
    height, width = table.sizes[source]
    fate = "they are left out, because only larger buckets are in use and nothing is to be enlarged"
    if target != NO_BUCKET:
        fate = "they join {}×{}".format(*table.sizes[target])
    return f"bucket {height}×{width} has {count:,} samples, fewer than one optimizer step takes; {fate}"


def _caption_lengths(dataset: OpenDataset) -> list[tuple[int, int]]:
    lengths = dataset.index.numbers("caption_length")[dataset.survivors]
    lengths = lengths[lengths >= 0]
    if not len(lengths):
        return []
    return [(p, int(value)) for p, value in zip(_PERCENTILES, np.percentile(lengths, _PERCENTILES), strict=True)]
