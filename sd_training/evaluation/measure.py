"""Metrics of one set of drawn pictures: features, each metric by itself, and the rows of `evaluation.csv`."""

import csv
import fcntl
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from sd_training.checkpoint.folder import replace_text, whole_file
from sd_training.data.datamodule import HeldOutData
from sd_training.errors import BadSample, ConfigError, DataError
from sd_training.evaluation import distances
from sd_training.evaluation.distances import Estimate
from sd_training.evaluation.networks import FeatureNetwork

ROWS = "evaluation.csv"
"""In the run folder."""
COLUMNS = ("step", "weights", "metric", "value", "low", "high", "images", "reason")
"""Of it. `low` and `high` are a 95 % interval, and `images` the number drawn; a metric that failed has a
reason instead of a value."""
Row = dict[str, str]
Item = TypeVar("Item")
_BATCH, _CPU_BATCH = 32, 4
"""Pictures or prompts at once. A CPU is faster with few, whose activations stay in its caches."""
_REAL, _TEXTS = "real", "texts"
_METRICS: Mapping[str, Mapping[str, tuple[Callable[[Tensor, Tensor], Estimate], str]]] = {
    "inception": {
        "fid": (distances.fid, _REAL),
        "fid_infinity": (distances.fid_infinity, _REAL),
        "kid": (distances.kid, _REAL),
        "precision": (distances.precision, _REAL),
        "recall": (distances.recall, _REAL),
    },
    "dinov2": {"fd_dinov2": (distances.fid, _REAL), "fd_dinov2_infinity": (distances.fid_infinity, _REAL)},
    "clip": {"cmmd": (distances.cmmd, _REAL), "clip_score": (distances.clip_score, _TEXTS)},
}
"""Network → metric → how its features of drawn pictures are compared, and with those of what."""


def metrics_of(networks: Iterable[str]) -> set[str]:
    """All that these networks measure."""
    return {metric for name in networks for metric in _METRICS[name]}


