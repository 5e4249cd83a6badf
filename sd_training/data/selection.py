"""Which samples of the index take part: the declared members are there, the class is known, the filters hold."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from sd_training.config.batch_plan import counted
from sd_training.config.filters import Filter
from sd_training.data.caption_choice import CAPTION, CaptionRules, template_fields, uses_caption
from sd_training.data.captions import Prompts, class_name
from sd_training.data.filters import BUILT_IN, Mask, evaluate
from sd_training.data.index import DatasetIndex
from sd_training.data.index_columns import NUMBER, TEXT
from sd_training.data.locations import shown
from sd_training.data.problems import EXAMPLES_KEPT, Problems, SkippedSample
from sd_training.errors import DataError

_EMPTY_CELL = "caption is empty"
"""As sources of tables name it."""
_NO_TEXT = r'^(\[\s*("\s*"\s*(,\s*"\s*"\s*)*)?\])?$'
"""Nothing, or a JSON list without texts: `captions_in` finds no caption there."""


@dataclass(frozen=True)
class Selection:
    """The survivors and how they were chosen."""

    survivors: NDArray[np.int64]
    """[n] indices into the data set's index, ascending."""
    num_usable: int
    """Samples that have all members, before filters."""
    rules: list[tuple[Filter, int]]
    """Filters, each with the usable samples that pass it alone."""
    problems: Problems
    """Of the shards and of the samples that lack something."""


def select(
    index: DatasetIndex,
    filters: list[Filter],
    prompts: Prompts | None,
    captions: CaptionRules,
    *,
    captions_needed: bool = True,
    max_pixels: int | None = None,
) -> Selection:
    """Chooses the samples.

    Args:
        prompts: class id → prompts for classification data; None for captioned data.
        captions: where captions come from; a sample with none of them, or without a field of the template, is left out.
        captions_needed: False where captions are never read: samples without one or without a class take part.
        max_pixels: larger images are left out; None: no limit.

    Raises:
        DataError: nothing is left; the message says what each filter alone and all together keep.
    """
    problems = Problems()
    problems.merge(index.problems)
    problems.forget(_EMPTY_CELL)  # whether the sample needs it, and misses it, is found below
    usable = _with_text(index, prompts, captions, problems) if captions_needed else np.ones(len(index), dtype=np.bool_)
    passed = [usable & evaluate(rule, index.columns, len(index)) for rule in filters]
    survivors = np.flatnonzero(np.logical_and.reduce([usable, *passed]))
    if max_pixels is not None:
        survivors = _small_enough(index, survivors, max_pixels, problems)
    rules = [(rule, int(mask.sum())) for rule, mask in zip(filters, passed, strict=True)]
    selection = Selection(survivors, int(usable.sum()), rules, problems)
    if not len(survivors):
        raise DataError(_nothing_left(index, selection))
    return selection


def _small_enough(
    index: DatasetIndex, samples: NDArray[np.int64], max_pixels: int, problems: Problems
) -> NDArray[np.int64]:
    """Without the images that reading would refuse: found there, they count as damage and may end the run."""
    widths, heights = index.numbers("width")[samples], index.numbers("height")[samples]
    is_large = widths.astype(np.int64) * heights > max_pixels

    def size_of(sample: int) -> str:
        width, height = index.numbers("width")[sample], index.numbers("height")[sample]
        return f"{width} × {height}, at most {max_pixels} are allowed"

    _name(index, samples[is_large], "image has too many pixels", problems, size_of)
    return samples[~is_large]


def _with_text(index: DatasetIndex, prompts: Prompts | None, captions: CaptionRules, problems: Problems) -> Mask:
    usable = _captioned(index, captions, problems) if prompts is None else _classified(index, prompts, problems)
    for field in sorted(template_fields(captions) - {CAPTION}):
        has_text = _has_text(index, field)
        _name(index, np.flatnonzero(usable & ~has_text), f"caption template has no text: {field}", problems)
        usable &= has_text
    return usable


