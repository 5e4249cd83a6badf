"""Which samples of the index are selected: those with a caption or known class that pass all filters.

Filters are evaluated over the columns of the index; no image is read. Logic has three values (Kleene 1938), as Arrow's
`and_kleene` and its siblings have: a comparison with a null, missing or NaN value is null, `not` leaves it null, and a
sample passes only where the whole filter is true.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sd_training.config.data_schema import CaptionConfig, class_name
from sd_training.config.filters import Filter, Value, long_integer
from sd_training.config.plan import counted
from sd_training.data.samples.captions import CAPTION, Prompts, caption_weights
from sd_training.data.sources.base import EXAMPLES_KEPT, NUMBER, TEXT, DatasetIndex, Problems, SkippedSample

Mask = NDArray[np.bool_]
BUILT_IN = frozenset({"width", "height", "aspect_ratio", "caption_length"})
"""Fields of the index itself, where no metadata field has the name: pixels, width / height, and bytes."""
_COMPARISONS = {">=": pc.greater_equal, "<=": pc.less_equal, ">": pc.greater, "<": pc.less}


def evaluate(condition: Filter, columns: pa.Table, num_samples: int) -> Mask:
    """[N] bool: which samples pass.

    Args:
        condition: the filter.
        columns: of the index: `number:<field>`, `text:<field>`, and `width`, `height`, `caption_length`; a field
            without columns is missing everywhere.
        num_samples: N, also when there are no columns.
    """
    return np.asarray(pc.fill_null(_passes(condition, columns, num_samples), False).to_numpy(zero_copy_only=False))


def _passes(node: Filter, columns: pa.Table, num_samples: int) -> Any:
    """True, false or null for every row."""
    if node.parts:
        parts = (_passes(part, columns, num_samples) for part in node.parts)
        if node.operator == "not":
            return pc.invert(next(parts))
        return reduce(pc.and_kleene if node.operator == "and" else pc.or_kleene, parts)
    number = _number(node.field, columns, num_samples)
    is_present, text = pc.is_valid(number), None
    if TEXT + node.field in columns.column_names:
        text = columns[TEXT + node.field].combine_chunks()
        is_present = pc.or_(is_present, pc.is_valid(text))
    if node.operator == "null":
        return pc.invert(is_present)
    if node.operator in _COMPARISONS:
        return _COMPARISONS[node.operator](number, node.values[0])
    numbers = [found for found in map(_as_number, node.values) if found is not None]
    found = pc.is_in(number, pa.array(numbers, pa.float64()))  # numbers written as text are equal to the number
    texts = [spelling for value in node.values if isinstance(value, str) for spelling in _spellings(value)]
    if text is not None and texts:
        found = pc.or_(found, pc.is_in(text, pa.array(texts, text.type)))
    return pc.if_else(is_present, pc.invert(found) if node.operator == "!=" else found, pa.scalar(None, pa.bool_()))


def _number(field: str, columns: pa.Table, num_samples: int) -> pa.Array:
    """The field's number; null where it has none."""
    names, least = set(columns.column_names), 0 if field == "caption_length" else 1
    null = pa.scalar(None, pa.float64())

    def known(column: str) -> pa.Array:
        """A column of the index; smaller numbers mean that the value is not known."""
        value = columns[column].combine_chunks().cast(pa.float64())
        return pc.if_else(pc.greater_equal(value, least), value, null)

    if NUMBER + field in names:
        value = columns[NUMBER + field].combine_chunks()
        return pc.if_else(pc.is_nan(value), null, value)
    if TEXT + field in names or field not in BUILT_IN or not BUILT_IN - {"aspect_ratio"} <= names:
        return pa.nulls(num_samples, pa.float64())
    return pc.divide(known("width"), known("height")) if field == "aspect_ratio" else known(field)


def _spellings(value: str) -> set[str]:
    """Tables have true and false in other cases too: pandas writes True."""
    is_truth = value.lower() in ("true", "false")
    return {value, value.lower(), value.upper(), value.title()} if is_truth else {value}


