"""Reads one visit: image, caption and every random number of a position in the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from sd_training.config.batch_plan import counted
from sd_training.config.data_schema import DatasetParams
from sd_training.data.buckets import BucketTable
from sd_training.data.captions import Dropout, Encoded, Tokenizer
from sd_training.data.draws import generator
from sd_training.data.image_decode import ImageRules
from sd_training.data.image_transforms import Picture, Wanted, read_picture
from sd_training.data.opened import OpenDataset
from sd_training.data.problems import BadSample, SkippedSample, printable
from sd_training.errors import DataError, OutageError
from sd_training.types import LatentGrid

_NOTHING = np.empty(0, dtype=np.float32)
_NO_MASK = np.empty(0, dtype=np.uint8)


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
    slot: int
    """Which sample of its optimizer step this is."""
    step_samples: int
    """How many samples the optimizer step has."""


@dataclass(frozen=True)
class DrawSettings:
    """What else is drawn for a position."""

    seed: int
    grid: LatentGrid
    dropout: Dropout = field(default_factory=Dropout)
    has_noise: bool = True
    """False for autoencoder training, which has no forward process."""
    has_offset_noise: bool = False
    has_input_noise: bool = False
    has_mask: bool = False
    """Whether the loss is masked by the images' alpha, which is then delivered."""
    is_stratified: bool = False
    """One timestep draw from each of as many equal parts of [0, 1) as the optimizer step has samples."""

    def purposes(self) -> list[str]:
        """What `draws.generator` may be asked for besides seed and position, when a sample of this run is read."""
        optional = {
            "noise": self.has_noise,
            "offset_noise": self.has_offset_noise,
            "input_noise": self.has_input_noise,
            "strata": self.is_stratified,
        }
        always = ["caption", "conditioning_dropout", "crop", "flip", "posterior_noise", "replacement", "timestep"]
        return sorted([*always, *(purpose for purpose, is_drawn in optional.items() if is_drawn)])


@dataclass
class VisitedSample:
    """One position's share of a PixelBatch, and the samples that were skipped on the way to it."""

    pixels: NDArray[np.uint8]
    texts: dict[str, Encoded]
    """Text encoder → tokens."""
    dropped: dict[str, bool]
    posterior_noise: NDArray[np.float32]
    noise: NDArray[np.float32]
    timestep_draw: float
    offset_noise: NDArray[np.float32]
    input_noise: NDArray[np.float32]
    mask: NDArray[np.uint8]
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
    is_outage: bool = False
    """Whether another start may succeed."""


class TrainingSamples(Dataset[VisitedSample | FailedVisit]):
    """Maps a visit to a sample; the result depends on the arguments, the position and the files alone.

    Args:
        datasets: where samples are read.
        table: height and width of the buckets.
        params: image processing and limits.
        tokenizers: text encoder → caption → tokens.
        draws: what is drawn per position.
    """

    def __init__(
        self,
        datasets: Sequence[OpenDataset],
        table: BucketTable,
        params: DatasetParams,
        tokenizers: Mapping[str, Tokenizer],
        draws: DrawSettings,
    ) -> None:
        self.datasets, self.table, self.params = list(datasets), table, params
        self.tokenizers, self.draws = dict(tokenizers), draws
        self.rules = ImageRules(params.max_image_pixels, params.icc_to_srgb, keeps_alpha=draws.has_mask)
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
            return FailedVisit(str(error), skipped, isinstance(error, OutageError))
        last = skipped[-1]
        message = (
            f"{counted(most, 'sample')} in a row could not be used; the last: {last.shard} {last.key}: {last.reason}"
        )
        return FailedVisit(f"{message} (dataset.params.max_bad_in_row={most})", skipped)

    def _replacement(self, visit: Visit, attempt: int) -> int:
        """Another sample of the same bucket; which one depends on the position alone."""
        choices = self.datasets[visit.dataset].in_bucket(visit.bucket)
        return int(choices[generator(self.draws.seed, "replacement", visit.position, attempt).integers(len(choices))])

    def _read(self, visit: Visit, skipped: list[SkippedSample]) -> VisitedSample:
        height, width = self.table.sizes[visit.bucket]
        picture = self._picture(visit, height, width)
        draws, position = self.draws, visit.position
        dropped = draws.dropout.draw(draws.seed, position, list(self.tokenizers))
        shape = draws.grid.shape(height, width)
        return VisitedSample(
            pixels=picture.pixels,
            texts=self._texts(visit, dropped),
            dropped=dropped,
            posterior_noise=self._normal("posterior_noise", position, shape),
            noise=self._normal("noise", position, shape) if draws.has_noise else _NOTHING,
            timestep_draw=self._timestep_draw(visit),
            offset_noise=self._normal("offset_noise", position, shape[:1]) if draws.has_offset_noise else _NOTHING,
            input_noise=self._normal("input_noise", position, shape) if draws.has_input_noise else _NOTHING,
            mask=_NO_MASK if picture.alpha is None else picture.alpha,
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

    def _texts(self, visit: Visit, dropped: Mapping[str, bool]) -> dict[str, Encoded]:
        """The visit's caption for every text encoder; it is not even read where all of them go without."""
        caption = ""
        if any(not dropped[name] for name in self.tokenizers):
            chance = partial(_chance, self.draws.seed, visit.position)
            caption = self.datasets[visit.dataset].captioner(visit.sample, chance)
        pairs = self.tokenizers.items()
        return {name: tokenizer.encode_counted("" if dropped[name] else caption) for name, tokenizer in pairs}

    def _timestep_draw(self, visit: Visit) -> float:
        draws = self.draws
        draw = float(generator(draws.seed, "timestep", visit.position).random(dtype=np.float32))
        if not draws.is_stratified:
            return draw
        step = visit.position - visit.slot  # the first position of a step names it
        stratum = _strata(draws.seed, step, visit.step_samples)[visit.slot]
        # Rounding to float32 may give 1, which is no draw from [0, 1).
        return min((float(stratum) + draw) / visit.step_samples, 1.0 - 2.0**-24)

    def _normal(self, purpose: str, position: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return generator(self.draws.seed, purpose, position).standard_normal(shape, dtype=np.float32)


def _chance(seed: int, position: int, purpose: str) -> np.random.Generator:
    return generator(seed, purpose, position)


@lru_cache(maxsize=8)
def _strata(seed: int, step: int, count: int) -> NDArray[np.int64]:
    """Which part of [0, 1) each slot of a step draws from; shuffled, because neighbouring slots share a shard."""
    return generator(seed, "strata", step).permutation(count)
