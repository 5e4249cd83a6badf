"""What the data of a run is: a few lines for the dry run and the start of a run, and one HTML page with plots.

The page is self-contained: no script, no network. Everything that comes from the data (keys, file names, reasons,
fields) is escaped.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sd_training.config.plan import BatchPlan, counted
from sd_training.data.dataset import OpenDataset
from sd_training.data.index.selection import filter_lines
from sd_training.data.order.buckets import NO_BUCKET, BucketTable, Merge, histogram
from sd_training.data.order.order import RunOrder
from sd_training.data.problems import BadSample
from sd_training.data.samples.captions import Tokenizer
from sd_training.data.samples.sample import generators
from sd_training.data.sources.choose import SHARD_NOUNS
from sd_training.data.storage.locations import shown

_PERCENTILES = (5, 50, 95, 100)
_MANY_ENLARGED, _MANY_EPOCHS, _SMALL_SET = 0.05, 100, 100_000
"""From which share of enlarged images, and from how many repeats of how few samples on, a warning is due."""
_MANY_CUT = 0.01
"""As above, of captions that are truncated."""
_BINS, _EXAMPLES = 24, 20
_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:2px 10px;text-align:left;vertical-align:top}"
    ".bar{background:#4a78b5;height:14px}h2{margin-top:2em;border-top:1px solid #ccc;padding-top:1em}"
)

Bars = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class DatasetReport:
    """One data set."""

    dataset: OpenDataset
    table: BucketTable
    num_steps: int | None
    """Optimizer steps that draw from it; None without a run."""
    epochs: float | None
    """How often the run sees each sample; None without a run."""
    is_size_known: bool = True
    """Whether `table` has the sizes of a run; otherwise enlarged images are not counted."""

    @property
    def location(self) -> str:
        """Of its first shard."""
        return shown(self.dataset.index.shards[0].location)

    @property
    def num_shards(self) -> int:
        """Files or folders."""
        return len(self.dataset.index.shards)

    @property
    def num_samples(self) -> int:
        """Samples with an image."""
        return len(self.dataset.index)

    @property
    def num_selected(self) -> int:
        """Of these, with caption or known class, passing all filters, with a bucket."""
        return len(self.dataset.selected)

    @property
    def problem_counts(self) -> dict[str, int]:
        """Problems by reason."""
        return dict(self.dataset.selection.problems.counts)

    @property
    def place(self) -> str:
        """How many samples are where."""
        return f"{counted(self.num_samples, 'sample')} in {counted(self.num_shards, SHARD_NOUNS[self.dataset.kind])}"

    @property
    def buckets(self) -> list[tuple[tuple[int, int], int]]:
        """(height, width) [pixels] and samples of each bucket in use; empty without buckets."""
        return histogram(self.dataset.bucket_of, self.table) if len(self.table.sizes) > 1 else []

    @cached_property
    def _enlargement(self) -> NDArray[np.float64]:
        """Factors, above 1, by which images are enlarged to cover their bucket; those of unknown size are left out."""
        target = np.array(self.table.sizes, dtype=np.float64)[self.dataset.bucket_of]
        widths, heights = known_sizes(self.dataset)
        is_known = (widths > 0) & self.is_size_known
        factors = np.maximum(target[is_known, 0] / heights[is_known], target[is_known, 1] / widths[is_known])
        return factors[factors > 1]

    def warnings(self) -> list[str]:
        """What is allowed but probably not intended."""
        found, factors = [], self._enlargement
        if (share := len(factors) / self.num_selected) >= _MANY_ENLARGED:
            found.append(
                f"dataset.params.resolution: {share:.0%} of the images are smaller than the size they are trained at; "
                f"they are enlarged {np.median(factors):.1f} times (median), at most {factors.max():.1f} times, "
                "and blurred by it. Lower the resolution, leave them out (dataset.params.filters.width='>=…'), or use "
                "dataset.params.buckets.mode=ladder with upscale=false"
            )
        if self.epochs is not None and self.epochs > _MANY_EPOCHS and self.num_selected < _SMALL_SET:
            found.append(
                f"experiment.num_examples_to_see: {counted(self.num_selected, 'sample')} {self.epochs:,.0f} times "
                "each; a model memorises a small set that is repeated so often. Give more data or a shorter run"
            )
        return found

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        dataset, selection, factors = self.dataset, self.dataset.selection, self._enlargement
        filters = filter_lines(dataset.index, selection)
        yield f"data: {self.place}; {selection.num_usable:,} have all members"
        yield from (f"  filter {line}" for line in filters)
        if dataset.num_without_bucket:
            why = "too small, of unknown size, or see below" if dataset.merges else "too small, or of unknown size"
            yield f"  without a bucket ({why}): {counted(dataset.num_without_bucket, 'sample')}"
        if dataset.num_over_limit:
            yield f"  left out by dataset.params.tags.limit_images: {counted(dataset.num_over_limit, 'sample')}"
        if filters or self.num_selected < selection.num_usable:
            yield f"  left: {counted(self.num_selected, 'sample')}"
        if self.buckets:
            sizes = ", ".join(f"{h}×{w} {count:,}" for (h, w), count in self.buckets)
            yield f"  buckets (height×width samples): {sizes}"
        yield from (f"  {_merge_line(self.table, merge)}" for merge in dataset.merges)
        if len(lengths := caption_lengths(dataset)):
            values = zip(_PERCENTILES, np.percentile(lengths, _PERCENTILES), strict=True)
            yield f"  caption lengths in bytes: up to {', '.join(f'{p} % {int(value):,}' for p, value in values)}"
        if problems := selection.problems.text():
            yield f"  problems: {problems}"
        if len(factors):
            yield (
                f"  enlarged to the size they are trained at: {counted(len(factors), 'image')} "
                f"({len(factors) / self.num_selected:.1%}), {np.median(factors):.2f} times (median), at most "
                f"{factors.max():.2f}"
            )
        if self.epochs is not None and self.num_steps is not None:
            samples, steps = counted(self.num_selected, "sample"), counted(self.num_steps, "step")
            yield f"  the run sees {samples} {self.epochs:,.2f} times each, in {steps}"


@dataclass(frozen=True)
class DataReport:
    """All data sets of a run."""

    datasets: list[DatasetReport]

    @property
    def num_samples(self) -> int:
        """Samples with an image, in all data sets."""
        return sum(dataset.num_samples for dataset in self.datasets)

    @property
    def num_selected(self) -> int:
        """Samples that are trained on."""
        return sum(dataset.num_selected for dataset in self.datasets)

    @property
    def problem_counts(self) -> dict[str, int]:
        """Problems by reason."""
        reasons = sorted({reason for dataset in self.datasets for reason in dataset.problem_counts})
        return {reason: sum(d.problem_counts.get(reason, 0) for d in self.datasets) for reason in reasons}

    def text(self) -> str:
        """Several lines for a terminal."""
        lines = []
        for number, dataset in enumerate(self.datasets, start=1):
            if len(self.datasets) > 1:
                lines.append(f"data set {number} of {len(self.datasets)}: {dataset.location}")
            lines += dataset.lines()
        return "\n".join(lines)


def make_report(datasets: Sequence[OpenDataset], order: RunOrder, table: BucketTable, *, of_run: bool) -> DataReport:
    """Summarises the data sets.

    Args:
        of_run: whether to report what the run draws from them.
    """
    reports = []
    for number, (dataset, own) in enumerate(zip(datasets, order.orders, strict=True)):
        num_steps = order.mixture.steps_before(order.mixture.num_steps, number)
        epochs = own.samples_before(num_steps) / len(dataset.selected)
        reports.append(DatasetReport(dataset, table, num_steps if of_run else None, epochs if of_run else None))
    return DataReport(reports)


def known_sizes(dataset: OpenDataset) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[n] widths and heights of the selected images [pixels]; both are 0 where one is unknown."""
    sides = [dataset.index.numbers(side)[dataset.selected].astype(np.float64) for side in ("width", "height")]
    is_known = (sides[0] > 0) & (sides[1] > 0)
    return sides[0] * is_known, sides[1] * is_known