def _as_number(value: Value) -> float | None:
    """Parses a text as a number. None for a long integer, which is compared as text, and for `1_000` and digits of
    other scripts, which `float` accepts and the index does not."""
    if isinstance(value, str) and (not value.isascii() or "_" in value or long_integer(value)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


_NO_TEXT = r'^(\[\s*("\s*"\s*(,\s*"\s*"\s*)*)?\])?$'
"""Nothing, or a JSON list without texts: `captions_in` finds no caption there."""


@dataclass(frozen=True)
class Selection:
    """The selected samples and how they were chosen."""

    selected: NDArray[np.int64]
    """[n] indices into the data set's index, ascending."""
    num_usable: int
    """Samples that have all members, before filters."""
    rules: list[tuple[Filter, int]]
    """Filters, each with the usable samples that pass it alone."""
    problems: Problems
    """Of the shards and of the samples that lack something."""


def select(
    index: DatasetIndex, filters: list[Filter], prompts: Prompts | None, captions: CaptionConfig | None, max_pixels: int
) -> Selection:
    """Selects the samples.

    Args:
        prompts: class id → prompts for classification data; None for captioned data.
        captions: where captions come from; a sample with none of them is left out. None where captions are never read:
            samples without one or without a class are usable.
        max_pixels: larger images are left out, because reading would refuse them, count them as damage and perhaps end
            the run.
    """
    problems = Problems()
    problems.merge(index.problems)
    usable: Mask = np.ones(len(index), dtype=np.bool_)
    if captions is not None:
        usable = _captioned(index, captions, problems) if prompts is None else _classified(index, prompts, problems)
    passed = [usable & evaluate(rule, index.columns, len(index)) for rule in filters]
    selected = np.flatnonzero(np.logical_and.reduce([usable, *passed]))
    widths, heights = index.numbers("width"), index.numbers("height")
    is_large = widths[selected].astype(np.int64) * heights[selected] > max_pixels

    def too_large(sample: int) -> str:
        size = f"{widths[sample]} × {heights[sample]}"
        return f"image has too many pixels: {size}, at most {max_pixels} are allowed"

    _name(index, selected[is_large], too_large, problems)
    rules = [(rule, int(mask.sum())) for rule, mask in zip(filters, passed, strict=True)]
    return Selection(selected[~is_large], int(usable.sum()), rules, problems)


def _captioned(index: DatasetIndex, captions: CaptionConfig, problems: Problems) -> Mask:
    """Where `choose_caption` finds a caption."""
    weights = caption_weights(captions)
    usable: Mask = np.zeros(len(index), dtype=np.bool_)
    for field in weights:
        # An own caption that is empty is one, unless there are others to draw.
        shortest = 0 if len(weights) == 1 else 1
        usable |= index.numbers("caption_length") >= shortest if field == CAPTION else _has_text(index, field)
    _name(index, np.flatnonzero(~usable), lambda _: "caption missing", problems)
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
    """Where the class has a prompt; each distinct class is looked up once."""
    encoded = index.columns["cls"].combine_chunks().dictionary_encode()
    known = np.array([class_name(value) in prompts for value in encoded.dictionary.to_pylist()] + [False])
    codes = pc.fill_null(encoded.indices, len(known) - 1).to_numpy(zero_copy_only=False)
    usable: Mask = known[codes]
    has_class = pc.is_valid(encoded).to_numpy(zero_copy_only=False)
    _name(index, np.flatnonzero(~has_class), lambda _: "class missing", problems)

    def unknown(sample: int) -> str:
        return f"class without a prompt: class {index.text('cls', sample)!r}"

    _name(index, np.flatnonzero(has_class & ~usable), unknown, problems)
    return usable


def _name(index: DatasetIndex, samples: NDArray[np.int64], reason_of: Callable[[int], str], problems: Problems) -> None:
    """Counts all `samples` and names the first ones."""
    for sample in samples[:EXAMPLES_KEPT].tolist():
        problems.add(SkippedSample(*index.name(sample), reason_of(sample)))
    if len(samples) > EXAMPLES_KEPT:
        problems.add(SkippedSample("", "", reason_of(samples[-1])), count=len(samples) - EXAMPLES_KEPT)


def filter_lines(index: DatasetIndex, selection: Selection) -> list[str]:
    """One line per filter with the samples that pass it alone, and the fields that no sample has."""
    lines = [f"filter {rule}: {counted(count, 'sample')}" for rule, count in selection.rules]
    for field in sorted(set().union(*(rule.fields() for rule, _ in selection.rules)) - index.fields - BUILT_IN):
        fields = ", ".join(sorted(index.fields)[:20]) or "none"
        lines.append(f"no sample has the metadata field '{field}' (fields found: {fields})")
    return lines


def exclusion_lines(index: DatasetIndex, selection: Selection) -> list[str]:
    """The end of an error about too few samples: filters and problems."""
    keeps = "; of these each filter alone keeps:" if selection.rules else ""
    lines = [f"{selection.num_usable:,} of {counted(len(index), 'sample')} have all members{keeps}"]
    lines += filter_lines(index, selection)
    if selection.problems.total():
        lines.append(f"problems: {selection.problems.text()}{selection.problems.remedy()}")
    return [f"  {line}" for line in lines]
