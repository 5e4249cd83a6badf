"""The data report as one HTML page with plots, self-contained: no script, no network.

Everything that comes from the data (keys, file names, reasons, fields) is escaped.
"""

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from sd_training.config.batch_plan import BatchPlan
from sd_training.data.opened import OpenDataset
from sd_training.data.report import DataReport, DatasetReport

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
    lengths = dataset.index.numbers("caption_length")[dataset.survivors]
    if (lengths >= 0).any():
        parts += ["<h3>Caption length [bytes]</h3>", _bars(_histogram(lengths[lengths >= 0].astype(np.float64)))]
    return [*parts, *_problems(dataset)]


def _survivors(dataset: OpenDataset, summary: DatasetReport) -> list[tuple[str, int]]:
    rules = [(f"filter {rule}, alone", count) for rule, count in dataset.selection.rules]
    every = [("with an image", summary.num_samples), ("with all members", summary.num_usable)]
    return [*every, *rules, ("left", summary.num_survivors)]


def _image_plots(dataset: OpenDataset) -> list[str]:
    widths = dataset.index.numbers("width")[dataset.survivors].astype(np.float64)
    heights = dataset.index.numbers("height")[dataset.survivors].astype(np.float64)
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