def caption_lengths(dataset: OpenDataset) -> NDArray[np.float64]:
    """Of the selected samples that have a caption [bytes]."""
    lengths = dataset.index.numbers("caption_length")[dataset.selected].astype(np.float64)
    return lengths[lengths >= 0]


def _merge_line(table: BucketTable, merge: Merge) -> str:
    height, width = table.sizes[merge.source]
    fate = "they are left out, because only larger buckets are in use and nothing is to be enlarged"
    if merge.target != NO_BUCKET:
        fate = "they join {}×{}".format(*table.sizes[merge.target])
    samples = counted(merge.num_samples, "sample")
    return f"bucket {height}×{width} has {samples}, fewer than one optimizer step takes; {fate}"


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
                caption = dataset.captioner(int(dataset.selected[place]), partial(generators, seed, number))
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


def report_page(report: DataReport, plan: BatchPlan | None) -> str:
    """The HTML page of a run's data.

    Args:
        report: of all data sets.
        plan: batch arithmetic of the run; None without one.
    """
    parts = ["<h1>Data report</h1>", *([f"<p>{escape(plan.sentence())}</p>"] if plan is not None else [])]
    for number, dataset in enumerate(report.datasets, start=1):
        parts += [f"<h2>{number}. {escape(dataset.location)}</h2>", *_sections(dataset)]
    head = f"<head><meta charset='utf-8'><title>Data report</title><style>{_STYLE}</style></head>"
    return f"<!doctype html><html lang='en'>{head}<body>{''.join(parts)}</body></html>\n"


