"""One request → one example: image, caption and every random number of a position in the run; examples → PixelBatch.

An example depends on the arguments, the position and the files alone, so ranks, workers, micro-batch size and device
change no bit of it (design contract 3).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from sd_training.config.data_schema import DatasetParams
from sd_training.config.schema import ConditioningConfig
from sd_training.data.dataset import OpenDataset
from sd_training.data.order.buckets import BucketTable
from sd_training.data.order.order import generator
from sd_training.data.samples.cache import DTYPES, LatentCache, cached_crop
from sd_training.data.samples.captions import Tokenizer
from sd_training.data.samples.image import CropRequest, place
from sd_training.data.sources.base import SkippedSample, printable
from sd_training.errors import BadSample, BadSamplesError, DataError
from sd_training.types import Form, LatentGrid, PixelBatch, private_memory, shared_memory

PREFETCHED = 2
"""Micro-batches each loader process reads ahead."""
BLOCKS = PREFETCHED + 1
"""Blocks of shared memory that a loader process fills in turn. It begins a micro-batch when the training process takes
the one that is `PREFETCHED` before it, and that one may still be in use; those before were copied."""
MAX_BAD_IN_ROW = 50
"""Samples that one request tries; if all of them are bad, the run ends."""


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

    joint, given = is_dropped(rules.dropout_prob, "conditioning_dropout"), rules.encoder_dropout_prob
    rates = given if isinstance(given, dict) else dict.fromkeys(encoders, given)
    dropped = {e: joint or is_dropped(rates.get(e, 0.0), f"conditioning_dropout:{e}") for e in encoders}
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
    written: PixelBatch | None = None
    """What a loader process has written, where it will write again; `batch` is then a copy."""

    def copied(self, *, is_pinned: bool) -> "WorkerResult":
        """With a batch that stays."""
        return replace(self, batch=self.batch and self.batch.copied(is_pinned=is_pinned), written=self.batch)

    def pin_memory(self) -> "WorkerResult":
        """Called by torch's DataLoader in its pinning thread."""
        return self.copied(is_pinned=True)


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

    _blocks: deque[Tensor] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self.first_ids = np.cumsum([0, *(len(dataset.index) for dataset in self.datasets)]).tolist()

    def __getitem__(self, requests: Sequence[SampleRequest]) -> WorkerResult:
        """The examples in the order of the requests, which are of one bucket."""
        skipped, memory = list[SkippedSample](), private_memory if get_worker_info() is None else self.next_block
        batch = PixelBatch.allocate(self._forms(len(requests), requests[0].bucket), memory)
        fields = batch.arrays()
        try:
            for row, request in enumerate(requests):
                self._fill(fields, row, request, skipped)
        except DataError as error:
            return WorkerResult(None, skipped, error)
        return WorkerResult(batch, skipped)

    def next_block(self, num_bytes: int) -> Tensor:
        """Shared memory of a loader process. The same blocks come again: fresh pages take longer than a cached batch
        takes to be copied."""
        block = self._blocks.popleft() if len(self._blocks) == BLOCKS else None
        self._blocks.append(shared_memory(num_bytes) if block is None or block.nbytes < num_bytes else block)
        return self._blocks[-1]

    def _forms(self, count: int, bucket: int) -> dict[str, Any]:
        """Field of a batch → its form, or dict of them; of what is not drawn or delivered (B, 0)."""
        draws, size, cache = self.draws, self.table.sizes[bucket], self.cache
        latents, lengths = draws.grid.shape(*size), {name: own.length for name, own in self.tokenizers.items()}
        stored = cache.storage if cache is not None else None
        texts, dtype = (stored.text_shapes, DTYPES[stored.dtype]) if stored is not None else ({}, torch.float32)
        moments, has_pixels = (2 * latents[0], *latents[1:]), cache is None

        def form(shape: Sequence[int], dtype: torch.dtype = torch.float32, *, is_there: bool = True) -> Form:
            return Form((count, *shape) if is_there else (count, 0), dtype)

        return {
            "pixels": form((3, *size), torch.uint8, is_there=has_pixels)._replace(is_channels_last=has_pixels),
            "moments": form(moments, dtype, is_there=not has_pixels),
            "mask": form((1, *size), torch.uint8, is_there=draws.has_mask),
            "tokens": {name: form((own,), torch.int64) for name, own in lengths.items() if name not in texts},
            "token_masks": {name: form((own,), torch.bool) for name, own in lengths.items()},
            "text_states": {name: form(shapes[0], dtype) for name, shapes in texts.items()},
            "text_pooled": {name: form(shapes[1], dtype) for name, shapes in texts.items()},
            "dropped": {name: form((), torch.bool) for name in (*self.tokenizers, "size", "crop")},
            "posterior_noise": form(latents),
            "noise": form(latents, is_there=draws.has_noise),
            "timestep_draw": form(()),
            "offset_noise": form(latents[:1], is_there=draws.has_offset_noise),
            "input_noise": form(latents, is_there=draws.has_input_noise),
            **dict.fromkeys(("original_size", "crop_top_left", "target_size"), form((2,), torch.int64)),
            **dict.fromkeys(("positions", "sample_ids"), form((), torch.int64)),
        }

    def _fill(self, fields: Mapping[str, Any], row: int, request: SampleRequest, skipped: list[SkippedSample]) -> None:
        """Writes one row of a batch. Where the sample is bad, that of another sample of the same bucket, drawn by the
        position alone.

        Raises:
            DataError: it cannot be read, or too many samples in a row are bad.
        """
        dataset = self.datasets[request.dataset]
        for attempt in range(MAX_BAD_IN_ROW):
            try:
                return self._read(fields, row, request)
            except BadSample as reason:
                name = dataset.index.name(request.sample)
                skipped.append(SkippedSample(*name, printable(str(reason)), request.position))
                others = dataset.selected[dataset.bucket_of == request.bucket]
                rng = generator(self.draws.seed, "replacement", request.position, attempt)
                request = request._replace(sample=int(others[rng.integers(len(others))]))
        last = f"{skipped[-1].shard} {skipped[-1].key}: {skipped[-1].reason}"
        raise BadSamplesError(f"{MAX_BAD_IN_ROW} samples in a row could not be used; the last: {last}")

    def _read(self, fields: Mapping[str, Any], row: int, request: SampleRequest) -> None:
        position = request.position
        self._read_picture(fields, row, request)
        caption, dropped = self.caption(request)
        for name in self.tokenizers:
            self._read_text(fields, row, name, "" if dropped[name] else caption)
        for name, is_dropped in dropped.items():
            fields["dropped"][name][row] = is_dropped
        for purpose in ("posterior_noise", "noise", "offset_noise", "input_noise"):
            if (own := fields[purpose][row]).size:
                generator(self.draws.seed, purpose, position).standard_normal(dtype=np.float32, out=own)
        fields["timestep_draw"][row] = self._timestep_draw(position)
        fields["target_size"][row] = self.table.sizes[request.bucket]
        fields["positions"][row] = position
        fields["sample_ids"][row] = self.first_ids[request.dataset] + request.sample

    def caption(self, request: SampleRequest) -> tuple[str, dict[str, bool]]:
        """The caption of a request, and what of its conditioning is dropped (see `draw_dropout`). No caption is drawn
        where all text encoders get the null text.

        Raises:
            BadSample, DataError: there is none, or it cannot be read.
        """
        draws, position = self.draws, request.position
        dropped = draw_dropout(draws.dropout, draws.seed, position, list(self.tokenizers))
        if all(dropped[name] for name in self.tokenizers):
            return "", dropped
        rng = partial(generator, draws.seed, position=position)
        return self.datasets[request.dataset].captioner(request.sample, rng), dropped

    def crop(self, request: SampleRequest) -> tuple[CropRequest, int]:
        """The crop of a request's picture, and the number of that variant in the cache."""
        params, size = self.params, self.table.sizes[request.bucket]
        rng = partial(generator, self.draws.seed, position=request.position)
        top, left = rng("crop").random(2).tolist() if params.crop == "random" else (None, None)
        flip = params.flip_prob > 0 and bool(rng("flip").random() < params.flip_prob)
        if self.cache is None:
            return CropRequest(*size, top, left, flip), 0
        storage = self.cache.storage
        crop = int(top * storage.num_crops) if top is not None and storage.num_crops is not None else 0
        return CropRequest(*size, *cached_crop(storage, request.sample, crop), flip), storage.variant(crop, flip)

    def _read_picture(self, fields: Mapping[str, Any], row: int, request: SampleRequest) -> None:
        """Writes what is in the picture: pixels, or their moments from the cache."""
        params, dataset, (wanted, variant) = self.params, self.datasets[request.dataset], self.crop(request)
        if self.cache is None:
            picture = dataset.reader.picture
            image = picture(request.sample, wanted, params.max_image_pixels, keeps_alpha=self.draws.has_mask)
            fields["pixels"][row], original_size, crop_top_left = image.pixels, *image[1:3]
            if image.alpha is not None:
                fields["mask"][row] = image.alpha
        else:
            size = self.table.sizes[request.bucket]
            fields["moments"][row] = self.cache.moments(request.dataset, request.sample, request.bucket, size, variant)
            heights, widths = (dataset.index.numbers(side) for side in ("height", "width"))
            original_size = int(heights[request.sample]), int(widths[request.sample])
            _, crop_top_left = place(*original_size, wanted)
        fields["original_size"][row], fields["crop_top_left"][row] = original_size, crop_top_left

    def _read_text(self, fields: Mapping[str, Any], row: int, encoder: str, caption: str) -> None:
        """Writes what the caption of a text encoder is: tokens, or states from the cache."""
        if self.cache is not None and encoder in self.cache.storage.text_shapes:
            stored = self.cache.text(encoder, caption)
            fields["text_states"][encoder][row], fields["text_pooled"][encoder][row] = stored.states, stored.pooled
            fields["token_masks"][encoder][row] = stored.mask
        else:
            encoded = self.tokenizers[encoder].encode(caption)
            fields["tokens"][encoder][row], fields["token_masks"][encoder][row] = encoded.tokens, encoded.mask

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
