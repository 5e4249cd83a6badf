"""Rules between the options of the training data."""

from collections.abc import Iterator
from typing import Any

from sd_training.config.class_prompts import prompts_of, read_class_prompts
from sd_training.config.data_schema import BucketConfig, DatasetConfig, MixEntry, SourceParams
from sd_training.config.fields import defaults
from sd_training.config.filters import parse_filters

_TABLES = ("Parquet", "Table", "HuggingFace")
_DATA_READ_BY: dict[str, tuple[str, ...]] = {
    "image_column": _TABLES,
    "caption_column": _TABLES,
    "tags": ("TagFolder",),
    "idx_to_prompt": ("ClassificationWebDataset",),
    "class_mapping": ("ClassificationWebDataset",),
    "allow_pipe": ("WebDataset", "ClassificationWebDataset"),
}
"""Options of a source, and the types that read them."""
_LADDER = ("max_area", "min_side", "max_side", "max_aspect", "step", "upscale")


def check_data(dataset: DatasetConfig) -> Iterator[str]:
    """Everything that is wrong with the data sets, one sentence each."""
    yield from _source("dataset", dataset)
    for number, entry in enumerate(dataset.mix):
        yield from _source(f"dataset.mix.{number}", entry)
    yield from _buckets(dataset.params.buckets)
    yield from _unmixed(dataset)


def never_drawn(dataset: DatasetConfig, num_steps: int) -> Iterator[str]:
    """Data sets that a run of `num_steps` optimizer steps ends before; for warnings, one sentence each."""
    for number, entry in enumerate(dataset.mix):
        if entry.start_step >= num_steps:
            yield (
                f"dataset.mix.{number}.start_step: is {entry.start_step:,}, but the run has at most {num_steps:,} "
                "steps; the data set is never drawn from"
            )


def _source(prefix: str, entry: DatasetConfig | MixEntry) -> Iterator[str]:
    params: SourceParams = entry.params
    if not params.path:
        yield f"{prefix}.params.path: is empty; give a tar file, a folder, a glob or a brace pattern"
    for problem in parse_filters(params.filters)[1]:
        yield problem.replace("dataset.", f"{prefix}.", 1)
    for name, kinds in _DATA_READ_BY.items():
        if entry.type not in kinds and _is_set(getattr(params, name), defaults(SourceParams)[name]):
            yield f"{prefix}.params.{name}: is only read with {prefix}.type={' or '.join(kinds)}, not {entry.type}"
    yield from _captions(prefix, entry)
    if entry.type == "ClassificationWebDataset":
        yield from _class_prompts(prefix, params)
    if entry.end_step is not None and entry.end_step <= entry.start_step:
        yield f"{prefix}.end_step: is {entry.end_step}, not after {prefix}.start_step={entry.start_step}"


def _is_set(value: Any, default: Any) -> bool:
    return bool((vars(value) if hasattr(value, "__dict__") else value) != default)


def _captions(prefix: str, entry: DatasetConfig | MixEntry) -> Iterator[str]:
    captions = entry.params.captions
    if entry.type == "TagFolder" and _is_set(captions, defaults(type(captions))):
        yield f"{prefix}.params.captions: is not read with {prefix}.type=TagFolder; write {prefix}.params.tags"
    elif entry.type == "ClassificationWebDataset" and captions.fields:
        yield f"{prefix}.params.captions.fields: is not read with {entry.type}, whose captions are the class prompts"


def _class_prompts(prefix: str, params: SourceParams) -> Iterator[str]:
    if params.idx_to_prompt is not None and params.class_mapping is not None:
        yield f"{prefix}.params.class_mapping: is another name of {prefix}.params.idx_to_prompt; keep one of them"
    elif prompts_of(params) is None:
        yield f"{prefix}.params.idx_to_prompt: is required with {prefix}.type=ClassificationWebDataset"
    else:
        for problem in read_class_prompts(params)[1]:
            yield problem.replace("dataset.", f"{prefix}.", 1)


def _buckets(buckets: BucketConfig) -> Iterator[str]:
    unset, group = defaults(BucketConfig), "dataset.params.buckets"
    for name in _LADDER:
        if buckets.mode != "ladder" and getattr(buckets, name) != unset[name]:
            yield f"{group}.{name}: is only read with {group}.mode=ladder, not {buckets.mode}"
    if buckets.mode == "off" and buckets.constant_area:
        yield f"{group}.constant_area: is only read with {group}.mode=ladder or table, not off"
    if buckets.mode == "table" and not buckets.sizes:
        yield f"{group}.sizes: is required with {group}.mode=table: a list of [height, width] pairs"
    if buckets.mode != "table" and buckets.sizes is not None:
        yield f"{group}.sizes: is only read with {group}.mode=table, not {buckets.mode}"
    if any(len(size) != 2 for size in buckets.sizes or ()):
        yield f"{group}.sizes: must be [height, width] pairs"


def _unmixed(dataset: DatasetConfig) -> Iterator[str]:
    if dataset.mix:
        return
    for name in ("weight", "start_step", "end_step"):
        if getattr(dataset, name) != defaults(DatasetConfig)[name]:
            yield f"dataset.{name}: is only read with dataset.mix, which names further data sets"
