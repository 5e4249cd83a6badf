"""TrainingData over small shards, with defaults that a test overrides by name."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sd_training.config.batch_plan import BatchPlan
from sd_training.config.schema import DatasetConfig, DatasetParams
from sd_training.data.byte_files import Access, open_bytes
from sd_training.data.datamodule import TrainingData
from sd_training.data.index import DatasetIndex, load_index
from sd_training.data.tar_index import TarScan, scan_tar
from sd_training.data.tar_source import TarSource
from sd_training.types import LatentGrid, PixelBatch
from tests import makers

_PARAMS = {field.name for field in dataclasses.fields(DatasetParams)}


def training_data(path: Path | str | list[str], plan: BatchPlan | None = None, **options: Any) -> TrainingData:
    """Options of `dataset.params` and of TrainingData alike; `kind` is `dataset.type`."""
    params = {name: options.pop(name) for name in list(options) if name in _PARAMS and name != "workers"}
    params = {"resolution": 16, **params}
    where = path if isinstance(path, list) else str(path)
    settings: dict[str, Any] = {
        "dataset": DatasetConfig(type=options.pop("kind", "WebDataset"), params=DatasetParams(path=where, **params)),
        "plan": plan or BatchPlan(micro_batch=4, accumulation=1, processes=1, num_examples=32),
        "workers": 0,
        "seed": 7,
        "dropout_prob": 0.0,
        "tokenizer": makers.tiny_tokenizer(),
        "grid": LatentGrid(4, 2),
        "draw_noise": True,
        "run_dir": None,
    }
    return TrainingData(**{**settings, **options})


ACCESS = Access(mode="range", cache_dir=None, cache_gib=1.0, num_retries=0, timeout_s=5.0)


def tar_index(shards: Sequence[Path], fields: Sequence[str] = (), index_dir: Path | None = None) -> DatasetIndex:
    """The index of tar shards."""
    return load_index(TarSource([str(shard) for shard in shards], ACCESS), index_dir, fields)


def scanned(path: Path) -> TarScan:
    """One shard's samples."""
    file = open_bytes(str(path), ACCESS)
    try:
        return scan_tar(str(path), file)
    finally:
        file.close()


def stream(data: TrainingData, rank: int = 0, first_step: int = 0) -> list[PixelBatch]:
    """All micro-batches of a rank."""
    return list(data.loader(rank, lambda: first_step))


def joined(batches: list[PixelBatch]) -> PixelBatch:
    """Micro-batches as one batch, in the order of positions."""
    order = torch.cat([batch.positions for batch in batches]).argsort()
    names = [field.name for field in dataclasses.fields(PixelBatch)]
    return PixelBatch(**{name: torch.cat([getattr(batch, name) for batch in batches])[order] for name in names})


def equal_bits(one: PixelBatch, other: PixelBatch) -> bool:
    """Whether every tensor of two batches is the same to the last bit."""
    names = [field.name for field in dataclasses.fields(PixelBatch)]
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)
