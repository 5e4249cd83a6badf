"""Options → the heights and widths that pictures are trained at."""

from collections.abc import Sequence

from sd_training.config.data_schema import DatasetParams
from sd_training.data.buckets import BucketTable, ladder, ladders
from sd_training.errors import ConfigError


def training_sizes(params: DatasetParams) -> BucketTable:
    """The buckets of a run; without buckets, the square of `resolution`.

    Raises:
        ConfigError: the options give no bucket.
    """
    side, buckets = params.resolution, params.buckets
    if buckets.mode == "off":
        return BucketTable(((side, side),))
    if buckets.mode == "table":
        return BucketTable(_given(buckets.sizes))
    make = ladder if buckets.upscale else ladders
    try:
        sizes = make(
            max_area=buckets.max_area or side * side,
            step=buckets.step,
            min_side=buckets.min_side or side // 2,
            max_side=buckets.max_side or side * 2,
            max_aspect=buckets.max_aspect,
        )
    except ValueError as error:
        raise ConfigError(f"dataset.params.buckets: {error}") from error
    return BucketTable(tuple(sizes), buckets.upscale)


def _given(sizes: list[list[int]] | None) -> tuple[tuple[int, int], ...]:
    if not sizes or any(len(size) != 2 for size in sizes):
        raise ConfigError("dataset.params.buckets.sizes: must be a list of [height, width] pairs with mode=table")
    return tuple(dict.fromkeys((height, width) for height, width in sizes))


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
