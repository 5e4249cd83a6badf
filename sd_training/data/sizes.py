"""Options → the heights and widths that pictures are trained at."""

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