def _captioned(index: DatasetIndex, captions: CaptionRules, problems: Problems) -> Mask:
    """As `choose_caption` decides at every visit."""
    usable: Mask = np.full(len(index), not uses_caption(captions))
    for field in captions.weights:
        # An own caption that is empty is one, unless there are others to draw.
        shortest = 0 if len(captions.weights) == 1 else 1
        usable |= index.numbers("caption_length") >= shortest if field == CAPTION else _has_text(index, field)
    _name(index, np.flatnonzero(~usable), "caption missing", problems)
    return usable


def _has_text(index: DatasetIndex, field: str) -> Mask:
    """Where a metadata field gives at least one text that is not empty; numbers are written as text."""
    names = index.columns.column_names
    usable: Mask = np.zeros(len(index), dtype=np.bool_)
    if NUMBER + field in names:
        usable |= np.asarray(pc.is_valid(index.columns[NUMBER + field]).to_numpy())
    if TEXT + field in names:
        trimmed = pc.utf8_trim_whitespace(index.columns[TEXT + field])
        is_empty = pc.match_substring_regex(trimmed, _NO_TEXT)  # null where the value is a number or missing
        usable |= np.asarray(pc.fill_null(pc.invert(is_empty), False).to_numpy())
    return usable


def _classified(index: DatasetIndex, prompts: Prompts, problems: Problems) -> Mask:
    """Looks each distinct class up once."""
    encoded = index.columns["cls"].combine_chunks().dictionary_encode()
    known = np.array([class_name(value) in prompts for value in encoded.dictionary.to_pylist()] + [False])
    codes = pc.fill_null(encoded.indices, len(known) - 1).to_numpy(zero_copy_only=False)
    usable: Mask = known[codes]
    has_class = pc.is_valid(encoded).to_numpy(zero_copy_only=False)
    _name(index, np.flatnonzero(~has_class), "class missing", problems)

    def class_of(sample: int) -> str:
        return f"class {index.text('cls', sample)!r}"

    _name(index, np.flatnonzero(has_class & ~usable), "class without a prompt", problems, class_of)
    return usable


def _name(
    index: DatasetIndex,
    samples: NDArray[np.int64],
    reason: str,
    problems: Problems,
    detail: Callable[[int], str] | None = None,
) -> None:
    for sample in samples[:EXAMPLES_KEPT].tolist():
        told = reason if detail is None else f"{reason}: {detail(sample)}"
        problems.add(SkippedSample(*index.name(sample), told))
    if len(samples) > EXAMPLES_KEPT:
        problems.add(SkippedSample("", "", reason), count=len(samples) - EXAMPLES_KEPT)


def filter_lines(index: DatasetIndex, selection: Selection) -> list[str]:
    """One line per filter with its survivors, and the fields that no sample has."""
    lines = [f"{rule}: {counted(count, 'sample')}" for rule, count in selection.rules]
    for field in sorted(set().union(*(rule.fields() for rule, _ in selection.rules)) - index.fields - BUILT_IN):
        fields = ", ".join(sorted(index.fields)[:20]) or "none"
        lines.append(f"no sample has the metadata field '{field}' (fields found: {fields})")
    return lines


def _nothing_left(index: DatasetIndex, selection: Selection) -> str:
    others = f" and {len(index.units) - 1:,} more" if len(index.units) > 1 else ""
    where = f"{shown(index.units[0].location)}{others}"
    lines = [f"dataset.params.path: no sample is left of the {len(index):,} in {where}"]
    if selection.rules:
        lines.append(f"{selection.num_usable:,} have all members; dataset.params.filters keep of these, each alone:")
        lines += [f"  {line}" for line in filter_lines(index, selection)]
        lines.append("  all together: 0 samples; loosen the filters")
    if selection.problems.total():
        lines.append(f"problems: {selection.problems.text()}")
    return "\n".join(lines)
