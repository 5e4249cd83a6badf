"""Aspect-ratio buckets: at which heights and widths images are trained, and which sample goes into which bucket.

Sizes are (height, width) in pixels, as everywhere; image files have (width, height), and the two are easily swapped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sd_training.config.data_schema import DatasetParams
from sd_training.errors import ConfigError

Size = tuple[int, int]
"""(height, width) [pixels]."""
Buckets = NDArray[np.int32]
"""[N] number of a bucket in its table; -1 (`NO_BUCKET`) is none."""
NO_BUCKET = -1


class Merge(NamedTuple):
    """A bucket with too few samples, and the one they joined."""

    source: int
    target: int
    """`NO_BUCKET`: they are left out."""
    num_samples: int


def ladder(max_area: int, step: int, min_side: int, max_side: int, max_aspect: float) -> list[Size]:
    """For each width the largest height within `max_area`, mirrored, with the largest square.

    The rule of NovelAI's aspect-ratio bucketing (2022): sides are multiples of `step`.

    Args:
        max_area: largest height × width [pixels].
        step, min_side, max_side: of the sides [pixels].
        max_aspect: largest ratio of the longer to the shorter side.

    Raises:
        ConfigError: no size fits.
    """
    smallest = -(-min_side // step) * step
    sizes = set[Size]()
    for width in range(smallest, max_side + 1, step):
        height = min(max_side, max_area // width) // step * step
        if height >= smallest and max(width, height) / min(width, height) <= max_aspect:
            sizes |= {(height, width), (width, height)}
    square = min(max_side, int(max_area**0.5)) // step * step
    if square >= smallest:
        sizes.add((square, square))
    if not sizes:
        raise ConfigError(
            f"dataset.params.buckets: no size has sides from {min_side} to {max_side} pixels in steps of {step}, at "
            f"most {max_area:,} pixels and an aspect of at most {max_aspect:g}"
        )
    return sorted(sizes, key=lambda size: (size[1] / size[0], size))


def ladders(max_area: int, step: int, min_side: int, max_side: int, max_aspect: float) -> list[Size]:
    """The ladder, and smaller ones of half, a quarter, … of its area, for images that must not be enlarged.

    Ladder after ladder, each by rising aspect ratio; a size is listed once.
    """
    sizes = dict.fromkeys(ladder(max_area, step, min_side, max_side, max_aspect))
    area, smallest = max_area // 2, (-(-min_side // step) * step) ** 2
    while area >= smallest:
        sizes |= dict.fromkeys(ladder(area, step, min_side, max_side, max_aspect))
        area //= 2
    return list(sizes)


@dataclass(frozen=True)
class BucketTable:
    """The sizes of a run."""

    sizes: tuple[Size, ...]
    upscale: bool = True
    """Whether an image may be enlarged to fill its bucket. If not, `sizes` are ladders as `ladders` gives them: where
    the aspect ratio does not rise, another ladder begins."""

    def _log_aspects(self) -> NDArray[np.float64]:
        return np.array([np.log(width / height) for height, width in self.sizes])

    def _by_area(self) -> NDArray[np.intp]:
        """Buckets, the smallest first."""
        return np.argsort([height * width for height, width in self.sizes], kind="stable")

    def assign(self, widths: NDArray[np.int32], heights: NDArray[np.int32]) -> Buckets:
        """The bucket of each image: the nearest by |log aspect|.

        Of several with that aspect, the largest that needs no enlarging, or else the smallest, which enlarges least.
        Where nothing may be enlarged, the nearest of the largest ladder whose nearest bucket the image covers; without
        one, the largest bucket of any aspect that it covers; and none when there is none. An image of unknown size has
        no bucket unless there is only one to have.

        Args:
            widths, heights: [N] of the upright images [pixels]; 0 is unknown.
        """
        if len(self.sizes) == 1 and self.upscale:
            return np.zeros(len(widths), dtype=np.int32)
        bucket = np.full(len(widths), NO_BUCKET, dtype=np.int32)
        known = np.flatnonzero((widths > 0) & (heights > 0))
        choose = self._nearest_aspect if self.upscale else self._covered
        bucket[known] = choose(widths[known], heights[known], np.log(widths[known] / heights[known]))
        return bucket

    def _nearest_aspect(
        self, widths: NDArray[np.int32], heights: NDArray[np.int32], aspects: NDArray[np.float64]
    ) -> Buckets:
        logs, group_of, num_members = np.unique(self._log_aspects(), return_inverse=True, return_counts=True)
        nearest = np.searchsorted((logs[1:] + logs[:-1]) / 2, aspects)
        by_area = self._by_area()
        smallest = np.empty(len(logs), dtype=np.int32)
        smallest[group_of[by_area[::-1]]] = by_area[::-1]  # the last of a group stays
        bucket = smallest[nearest]
        for candidate in by_area[num_members[group_of[by_area]] > 1]:  # the largest comes last and stays
            height, width = self.sizes[candidate]
            covers = (nearest == group_of[candidate]) & (widths >= width) & (heights >= height)
            bucket[covers] = candidate
        return bucket

    def _covered(self, widths: NDArray[np.int32], heights: NDArray[np.int32], aspects: NDArray[np.float64]) -> Buckets:
        """Ladder by ladder, because one nearest aspect over all ladders would draw large images to small buckets."""
        bucket, sides, logs = np.full(len(widths), NO_BUCKET, dtype=np.int32), np.array(self.sizes), self._log_aspects()
        unassigned = np.arange(len(widths))
        members = np.split(np.arange(len(logs), dtype=np.int32), np.flatnonzero(np.diff(logs) <= 0) + 1)
        for own in sorted(members, key=lambda buckets: -int(sides[buckets].prod(axis=1).max())):
            nearest = own[np.searchsorted((logs[own][1:] + logs[own][:-1]) / 2, aspects[unassigned])]
            fits = (heights[unassigned] >= sides[nearest, 0]) & (widths[unassigned] >= sides[nearest, 1])
            bucket[unassigned[fits]] = nearest[fits]
            unassigned = unassigned[~fits]
        for candidate in self._by_area():  # the others get the largest of any aspect they cover
            height, width = self.sizes[candidate]
            bucket[unassigned[(widths[unassigned] >= width) & (heights[unassigned] >= height)]] = candidate
        return bucket


def merge_small(bucket_of: Buckets, table: BucketTable, min_count: int) -> tuple[Buckets, list[Merge]]:
    """Joins each bucket that holds fewer than `min_count` samples with the nearest one in use, smallest bucket first.

    A batch has one bucket, and one with fewer samples than a batch could never fill it. Where nothing may be enlarged,
    a bucket joins one that is nowhere larger; its samples are left out when there is none.

    Args:
        bucket_of: without -1.
        min_count: samples that each bucket needs.

    Returns:
        The new buckets, -1 for samples that are left out, and what was joined with what.
    """
    merges: list[Merge] = []
    sizes, target_of = table.sizes, np.arange(len(table.sizes), dtype=np.int32)
    counts = np.bincount(bucket_of, minlength=len(sizes))

    def nearest(bucket: int, used: Sequence[int]) -> int:
        """The bucket in use that samples of `bucket` may join, nearest by |log aspect|, then by |log area|."""
        height, width = sizes[bucket]

        def distance(other: int) -> tuple[float, float, int]:
            aspect = np.log(width / height / (sizes[other][1] / sizes[other][0]))
            area = np.log(width * height / (sizes[other][1] * sizes[other][0]))
            return round(abs(float(aspect)), 9), round(abs(float(area)), 9), other

        others = [o for o in used if o != bucket]
        if not table.upscale:
            others = [o for o in others if sizes[o][0] <= height and sizes[o][1] <= width]
        return min(others, key=distance, default=NO_BUCKET)

    while len(used := np.flatnonzero(counts)) > 1 and len(short := np.flatnonzero((counts < min_count) & (counts > 0))):
        smallest_first = short[np.argsort(counts[short], kind="stable")].tolist()
        targets = {bucket: nearest(bucket, used.tolist()) for bucket in smallest_first}
        # The first that may join another; when none may, the first is left out.
        source = next((bucket for bucket in smallest_first if targets[bucket] != NO_BUCKET), smallest_first[0])
        merge = Merge(source, targets[source], int(counts[source]))
        merges.append(merge)
        target_of[target_of == merge.source] = merge.target
        counts[merge.source] = 0
        if merge.target != NO_BUCKET:
            counts[merge.target] += merge.num_samples
    return target_of[bucket_of], merges


def histogram(bucket_of: Buckets, table: BucketTable) -> list[tuple[Size, int]]:
    """(height, width) and samples of each bucket in use, in the order of the table."""
    counts = np.bincount(bucket_of, minlength=len(table.sizes))
    return [(size, int(count)) for size, count in zip(table.sizes, counts, strict=True) if count]


def training_sizes(params: DatasetParams) -> BucketTable:
    """The buckets of a run; without buckets, the square of `resolution`.

    Raises:
        ConfigError: the options give no bucket.
    """
    side, buckets = params.resolution, params.buckets
    if buckets.mode == "off":
        return BucketTable(((side, side),))
    if buckets.mode == "table":
        return BucketTable(tuple(dict.fromkeys((height, width) for height, width in buckets.sizes or ())))
    make = ladder if buckets.upscale else ladders
    shortest, longest = buckets.min_side or side // 2, buckets.max_side or side * 2
    sizes = make(buckets.max_area or side * side, buckets.step, shortest, longest, buckets.max_aspect)
    return BucketTable(tuple(sizes), buckets.upscale)


def level_channels(config: Mapping[str, Any]) -> Sequence[int]:
    """Channels of the encoder at each size, the picture's first, from an autoencoder's settings.

    Raises:
        LookupError: they are those of no autoencoder.
    """
    if "dim_mult" in config:
        return [config["base_dim"] * factor for factor in config["dim_mult"]]
    return config.get("block_out_channels") or config["encoder_block_out_channels"]


def size_problems(factor: int, sizes: Sequence[tuple[int, int]], patch_size: int = 1) -> list[str]:
    """A problem for each height or width [pixels] that is not a multiple of the downscale factor and the patches.

    UNets need no more: diffusers hands their upsamplers the size to reach when a level does not halve evenly.
    """
    option = "dataset.params.resolution" if len(sizes) == 1 else "dataset.params.buckets"
    multiple, problems = factor * patch_size, []
    patches = f" × the denoiser's patch size {patch_size}" if patch_size > 1 else ""
    for side in sorted({side for size in sizes for side in size if side % multiple}):
        below, above = side // multiple * multiple, (side // multiple + 1) * multiple
        near = f"{below} or {above}" if below else f"{above}"
        problems.append(
            f"{option}: {side} is not a multiple of the autoencoder's downscale factor {factor}{patches}; use {near}"
        )
    return problems
