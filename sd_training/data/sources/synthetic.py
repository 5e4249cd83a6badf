"""Samples without any file, to measure a trainer without a disk: smooth fields of colour, captions of their number.

A field is a function of the place in the picture, so a crop is evaluated where it lies, at the size it has: no picture
is decoded or resized, whatever its size.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sd_training.config.data_schema import RemoteConfig, SyntheticConfig
from sd_training.data.order.order import generator
from sd_training.data.samples.image import CroppedImage, CropRequest, place
from sd_training.data.sources import base
from sd_training.data.sources.base import DatasetIndex, IndexedReader, Report, Row, Shard

_MOST_WAVES = 3.0
"""Waves of a field along one side, at most."""


class SyntheticSource(base.Source):
    """One shard of `config.num_samples` samples, whose sizes take turns.

    Args:
        config: `dataset.params.synthetic`.
    """

    shard_noun = "made-up set"

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__([], RemoteConfig())
        self.config, self.identity = config, f"synthetic {config.model_dump_json()}"

    def shards(self) -> list[Shard]:
        """As `Source.shards`."""
        return [Shard("synthetic", self.config.num_samples, self.identity)]

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """As `Source.rows`. `check:caption` stands for the content, which the seed decides."""
        for sample in range(self.config.num_samples):
            height, width = self.config.sizes[sample % len(self.config.sizes)]
            size = {"width": width, "height": height, "at:image_length": 3 * height * width}
            caption = f"sample {sample}, a field of colour {width} wide and {height} high"
            yield {"key": f"{sample:09d}", "caption": caption, "check:caption": self.config.seed, **size}

    def reader(self, index: DatasetIndex) -> IndexedReader:
        """As `Source.reader`."""
        return _FieldReader(index, self)


class _FieldReader(IndexedReader):
    """Makes the pictures; captions are in the index."""

    source: SyntheticSource

    def picture(self, sample: int, wanted: CropRequest, max_pixels: int, *, keeps_alpha: bool = False) -> CroppedImage:
        """As `IndexedReader.picture`."""
        height, width = (self._number(side, sample) for side in ("height", "width"))
        (left, top, right, bottom), crop_top_left = place(height, width, wanted)
        draws = generator(self.source.config.seed, "synthetic_image", sample).random((2, 2, 3, 1), dtype=np.float32)
        rows = _wave(draws[0], top / height, bottom / height, wanted.height)
        columns = _wave(draws[1], left / width, right / width, wanted.width)
        pixels = rows[:, :, None] + (columns[:, ::-1] if wanted.flip else columns)[:, None]
        alpha = np.full_like(pixels[:1], 255) if keeps_alpha else None
        return CroppedImage(pixels, (height, width), crop_top_left, alpha)


def _wave(draws: NDArray[np.float32], start: float, end: float, count: int) -> NDArray[np.uint8]:
    """[3, count] a sine per channel, 0 to 127, at the centres of `count` pixels between two places of [0, 1].

    Args:
        draws: [2, 3, 1] in [0, 1): number of waves, and phase.
    """
    places = start + (end - start) / count * (np.arange(count, dtype=np.float32) + 0.5)
    turns = _MOST_WAVES * draws[0] * places + draws[1]
    return (63.5 + 63.5 * np.sin(2 * np.pi * turns)).astype(np.uint8)
