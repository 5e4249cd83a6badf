"""Reads one visit: image, caption and every random number of a position in the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from sd_training.config.data_schema import DatasetParams
from sd_training.data.buckets import BucketTable
from sd_training.data.captions import Encoded, Tokenizer, Tokens, drops
from sd_training.data.draws import generator
from sd_training.data.image_decode import ImageRules
from sd_training.data.image_transforms import Picture, Wanted, read_picture
from sd_training.data.opened import OpenDataset
from sd_training.data.problems import BadSample, SkippedSample, printable
from sd_training.errors import DataError
from sd_training.types import LatentGrid

CONDITIONER = "text"
"""The name that conditioning dropout knows the caption by."""


class Visit(NamedTuple):
    """What a loader process is asked for."""

    position: int
    """In the global order of the run."""
    dataset: int
    """Number of the data set."""
    sample: int
    """Index into the data set's index."""
    bucket: int
    """Which height and width the picture gets."""


@dataclass(frozen=True)
class DrawSettings:
    """What else is drawn for a position."""

    seed: int
    dropout_prob: float
    """Probability that the caption is replaced by the empty one."""
    grid: LatentGrid
    draw_noise: bool
    """False for autoencoder training, which has no forward process."""


@dataclass
class VisitedSample:
    """One position's share of a PixelBatch, and the samples that were skipped on the way to it."""

    pixels: NDArray[np.uint8]
    tokens: Tokens
    is_truncated: bool
    """Whether the caption had more tokens than there is room for."""
    posterior_noise: NDArray[np.float32]
    noise: NDArray[np.float32]
    timestep_draw: float
    original_size: tuple[int, int]
    crop_top_left: tuple[int, int]
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
        datasets: where samples are read.
        table: height and width of the buckets.
        params: image processing and limits.
        tokenizer: caption → tokens.
        draws: what is drawn per position.
    """

    def __init__(
        self,
        datasets: Sequence[OpenDataset],
        table: BucketTable,
        params: DatasetParams,
        tokenizer: Tokenizer,
        draws: DrawSettings,
    ) -> None:
        self.datasets, self.table, self.params = list(datasets), table, params
        self.tokenizer, self.draws = tokenizer, draws
        self.rules = ImageRules(max_pixels=params.max_image_pixels, icc_to_srgb=params.icc_to_srgb)
        lengths = [len(dataset.index) for dataset in self.datasets]
        self.first_ids = [sum(lengths[:number]) for number in range(len(lengths))]

    def __getitem__(self, visit: Visit) -> VisitedSample | FailedVisit:
        skipped, most = list[SkippedSample](), self.params.max_bad_in_row
        try:
            for attempt in range(most):
                try:
                    return self._read(visit, skipped)
                except BadSample as reason:
                    name = self.datasets[visit.dataset].index.name(visit.sample)
                    skipped.append(SkippedSample(*name, printable(str(reason)), visit.position))
                    visit = visit._replace(sample=self._replacement(visit, attempt))
        except DataError as error:
            return FailedVisit(str(error), skipped)
        last = skipped[-1]
        message = f"{most} samples in a row could not be used; the last: {last.shard} {last.key}: {last.reason}"
        return FailedVisit(f"{message} (dataset.params.max_bad_in_row={most})", skipped)

    def _replacement(self, visit: Visit, attempt: int) -> int:
        """Another sample of the same bucket; which one depends on the position alone."""
        choices = self.datasets[visit.dataset].in_bucket(visit.bucket)
        return int(choices[generator(self.draws.seed, "replacement", visit.position, attempt).integers(len(choices))])

    def _read(self, visit: Visit, skipped: list[SkippedSample]) -> VisitedSample:
        height, width = self.table.sizes[visit.bucket]
        picture = self._picture(visit, height, width)
        encoded = self._encoded(visit)
        draws, position = self.draws, visit.position
        shape = draws.grid.shape(height, width)
        return VisitedSample(
            pixels=picture.pixels,
            tokens=encoded.tokens,
            is_truncated=encoded.num_cut > 0,
            posterior_noise=self._normal("posterior_noise", position, shape),
            noise=self._normal("noise", position, shape) if draws.draw_noise else np.empty(0, dtype=np.float32),
            timestep_draw=generator(draws.seed, "timestep", position).random(dtype=np.float32),
            original_size=picture.original_size,
            crop_top_left=picture.crop_top_left,
            position=position,
            sample_id=self.first_ids[visit.dataset] + visit.sample,
            skipped=skipped,
        )

    def _picture(self, visit: Visit, height: int, width: int) -> Picture:
        params, seed = self.params, self.draws.seed
        top, left = None, None
        if params.crop == "random":
            top, left = generator(seed, "crop", visit.position).random(2).tolist()
        flip = params.flip_prob > 0 and generator(seed, "flip", visit.position).random() < params.flip_prob
        wanted = Wanted(height, width, top, left, bool(flip))
        return read_picture(self.datasets[visit.dataset].reader.image(visit.sample), wanted, self.rules)

    def _encoded(self, visit: Visit) -> Encoded:
        draws = self.draws
        dropped = drops(draws.seed, visit.position, draws.dropout_prob, [CONDITIONER], joint=True)[CONDITIONER]
        if dropped or not self.tokenizer.length:
            return self.tokenizer.encode_counted("")
        chance = partial(_chance, draws.seed, visit.position)
        return self.tokenizer.encode_counted(self.datasets[visit.dataset].captioner(visit.sample, chance))

    def _normal(self, purpose: str, position: int, shape: tuple[int, int, int]) -> NDArray[np.float32]:
        return generator(self.draws.seed, purpose, position).standard_normal(shape, dtype=np.float32)


def _chance(seed: int, position: int, purpose: str) -> np.random.Generator:
    return generator(seed, purpose, position)
