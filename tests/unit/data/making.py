"""TrainingData over small shards, with defaults that a test overrides by name."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch

from sd_training.config.data_schema import DatasetConfig, DatasetParams, RemoteConfig
from sd_training.config.plan import BatchPlan
from sd_training.data.datamodule import TrainingData
from sd_training.data.index.store import load_index
from sd_training.data.samples.captions import Tokenizer
from sd_training.data.samples.sample import NO_DROPOUT, DrawSettings
from sd_training.data.sources.base import DatasetIndex, Problems
from sd_training.data.sources.tar import TarSample, TarSource, scan_tar
from sd_training.data.storage.files import open_bytes
from sd_training.types import LatentGrid, PixelBatch
from tests import makers

_PARAMS = set(DatasetParams.model_fields)


def training_data(path: Path | str | list[str], plan: BatchPlan | None = None, **options: Any) -> TrainingData:
    """Options of `dataset.params` and of TrainingData alike; `kind` is `dataset.type`."""
    params = {name: options.pop(name) for name in list(options) if name in _PARAMS and name != "workers"}
    params = {"resolution": 16, **params}
    where = path if isinstance(path, list) else str(path)
    tokenizer = options.pop("tokenizer", makers.tiny_tokenizer())
    drawn = {
        name: options.pop(name)
        for name in ("has_noise", "has_offset_noise", "has_mask", "is_stratified")
        if name in options
    }
    dropout = options.pop("dropout", NO_DROPOUT.replace(dropout_prob=options.pop("dropout_prob", 0.0)))
    settings: dict[str, Any] = {
        "dataset": DatasetConfig(type=options.pop("kind", "WebDataset"), params=DatasetParams(path=where, **params)),
        "plan": plan or BatchPlan(micro_batch=4, accumulation=1, processes=1, num_examples=32),
        "workers": 0,
        "tokenizers": {} if tokenizer is None else {"text_encoder": Tokenizer(tokenizer)},
        "draws": DrawSettings(options.pop("seed", 7), LatentGrid(4, 2), dropout, **drawn),
        "run_dir": None,
    }
    return TrainingData(**{**settings, **options})


ACCESS = RemoteConfig(cache_gib=1.0, num_retries=0, timeout_s=5.0)


def tar_index(shards: Sequence[Path], fields: Sequence[str] = (), index_dir: Path | None = None) -> DatasetIndex:
    """The index of tar shards."""
    return load_index(TarSource([str(shard) for shard in shards], ACCESS), index_dir, fields)


class Scanned(NamedTuple):
    """One shard's samples by their headers, and what the index of it holds."""

    samples: list[TarSample]
    columns: dict[str, pa.Array]
    problems: Problems


def scanned(path: Path) -> Scanned:
    """One shard's samples."""
    source = TarSource([str(path)], ACCESS)
    columns, problems = source.scan(source.shards()[0])
    file = open_bytes(str(path), ACCESS)
    try:
        return Scanned(scan_tar(file, lambda key, reason: None), columns, problems)
    finally:
        file.close()


def stream(data: TrainingData, rank: int = 0, first_step: int = 0) -> list[PixelBatch]:
    """All micro-batches of a rank."""
    return list(data.loader(rank, lambda: first_step))


def joined(batches: list[PixelBatch]) -> PixelBatch:
    """Micro-batches as one batch, in the order of positions."""
    order = torch.cat([batch.positions for batch in batches]).argsort()

    def all_of(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: all_of([value[name] for value in values]) for name in values[0]}
        return torch.cat(values)[order]

    names = [field.name for field in dataclasses.fields(PixelBatch)]
    return PixelBatch(**{name: all_of([getattr(batch, name) for batch in batches]) for name in names})


def equal_bits(one: PixelBatch, other: PixelBatch) -> bool:
    """Whether every tensor of two batches is the same to the last bit."""

    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
        return torch.equal(a, b)

    return all(equal(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(PixelBatch))
