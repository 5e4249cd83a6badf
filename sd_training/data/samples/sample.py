"""One request → one example: image, caption and every random number of a position in the run; examples → PixelBatch.

An example depends on the arguments, the position and the files alone, so ranks, workers, micro-batch size and device
change no bit of it (design contract 3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, default_collate, get_worker_info

from sd_training.config.data_schema import DatasetParams
from sd_training.config.schema import ConditioningConfig
from sd_training.data.dataset import OpenDataset
from sd_training.data.order.buckets import BucketTable
from sd_training.data.order.order import generator
from sd_training.data.samples.cache import LatentCache, cached_crop
from sd_training.data.samples.captions import Generators, Tokenizer
from sd_training.data.samples.image import CropRequest, place
from sd_training.data.sources.base import SkippedSample, printable
from sd_training.errors import BadSample, BadSamplesError, DataError
from sd_training.types import LatentGrid, PixelBatch

MAX_BAD_IN_ROW = 50
"""Samples that one request tries; if all of them are bad, the run ends."""
_EMPTY = np.empty(0, dtype=np.float32)


class SampleRequest(NamedTuple):
    """A request to a loader process."""

    position: int
    """In the global order of the run: optimizer step × global batch + slot in the step."""
    dataset: int
    """Number of the data set."""
    sample: int
    """Index into the data set's index."""
    bucket: int
    """Selects height and width of the picture."""


NO_DROPOUT = ConditioningConfig(dropout_prob=0.0)


def draw_dropout(rules: ConditioningConfig, seed: int, position: int, encoders: Sequence[str]) -> dict[str, bool]:
    """Text encoder, `size` and `crop` → whether it is replaced by its null conditioning at a position of the run.

    The answer for one encoder does not depend on which others there are.
    """

    def is_dropped(prob: float, purpose: str) -> bool:
        return prob > 0 and bool(generator(seed, purpose, position).random() < prob)

    joint = is_dropped(rules.dropout_prob, "conditioning_dropout")
    dropped = {e: joint or is_dropped(rules.encoder_dropout_prob, f"conditioning_dropout:{e}") for e in encoders}
    dropped["size"] = is_dropped(rules.size_dropout_prob, "conditioning_dropout:size")
    dropped["crop"] = is_dropped(rules.crop_dropout_prob, "conditioning_dropout:crop")
    return dropped


@dataclass(frozen=True)
class DrawSettings:
    """The other draws of a position."""

    seed: int
    grid: LatentGrid
    dropout: ConditioningConfig = field(default_factory=lambda: NO_DROPOUT)
    """Which conditioners an example is trained without."""
    has_noise: bool = True
    """False for autoencoder training, which has no forward process."""
    has_offset_noise: bool = False
    has_input_noise: bool = False
    has_mask: bool = False
    """Whether the loss is masked by the images' alpha, which is then delivered."""
    is_stratified: bool = False
    """One timestep draw from each of as many equal parts of [0, 1) as the optimizer step has samples."""


@dataclass
class WorkerResult:
    """What a loader process returns for one micro-batch."""

    batch: PixelBatch | None
    """None after a failure."""
    skipped: list[SkippedSample]
    error: DataError | None = None
    """Why the run cannot continue. The training process raises it; raised in a loader process it would be printed
    as a traceback."""

    def pin_memory(self) -> "WorkerResult":
        """Called by torch's DataLoader in its pinning thread."""
        return replace(self, batch=self.batch and self.batch.pin_memory())