class RealPictures:
    """What drawn pictures are compared with: held-out samples, cut as for training.

    Args:
        held_out: its samples.
    """

    def __init__(self, held_out: HeldOutData) -> None:
        self.held_out = held_out

    def __len__(self) -> int:
        return sum(map(len, self.held_out.requests))

    def fingerprint(self) -> str:
        """sha256 of which samples they are, and of their sizes."""
        samples = self.held_out.samples
        requests = [[tuple(request) for request in batch] for batch in self.held_out.requests]
        known = [samples.datasets[0].index.fingerprint, requests, [list(map(int, s)) for s in samples.table.sizes]]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def images(self) -> Iterator[Image.Image]:
        """All of them, always in one order."""
        for batch in self.held_out.batches(range(len(self.held_out))):
            yield from (Image.fromarray(pixels.permute(1, 2, 0).numpy()) for pixels in batch.pixels)

    def captions(self, count: int) -> list[str]:
        """The first caption of up to `count` of them, spread evenly.

        Raises:
            ConfigError: they have none.
        """
        (dataset,), found = self.held_out.samples.datasets, list[str]()
        samples = [request.sample for batch in self.held_out.requests for request in batch]
        try:
            for number in range(min(count, len(samples))):
                try:
                    found += dataset.all_captions(samples[number * len(samples) // min(count, len(samples))])[:1]
                except BadSample:
                    continue
        except (ConfigError, DataError) as error:
            raise ConfigError(f"evaluation.prompts: the captions of real pictures cannot be used: {error}") from error
        if not found:
            raise ConfigError("evaluation.prompts: the real pictures have no captions; give a file of prompts")
        return found


def measure(
    networks: Mapping[str, Callable[[], FeatureNetwork]],
    pictures: Sequence[Path],
    prompts: Sequence[str],
    real: Callable[[], RealPictures],
    cache: Path,
    device: torch.device,
) -> Iterator[Row]:
    """The metrics of every network, each a row without step and weights. One that fails has its reason in the row.

    Args:
        networks: name → loads it.
        pictures: files of drawn ones.
        prompts: of each picture.
        real: opens the real ones.
        cache: folder that keeps their features.
    """
    float64_device = torch.device("cpu") if device.type == "mps" else device
    for name, load in networks.items():
        inputs, reason = dict[str, Tensor](), ""
        try:
            network = load()
            network.module.to(device)
            drawn = _features(network, (Image.open(path) for path in pictures), len(pictures), f"{name}, drawn")
            if network.encode_texts is not None:
                inputs[_TEXTS] = torch.cat([network.encode_texts(part) for part in _batches(prompts, network.device)])
            inputs[_REAL] = _real_features(name, network, real(), cache)
        except Exception as error:  # of files, libraries and devices; the other networks are still measured
            reason = _sentence(error)
        for metric, (distance, other) in _METRICS[name].items():
            row = {"metric": metric, "images": str(len(pictures))}
            try:
                if other not in inputs:
                    raise DataError(reason)
                estimate = distance(drawn.to(float64_device), inputs[other].to(float64_device))
                if not math.isfinite(estimate.value):
                    raise DataError(f"is {estimate.value}")
            except Exception as error:
                yield row | {"reason": _sentence(error)}
                continue
            numbers = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
            yield row | {key: f"{value:.9g}" for key, value in numbers.items() if math.isfinite(value)}


def _sentence(error: Exception) -> str:
    return " ".join(f"{error}".split())[:300] or type(error).__name__


def _features(network: FeatureNetwork, images: Iterable[Image.Image], count: int, title: str) -> Tensor:
    """[N, D]"""
    shown = tqdm(images, title, count, unit="images")
    return torch.cat([network(part) for part in _batches(shown, network.device)])


def _batches(items: Iterable[Item], device: torch.device) -> Iterator[list[Item]]:
    rest, size = iter(items), _CPU_BATCH if device.type == "cpu" else _BATCH
    return iter(lambda: list(islice(rest, size)), [])


def _real_features(name: str, network: FeatureNetwork, real: RealPictures, cache: Path) -> Tensor:
    """[M, D], computed once for these samples and weights."""
    known = hashlib.sha256(f"{real.fingerprint()} {network.fingerprint()}".encode()).hexdigest()[:16]
    path = cache / f"real-{name}-{known}.safetensors"
    try:
        return load_file(path)["features"]
    except (OSError, SafetensorError, KeyError):  # none yet, or cut short
        features = _features(network, real.images(), len(real), f"{name}, real")
    with whole_file(path, os.getpid()) as beside:
        save_file({"features": features}, beside)
    return features


def read_rows(path: Path) -> list[Row]:
    """Of an `evaluation.csv`, whole rows; none where there is no file.

    Raises:
        DataError: it is another kind of file.
    """
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        try:
            if not set(COLUMNS) <= set(reader.fieldnames or COLUMNS):
                raise DataError(f"{path}: its first line must be {','.join(COLUMNS)}; move the file away")
            rows = list(reader)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as CSV in UTF-8 ({error}); move the file away") from error
    return [row for row in rows if None not in row and None not in row.values() and row["step"].isdecimal()]


def write_rows(path: Path, rows: Sequence[Row], last_step: float = math.inf) -> None:
    """Adds rows in place of those of the same step, weights and metric; the file is replaced at once. Two evaluations
    of a run take turns, by a lock of its folder.

    Args:
        last_step: rows of later optimizer steps are dropped.

    Raises:
        DataError: as `read_rows`.
        OSError: it cannot be written.
    """
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        kept = [row for row in (*read_rows(path), *rows) if int(row["step"]) <= last_step]
        named = {tuple(row[key] for key in COLUMNS[:3]): row for row in kept}
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(named.values())
        replace_text(path, text.getvalue())
    finally:
        os.close(handle)
