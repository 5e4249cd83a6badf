"""Which samples of the index take part: the declared members are there, the class is known, the filters hold."""

from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from sd_training.config.filter_rules import Rule
from sd_training.data.caption_choice import CAPTION, CaptionRules
from sd_training.data.captions import Prompts, class_name
from sd_training.data.filters import BUILT_IN, Mask, evaluate
from sd_training.data.index import DatasetIndex
from sd_training.data.index_columns import TEXT
from sd_training.data.locations import shown
from sd_training.data.problems import EXAMPLES_KEPT, Problems, SkippedSample
from sd_training.errors import DataError


@dataclass(frozen=True)
class Selection:
    """The survivors and how they were chosen."""

    survivors: NDArray[np.int64]
    """[n] indices into the data set's index, ascending."""
    num_usable: int
    """Samples that have all members, before filters."""
    rules: list[tuple[Rule, int]]
    """Filters, each with the usable samples that pass it alone."""
    problems: Problems
    """Of the shards and of the samples that lack something."""


def select(index: DatasetIndex, filters: list[Rule], prompts: Prompts | None, captions: CaptionRules) -> Selection:
    """Chooses the samples.

    Args:
        prompts: class id → prompts for classification data; None for captioned data.
        captions: where captions come from; a sample with none of them is left out.

    Raises:
        DataError: nothing is left; the message says what each filter alone and all together keep.
    """
    problems = Problems()
    problems.merge(index.problems)
    usable = _captioned(index, captions, problems) if prompts is None else _classified(index, prompts, problems)
    passed = [usable & evaluate(rule, index.columns, len(index)) for rule in filters]
    survivors = np.flatnonzero(np.logical_and.reduce([usable, *passed]))
    rules = [(rule, int(mask.sum())) for rule, mask in zip(filters, passed, strict=True)]
    selection = Selection(survivors, int(usable.sum()), rules, problems)
    if not len(survivors):
        raise DataError(_nothing_left(index, selection))
    return selection


def _captioned(index: DatasetIndex, captions: CaptionRules, problems: Problems) -> Mask:
    usable: Mask = np.zeros(len(index), dtype=np.bool_)
    for field in captions.weights:
        usable |= _has(index, field)
    _name(index, np.flatnonzero(~usable), "caption missing", problems)
    return usable


def _has(index: DatasetIndex, field: str) -> Mask:
    if field == CAPTION:
        return np.asarray(index.numbers("caption_length") >= 0)
    if TEXT + field not in index.columns.column_names:
        return np.zeros(len(index), dtype=np.bool_)
    return np.asarray(pc.is_valid(index.columns[TEXT + field]).to_numpy())


def _classified(index: DatasetIndex, prompts: Prompts, problems: Problems) -> Mask:
    """Looks each distinct class up once."""
    encoded = index.columns["cls"].combine_chunks().dictionary_encode()
    known = np.array([class_name(value) in prompts for value in encoded.dictionary.to_pylist()] + [False])
    codes = pc.fill_null(encoded.indices, len(known) - 1).to_numpy(zero_copy_only=False)
    usable: Mask = known[codes]
    has_class = pc.is_valid(encoded).to_numpy(zero_copy_only=False)
    _name(index, np.flatnonzero(~has_class), "class missing", problems)
    _name(index, np.flatnonzero(has_class & ~usable), "class without a prompt", problems, show_class=True)
    return usable


def _name(
    index: DatasetIndex, samples: NDArray[np.int64], reason: str, problems: Problems, show_class: bool = False
) -> None:
    for sample in samples[:EXAMPLES_KEPT].tolist():
        shown = f"{reason}: class {index.text('cls', sample)!r}" if show_class else reason
        problems.add(SkippedSample(*index.name(sample), shown))
    if len(samples) > EXAMPLES_KEPT:
        problems.add(SkippedSample("", "", reason), count=len(samples) - EXAMPLES_KEPT)


def filter_lines(index: DatasetIndex, selection: Selection) -> list[str]:
    """One line per filter with its survivors, and the fields that no sample has."""
    lines = [f"{rule}: {count:,} samples" for rule, count in selection.rules]
    for field in sorted(set().union(*(rule.fields() for rule, _ in selection.rules)) - index.fields - BUILT_IN):
        fields = ", ".join(sorted(index.fields)[:20]) or "none"
        lines.append(f"no sample has the metadata field '{field}' (fields found: {fields})")
    return lines


def _nothing_left(index: DatasetIndex, selection: Selection) -> str:
    shards = f"{len(index.units):,} shards (first: {shown(index.units[0].location)})"
    lines = [f"dataset.params.path: no sample is left of the {len(index):,} in {shards}"]
    if selection.rules:
        lines.append(f"{selection.num_usable:,} have all members; dataset.params.filters keep of these, each alone:")
        lines += [f"  {line}" for line in filter_lines(index, selection)]
        lines.append("  all together: 0 samples; loosen the filters")
    if selection.problems.total():
        lines.append(f"problems: {selection.problems.text()}")
    return "\n".join(lines)