@dataclass(eq=False)
class TrainingSamples(Dataset[WorkerResult]):
    """Maps the requests of a micro-batch to their batch."""

    datasets: Sequence[OpenDataset]
    """The data sets to read from."""
    table: BucketTable
    """Height and width of the buckets."""
    params: DatasetParams
    """Image processing and limits."""
    tokenizers: Mapping[str, Tokenizer]
    """Text encoder → caption → tokens."""
    draws: DrawSettings
    """What is drawn per position."""
    global_batch: int
    """Samples per optimizer step, over which timesteps are stratified."""
    cache: LatentCache | None = None
    """Delivers moments instead of pixels, and states of its text encoders instead of tokens."""

    def __post_init__(self) -> None:
        self.first_ids = np.cumsum([0, *(len(dataset.index) for dataset in self.datasets)]).tolist()

    def __getitem__(self, requests: Sequence[SampleRequest]) -> WorkerResult:
        """The examples in the order of the requests."""
        skipped = list[SkippedSample]()
        try:
            rows = [self._example(request, skipped) for request in requests]
        except DataError as error:
            return WorkerResult(None, skipped, error)
        batch = PixelBatch(**default_collate(rows))
        if self.cache is not None and self.cache.storage.is_channels_last:
            batch.moments = batch.moments.contiguous(memory_format=torch.channels_last)
        return WorkerResult(batch if get_worker_info() is None else batch.packed(), skipped)

    def _example(self, request: SampleRequest, skipped: list[SkippedSample]) -> dict[str, Any]:
        """One row of a batch: field → array, or dict of them. Where the sample is bad, that of another sample of the
        same bucket, drawn by the position alone.

        Raises:
            DataError: it cannot be read, or too many samples in a row are bad.
        """
        dataset = self.datasets[request.dataset]
        for attempt in range(MAX_BAD_IN_ROW):
            try:
                return self._read(request)
            except BadSample as reason:
                name = dataset.index.name(request.sample)
                skipped.append(SkippedSample(*name, printable(str(reason)), request.position))
                others = dataset.selected[dataset.bucket_of == request.bucket]
                rng = generator(self.draws.seed, "replacement", request.position, attempt)
                request = request._replace(sample=int(others[rng.integers(len(others))]))
        last = f"{skipped[-1].shard} {skipped[-1].key}: {skipped[-1].reason}"
        raise BadSamplesError(f"{MAX_BAD_IN_ROW} samples in a row could not be used; the last: {last}")

    def _read(self, request: SampleRequest) -> dict[str, Any]:
        draws, position = self.draws, request.position
        dataset, (height, width) = self.datasets[request.dataset], self.table.sizes[request.bucket]
        rng = partial(generator, draws.seed, position=position)

        def normal(purpose: str, shape: tuple[int, ...], is_drawn: bool = True) -> NDArray[np.float32]:
            return rng(purpose).standard_normal(shape, dtype=np.float32) if is_drawn else _EMPTY

        picture = self._picture(request, rng)
        dropped = draw_dropout(draws.dropout, draws.seed, position, list(self.tokenizers))
        is_read = any(not dropped[name] for name in self.tokenizers)
        caption = dataset.captioner(request.sample, rng) if is_read else ""
        latents = draws.grid.shape(height, width)
        return {
            **picture,
            **self._texts({name: "" if dropped[name] else caption for name in self.tokenizers}),
            "dropped": dropped,
            "posterior_noise": normal("posterior_noise", latents),
            "noise": normal("noise", latents, draws.has_noise),
            "timestep_draw": np.float32(self._timestep_draw(position)),
            "offset_noise": normal("offset_noise", latents[:1], draws.has_offset_noise),
            "input_noise": normal("input_noise", latents, draws.has_input_noise),
            "target_size": np.array((height, width)),
            "positions": position,
            "sample_ids": self.first_ids[request.dataset] + request.sample,
        }

    def _picture(self, request: SampleRequest, rng: Generators) -> dict[str, Any]:
        """Fields of a batch that say what is in the picture: pixels, or their moments from the cache."""
        params, dataset, size = self.params, self.datasets[request.dataset], self.table.sizes[request.bucket]
        top, left = rng("crop").random(2).tolist() if params.crop == "random" else (None, None)
        flip = params.flip_prob > 0 and bool(rng("flip").random() < params.flip_prob)
        pixels, moments, alpha = _EMPTY.astype(np.uint8), torch.empty(0), None
        if self.cache is None:
            picture, wanted = dataset.reader.picture, CropRequest(*size, top, left, flip)
            image = picture(request.sample, wanted, params.max_image_pixels, keeps_alpha=self.draws.has_mask)
            pixels, alpha, original_size, crop_top_left = image.pixels, image.alpha, *image[1:3]
        else:
            storage = self.cache.storage
            crop = int(top * storage.num_crops) if top is not None and storage.num_crops is not None else 0
            variant = storage.variant(crop, flip)
            moments = self.cache.moments(request.dataset, request.sample, request.bucket, size, variant)
            wanted = CropRequest(*size, *cached_crop(storage, request.sample, crop), flip)
            heights, widths = (dataset.index.numbers(side) for side in ("height", "width"))
            original_size = int(heights[request.sample]), int(widths[request.sample])
            _, crop_top_left = place(*original_size, wanted)
        return {
            "pixels": pixels,
            "moments": moments,
            "mask": _EMPTY.astype(np.uint8) if alpha is None else alpha,
            "original_size": np.array(original_size),
            "crop_top_left": np.array(crop_top_left),
        }

    def _texts(self, captions: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """Fields of a batch that say what the captions are: tokens, or states from the cache.

        Args:
            captions: by text encoder.
        """
        cache = self.cache
        stored = {} if cache is None else {name: cache.text(name, captions[name]) for name in cache.storage.text_shapes}
        encoded = {name: t.encode(captions[name]) for name, t in self.tokenizers.items() if name not in stored}
        return {
            "tokens": {name: text.tokens for name, text in encoded.items()},
            "token_masks": {n: t.mask for n, t in encoded.items()} | {n: t.mask for n, t in stored.items()},
            "text_states": {name: text.states for name, text in stored.items()},
            "text_pooled": {name: text.pooled for name, text in stored.items()},
        }

    def _timestep_draw(self, position: int) -> float:
        """In [0, 1)."""
        draw = float(generator(self.draws.seed, "timestep", position).random(dtype=np.float32))
        if not self.draws.is_stratified:
            return draw
        slot = position % self.global_batch
        stratum = _strata(self.draws.seed, position - slot, self.global_batch)[slot]
        # Rounding to float32 may give 1, which is outside of [0, 1).
        return min((float(stratum) + draw) / self.global_batch, 1.0 - 2.0**-24)


@lru_cache(maxsize=8)
def _strata(seed: int, first_position: int, count: int) -> NDArray[np.int64]:
    """Which part of [0, 1) each slot of the step that begins at a position draws from; shuffled, because neighbouring
    slots share a shard."""
    return generator(seed, "strata", first_position).permutation(count)
