import numpy as np
import pytest

from sd_training.data.order.buckets import BucketTable, histogram, ladder, ladders, merge_small
from sd_training.errors import ConfigError
from tests.cpu_time import least_cpu_s


def arrays(*sizes: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Widths and heights of (width, height) pairs."""
    return tuple(np.array(sides, dtype=np.int32) for sides in zip(*sizes, strict=True))  # type: ignore[return-value]


def test_a_ladder_is_what_its_limits_say() -> None:
    sizes = ladder(max_area=512 * 512, step=64, min_side=256, max_side=1024, max_aspect=3.0)
    assert (512, 512) in sizes
    assert {(height, width) for height, width in sizes} == {(width, height) for height, width in sizes}
    assert all(h % 64 == w % 64 == 0 and min(h, w) >= 256 and max(h, w) <= 1024 for h, w in sizes)
    assert all(h * w <= 512 * 512 and max(h, w) / min(h, w) <= 3 for h, w in sizes)
    # One more step of the one side or of the other passes the area.
    assert all(max((h + 64) * w, h * (w + 64)) > 512 * 512 for h, w in sizes)
    assert [w / h for h, w in sizes] == sorted(w / h for h, w in sizes)


def test_limits_between_steps() -> None:
    assert ladder(max_area=100, step=8, min_side=5, max_side=15, max_aspect=1) == [(8, 8)]
    with pytest.raises(ConfigError, match="no size has sides from 64 to 32"):
        ladder(max_area=4096, step=8, min_side=64, max_side=32, max_aspect=2)


def test_smaller_ladders_for_images_that_must_not_grow() -> None:
    sizes = ladders(max_area=256 * 256, step=64, min_side=64, max_side=512, max_aspect=2.0)
    assert {(256, 256), (128, 128), (64, 64)} <= set(sizes)
    assert len(sizes) == len(set(sizes))


def test_nearest_aspect_by_logarithm() -> None:
    """Between 1:2 and 1:1, 2^-0.5 is the middle; portrait and landscape are treated alike."""
    table = BucketTable(((64, 64), (64, 128), (128, 64)))
    widths, heights = arrays((1000, 1000), (1000, 720), (1000, 700), (720, 1000), (700, 1000), (5000, 10), (10, 5000))
    assert table.assign(widths, heights).tolist() == [0, 0, 1, 0, 2, 1, 2]


def test_height_comes_first_in_sizes() -> None:
    table = BucketTable(((32, 96), (96, 32)))
    assert table.assign(*arrays((300, 100), (100, 300))).tolist() == [0, 1]


def test_several_sizes_of_one_aspect() -> None:
    table = BucketTable(((64, 64), (256, 256), (128, 128)))
    widths, heights = arrays((300, 300), (255, 300), (128, 128), (64, 64), (20, 20))
    assert table.assign(widths, heights).tolist() == [1, 2, 2, 0, 0]


def test_nothing_is_enlarged_unless_allowed() -> None:
    table = BucketTable(((64, 64), (128, 128), (64, 128)), upscale=False)
    widths, heights = arrays((128, 128), (100, 100), (128, 64), (120, 64), (63, 200), (10, 10))
    assert table.assign(widths, heights).tolist() == [1, 0, 2, 0, -1, -1]


@pytest.mark.parametrize("step", [16, 64])
def test_smaller_ladders_leave_large_images_alone(step: int) -> None:
    """Aspects of the smaller ladders lie between those of the full one; a large image must not be drawn to them."""
    limits = {"max_area": 512 * 512, "step": step, "min_side": 64, "max_side": 1024, "max_aspect": 3.0}
    full, all_sizes = BucketTable(tuple(ladder(**limits))), BucketTable(tuple(ladders(**limits)), upscale=False)
    aspects = np.exp(np.linspace(-1.2, 1.2, 500))
    widths, heights = ((2048 * side).astype(np.int32) for side in (np.sqrt(aspects), 1 / np.sqrt(aspects)))
    chosen, expected = all_sizes.assign(widths, heights), full.assign(widths, heights)
    assert [all_sizes.sizes[bucket] for bucket in chosen] == [full.sizes[bucket] for bucket in expected]


def test_small_images_go_to_the_largest_ladder_whose_nearest_size_they_cover() -> None:
    table = BucketTable(tuple(ladders(512 * 512, 64, 64, 1024, 3.0)), upscale=False)
    widths, heights = arrays((512, 512), (511, 511), (700, 300), (1024, 256), (63, 500))
    sizes = [table.sizes[bucket] if bucket >= 0 else None for bucket in table.assign(widths, heights)]
    assert sizes == [(512, 512), (320, 320), (256, 512), (192, 576), None]


def test_no_image_is_enlarged_by_any_ladder() -> None:
    rng = np.random.default_rng(3)
    widths, heights = rng.integers(32, 1500, (2, 20_000)).astype(np.int32)
    table = BucketTable(tuple(ladders(512 * 512, 32, 64, 1024, 2.5)), upscale=False)
    bucket = table.assign(widths, heights)
    height, width = np.array(table.sizes)[bucket].T
    assert (((widths >= width) & (heights >= height)) | (bucket < 0)).all()
    assert ((bucket >= 0) == (np.minimum(widths, heights) >= 64)).all()


def test_unknown_sizes_have_no_bucket_but_a_single_one() -> None:
    assert BucketTable(((64, 64),)).assign(*arrays((0, 0), (9, 9))).tolist() == [0, 0]
    assert BucketTable(((64, 64), (64, 128))).assign(*arrays((0, 0), (9, 9))).tolist() == [-1, 0]


def test_small_buckets_join_the_nearest() -> None:
    table = BucketTable(((64, 64), (64, 96), (64, 192)))
    bucket_of = np.array([0] * 10 + [1] * 3 + [2] * 4, dtype=np.int32)
    merged, merges = merge_small(bucket_of, table, 8)
    assert merges == [(1, 0, 3), (2, 0, 4)]
    assert merged.tolist() == [0] * 17
    merged, merges = merge_small(bucket_of, table, 4)
    assert merges == [(1, 0, 3)]
    assert histogram(merged, table) == [((64, 64), 13), ((64, 192), 4)]
    assert merge_small(bucket_of, table, 3)[1] == []


def test_a_chain_of_small_buckets() -> None:
    table = BucketTable(((64, 64), (64, 80), (64, 96), (64, 320)))
    bucket_of = np.array([0] * 2 + [1] * 3 + [2] * 4 + [3] * 20, dtype=np.int32)
    merged, merges = merge_small(bucket_of, table, 9)
    assert [(merge.source, merge.target) for merge in merges] == [(0, 1), (2, 1)]
    assert histogram(merged, table) == [((64, 80), 9), ((64, 320), 20)]


def test_joining_enlarges_nothing() -> None:
    table = BucketTable(((128, 128), (128, 160), (64, 96)), upscale=False)
    bucket_of = np.array([0] * 2 + [1] * 10 + [2] * 10, dtype=np.int32)
    assert merge_small(bucket_of, table, 8)[1] == [(0, 2, 2)]
    assert merge_small(bucket_of, BucketTable(table.sizes), 8)[1] == [(0, 1, 2)]


def test_what_could_only_be_enlarged_is_left_out() -> None:
    table = BucketTable(((128, 128), (128, 160), (64, 96)), upscale=False)
    bucket_of = np.array([0] * 10 + [1] * 10 + [2] * 2, dtype=np.int32)
    merged, merges = merge_small(bucket_of, table, 8)
    assert merges == [(2, -1, 2)]
    assert merged.tolist() == [0] * 10 + [1] * 10 + [-1] * 2


def test_larger_buckets_fill_a_small_one_before_it_is_left_out() -> None:
    table = BucketTable(((128, 128), (64, 64), (256, 64)), upscale=False)
    bucket_of = np.array([0] * 6 + [1] * 5 + [2] * 20, dtype=np.int32)
    merged, merges = merge_small(bucket_of, table, 8)
    assert merges == [(0, 1, 6)]
    assert histogram(merged, table) == [((64, 64), 11), ((256, 64), 20)]


def test_a_million_images_are_assigned_by_few_operations_on_arrays() -> None:
    """Image by image, in Python, it would be a hundred times slower."""
    rng = np.random.default_rng(0)
    widths, heights = rng.integers(100, 3000, (2, 1_000_000)).astype(np.int32)
    table = BucketTable(tuple(ladder(1 << 20, 64, 512, 2048, 3.0)))
    bucket_of = table.assign(widths, heights)
    logs = np.array([np.log(w / h) for h, w in table.sizes])
    one_search = least_cpu_s(lambda: np.searchsorted(np.unique(logs), np.log(widths / heights)))
    assert least_cpu_s(lambda: table.assign(widths, heights)) < 8 * one_search  # twice
    some = rng.integers(0, 1_000_000, 2000)
    distance = abs(np.log(widths[some] / heights[some])[:, None] - logs)
    assert np.allclose(distance[np.arange(2000), bucket_of[some]], distance.min(axis=1))