def _sections(report: DatasetReport) -> Iterator[str]:
    dataset, selection = report.dataset, report.dataset.selection
    text = "\n".join(report.lines())
    yield f"<pre>{escape(text)}</pre>"
    filters = [(f"filter {rule}, alone", count) for rule, count in selection.rules]
    steps = [("with an image", report.num_samples), ("with all members", selection.num_usable), *filters]
    yield "<h3>Samples left</h3>" + _bars([*steps, ("left", report.num_selected)])
    if report.buckets:
        bars = [(f"{height} × {width}", count) for (height, width), count in report.buckets]
        yield "<h3>Buckets (height × width)</h3>" + _bars(bars)
    widths, heights = known_sizes(dataset)
    widths, heights = widths[widths > 0], heights[widths > 0]
    if len(widths):
        yield "<h3>Aspect ratio (width / height)</h3>" + _bars(_histogram(widths / heights))
        yield "<h3>Image size [megapixels]</h3>" + _bars(_histogram(widths * heights / 1e6))
    if len(lengths := caption_lengths(dataset)):
        yield "<h3>Caption length [bytes]</h3>" + _bars(_histogram(lengths))
    if selection.problems.total():
        named = list(selection.problems.named())[:_EXAMPLES]
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in p[:3])}</tr>" for p in named)
        yield f"<h3>Problems ({selection.problems.total():,})</h3>" + _bars(list(selection.problems.counts.items()))
        yield f"<table><tr><th>where</th><th>key</th><th>what is wrong</th></tr>{rows}</table>"


def _histogram(values: NDArray[np.float64]) -> Bars:
    """Bins between the 0.5th and 99.5th percentile; the first and last take what lies beyond."""
    low, high = np.percentile(values, (0.5, 99.5))
    if low == high:
        return [(f"{low:.4g}", len(values))]
    counts, edges = np.histogram(values.clip(low, high), _BINS, (low, high))
    return [(f"{a:.4g} to {b:.4g}", int(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)]


def _bars(bars: Bars) -> str:
    """A horizontal bar chart."""
    most = max((count for _, count in bars), default=0) or 1
    rows = (
        f"<tr><td>{escape(label)}</td><td><div class='bar' style='width:{count / most * 360:.1f}px'></div></td>"
        f"<td>{count:,}</td></tr>"
        for label, count in bars
    )
    return f"<table>{''.join(rows)}</table>"
