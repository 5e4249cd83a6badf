"""Reads one visit: image, caption and every random number of a position in the run."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from sd_training.config.schema import DatasetParams
from sd_training.data.captions import Prompts, Tokenizer, Tokens, class_name
from sd_training.data.draws import generator
from sd_training.data.image_transforms import Crop, decode_image, max_offset, square, to_array
from sd_training.data.problems import BadSample, SkippedSample, printable
from sd_training.data.tar_source import SampleSource
from sd_training.errors import DataError

MAX_ATTEMPTS = 50
"""So many bad samples in a row at one position end the run: something is wrong with all of them."""


class Visit(NamedTuple):
    """What a loader process is asked for."""

    position: int
    """In the global order of the run."""
    sample: int
    """Index into the data set's index."""


@dataclass(frozen=True)
class DrawShapes:
    """What else is drawn for a position."""

    seed: int
    dropout_prob: float
    """Probability that the caption is replaced by the empty one."""
    latent_shape: tuple[int, int, int]
    """(C, h, w)."""
    draw_noise: bool
    """False for autoencoder training, which has no forward process."""


@dataclass
class VisitedSample:
    """One position's share of a PixelBatch, and the samples that were skipped on the way to it."""

    pixels: NDArray[np.uint8]
    tokens: Tokens
    posterior_noise: NDArray[np.float32]
    noise: NDArray[np.float32]
    timestep_draw: float
    position: int
    sample_id: int
    skipped: list[SkippedSample]


@dataclass
class FailedVisit:
    """An error for the main process: raised in a loader process it would reach the user as a traceback."""

    message: str
    skipped: list[SkippedSample]


class TrainingSamples(Dataset[VisitedSample | FailedVisit]):
    """Maps a visit to a sample; the result depends on the arguments, the position and the files alone.

    Args:
        source: where samples are read.
        survivors: [n] samples from which a bad one is replaced.
        params: image processing.
        prompts: class id → prompts for classification data, else None.
        tokenizer: caption → tokens.
        draws: what is drawn per position.
    """

    def __init__(
        self,
        source: SampleSource,
        survivors: NDArray[np.int64],
        params: DatasetParams,
        prompts: Prompts | None,
        tokenizer: Tokenizer,
        draws: DrawShapes,
    ) -> None:
        self.source, self.survivors, self.params = source, survivors, params
        self.prompts, self.tokenizer, self.draws = prompts, tokenizer, draws

    def __getitem__(self, visit: Visit) -> VisitedSample | FailedVisit:
        sample, skipped = visit.sample, list[SkippedSample]()
        try:
            for attempt in range(MAX_ATTEMPTS):
                try:
                    return self._read(visit.position, sample, skipped)
                except BadSample as reason:
                    skipped.append(SkippedSample(*self.source.name(sample), printable(str(reason))))
                    sample = self._replacement(visit.position, attempt)
        except DataError as error:
            return FailedVisit(str(error), skipped)
        last = skipped[-1]
        message = f"{MAX_ATTEMPTS} samples in a row could not be used; the last: {last.shard} {last.key}: {last.reason}"
        return FailedVisit(message, skipped)

    def _replacement(self, position: int, attempt: int) -> int:
        index = generator(self.draws.seed, "replacement", position, attempt).integers(len(self.survivors))
        return int(self.survivors[index])

    def _read(self, position: int, sample: int, skipped: list[SkippedSample]) -> VisitedSample:
        pixels = self._pixels(position, self.source.image(sample))
        draws = self.draws
        return VisitedSample(
            pixels=pixels,
            tokens=self._tokens(position, sample),
            posterior_noise=self._normal("posterior_noise", position),
            noise=self._normal("noise", position) if draws.draw_noise else np.empty(0, dtype=np.float32),
            timestep_draw=generator(draws.seed, "timestep", position).random(dtype=np.float32),
            position=position,
            sample_id=sample,
            skipped=skipped,
        )

    def _pixels(self, position: int, data: bytes) -> NDArray[np.uint8]:
        params, seed = self.params, self.draws.seed
        image = decode_image(data, params.max_image_pixels)
        cut = square(image, Crop(params.resolution, self._crop_offset(position, image)))
        flip = params.flip_prob > 0 and generator(seed, "flip", position).random() < params.flip_prob
        pixels = np.empty((3, params.resolution, params.resolution), dtype=np.uint8)
        to_array(cut, flip, pixels)
        return pixels

    def _crop_offset(self, position: int, image: Image.Image) -> int | None:
        if self.params.crop == "center":
            return None
        most = max_offset(image, self.params.resolution)
        return int(generator(self.draws.seed, "crop", position).integers(most + 1))

    def _tokens(self, position: int, sample: int) -> Tokens:
        seed, dropout_prob = self.draws.seed, self.draws.dropout_prob
        if dropout_prob > 0 and generator(seed, "conditioning_dropout", position).random() < dropout_prob:
            return self.tokenizer("")
        return self.tokenizer(self._caption(position, sample)) if self.tokenizer.length else self.tokenizer("")

    def _caption(self, position: int, sample: int) -> str:
        if self.prompts is None:
            return self.source.caption(sample)
        choices = self.prompts[class_name(self.source.class_id(sample))]
        if len(choices) == 1:
            return choices[0]
        return choices[generator(self.draws.seed, "caption", position).integers(len(choices))]

    def _normal(self, purpose: str, position: int) -> NDArray[np.float32]:
        rng = generator(self.draws.seed, purpose, position)
        return rng.standard_normal(self.draws.latent_shape, dtype=np.float32)
