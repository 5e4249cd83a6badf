"""What the data is, in a few lines: for the dry run and the start of a run.

The data report as one HTML page with plots, self-contained: no script, no network.

Everything that comes from the data (keys, file names, reasons, fields) is escaped.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape

import numpy as np
from numpy.typing import NDArray

from sd_training.config.plan import BatchPlan, counted
from sd_training.data.index.selection import filter_lines
from sd_training.data.opened import OpenDataset
from sd_training.data.order.buckets import NO_BUCKET, BucketTable, histogram
from sd_training.data.order.draws import generator
from sd_training.data.order.order import RunOrder
from sd_training.data.problems import BadSample
from sd_training.data.samples.captions import Tokenizer
from sd_training.data.sources.choose import UNITS
from sd_training.data.storage.locations import shown

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
    num_shards: int
    num_samples: int
    """Samples with an image, in all units."""
    num_usable: int
    """Of these, with caption or known class."""
    num_selected: int
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
        return f"{counted(self.num_samples, 'sample')} in {counted(self.num_shards, self.unit)}"

    def warnings(self) -> list[str]:
        """What is allowed but probably not meant."""
        found, share = [], self.num_enlarged / self.num_selected
        if share >= _MANY_ENLARGED:
            found.append(
                f"dataset.params.resolution: {share:.0%} of the images are smaller than the size they are trained at; "
                f"they are enlarged {self.enlargement[0]:.1f} times (median), at most {self.enlargement[1]:.1f} times, "
                "and blurred by it. Lower the resolution, leave them out (dataset.params.filters.width='>=…'), or use "
                "dataset.params.buckets.mode=ladder with upscale=false"
            )
        if self.epochs is not None and self.epochs > _MANY_EPOCHS and self.num_selected < _SMALL_SET:
            found.append(
                f"experiment.num_examples_to_see: {counted(self.num_selected, 'sample')} {self.epochs:,.0f} times "
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
        if self.filter_lines or self.num_selected < self.num_usable:
            lines.append(f"  left: {counted(self.num_selected, 'sample')}")
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
                f"({self.num_enlarged / self.num_selected:.1%}), {median:.2f} times (median), at most {largest:.2f}"
            )
        if self.epochs is not None and self.num_steps is not None:
            samples, steps = counted(self.num_selected, "sample"), counted(self.num_steps, "step")
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
    def num_selected(self) -> int:
        """Samples that take part."""
        return sum(dataset.num_selected for dataset in self.datasets)

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
        location=shown(index.shards[0].location),
        unit=UNITS[dataset.kind],
        num_shards=len(index.shards),
        num_samples=len(index),
        num_usable=selection.num_usable,
        num_selected=len(dataset.selected),
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
        epochs=num_seen / len(dataset.selected) if of_run else None,
    )


def _enlarged(dataset: OpenDataset, table: BucketTable) -> tuple[int, tuple[float, float]]:
    """How many survivors are smaller than their bucket, and by which factor (median, largest): an image is resized to
    cover its bucket. Images of unknown size are left out."""
    target = np.array(table.sizes, dtype=np.float64)[dataset.bucket_of]
    heights = dataset.index.numbers("height")[dataset.selected]
    widths = dataset.index.numbers("width")[dataset.selected]
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
    lengths = dataset.index.numbers("caption_length")[dataset.selected]
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
        count = min(len(dataset.selected), max(1, most // len(datasets)))
        for number, place in enumerate(np.arange(count) * len(dataset.selected) // count):
            if time.monotonic() > end_s:
                break
            try:
                caption = dataset.captioner(int(dataset.selected[place]), partial(_chance, seed, number))
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


_BAR_PX, _ROW_PX, _LABEL_PX = 360, 20, 300
_BINS = 24
_EXAMPLES = 20
_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:2px 10px;text-align:left;vertical-align:top}"
    "svg text{font:12px system-ui,sans-serif}h2{margin-top:2em;border-top:1px solid #ccc;padding-top:1em}"
)

Bars = Sequence[tuple[str, int]]


def report_page(datasets: Sequence[OpenDataset], report: DataReport, plan: BatchPlan | None) -> str:
    """The page of a run's data.

    Args:
        datasets: opened data sets.
        report: of the same data sets, in the same order.
        plan: batch arithmetic of the run; None without one.
    """
    parts = ["<h1>Data report</h1>", *([f"<p>{escape(plan.sentence())}</p>"] if plan is not None else [])]
    for number, (dataset, summary) in enumerate(zip(datasets, report.datasets, strict=True), start=1):
        parts += [f"<h2>{number}. {escape(summary.location)}</h2>", *_sections(dataset, summary)]
    head = f"<head><meta charset='utf-8'><title>Data report</title><style>{_STYLE}</style></head>"
    return f"<!doctype html><html lang='en'>{head}<body>{''.join(parts)}</body></html>\n"


def _sections(dataset: OpenDataset, summary: DatasetReport) -> list[str]:
    text = escape("\n".join(summary.lines()))
    parts = [f"<pre>{text}</pre>", "<h3>Samples left</h3>", _bars(_survivors(dataset, summary))]
    if summary.buckets:
        named = [(f"{height} × {width}", count) for (height, width), count in summary.buckets]
        parts += ["<h3>Buckets (height × width)</h3>", _bars(named)]
    parts += _image_plots(dataset)
    lengths = dataset.index.numbers("caption_length")[dataset.selected]
    if (lengths >= 0).any():
        parts += ["<h3>Caption length [bytes]</h3>", _bars(_histogram(lengths[lengths >= 0].astype(np.float64)))]
    return [*parts, *_problems(dataset)]


def _survivors(dataset: OpenDataset, summary: DatasetReport) -> list[tuple[str, int]]:
    rules = [(f"filter {rule}, alone", count) for rule, count in dataset.selection.rules]
    every = [("with an image", summary.num_samples), ("with all members", summary.num_usable)]
    return [*every, *rules, ("left", summary.num_selected)]


def _image_plots(dataset: OpenDataset) -> list[str]:
    widths = dataset.index.numbers("width")[dataset.selected].astype(np.float64)
    heights = dataset.index.numbers("height")[dataset.selected].astype(np.float64)
    known = (widths > 0) & (heights > 0)
    if not known.any():
        return []
    aspects, megapixels = widths[known] / heights[known], widths[known] * heights[known] / 1e6
    return [
        "<h3>Aspect ratio (width / height)</h3>",
        _bars(_histogram(aspects)),
        "<h3>Image size [megapixels]</h3>",
        _bars(_histogram(megapixels)),
    ]


def _histogram(values: NDArray[np.float64]) -> list[tuple[str, int]]:
    """Bins between the 0.5th and 99.5th percentile; the first and last take what lies beyond."""
    low, high = np.percentile(values, (0.5, 99.5))
    if low == high:
        return [(f"{low:.4g}", len(values))]
    counts, edges = np.histogram(values.clip(low, high), _BINS, (low, high))
    return [(f"{a:.4g} to {b:.4g}", int(n)) for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True)]


def _bars(bars: Bars) -> str:
    """A horizontal bar chart."""
    most = max((count for _, count in bars), default=0) or 1
    rows = []
    for number, (label, count) in enumerate(bars):
        y, length = number * _ROW_PX, count / most * _BAR_PX
        shown = label if len(label) <= 46 else f"{label[:45]}…"
        rows.append(
            f"<text x='{_LABEL_PX - 8}' y='{y + 14}' text-anchor='end'>{escape(shown)}</text>"
            f"<rect x='{_LABEL_PX}' y='{y + 3}' width='{length:.1f}' height='{_ROW_PX - 6}' fill='#4a78b5'/>"
            f"<text x='{_LABEL_PX + length + 6:.1f}' y='{y + 14}'>{count:,}</text>"
        )
    size = f"width='{_LABEL_PX + _BAR_PX + 120}' height='{max(1, len(bars)) * _ROW_PX}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size}>{''.join(rows)}</svg>"


def _problems(dataset: OpenDataset) -> list[str]:
    problems = dataset.selection.problems
    if not problems.total():
        return []
    named = list(problems.named())[:_EXAMPLES]
    rows = "".join(
        f"<tr><td>{escape(p.shard)}</td><td>{escape(p.key)}</td><td>{escape(p.reason)}</td></tr>" for p in named
    )
    head = "<tr><th>where</th><th>key</th><th>what is wrong</th></tr>"
    return [
        f"<h3>Problems ({problems.total():,})</h3>",
        _bars(list(problems.counts.items())),
        f"<table>{head}{rows}</table>",
    ]
