import io
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sd_training.config.plan import BatchPlan
from sd_training.data.index.report import report_text
from sd_training.errors import CheckpointError, ConfigError, DataError
from sd_training.types import PixelBatch
from tests import makers
from tests.unit.data.making import equal_bits, joined, stream, training_data

AUGMENTED = {"crop": "random", "flip_prob": 0.5, "dropout_prob": 0.3}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of 16 pictures of 40 x 32, one of them damaged."""
    folder = tmp_path_factory.mktemp("data")
    samples = makers.caption_samples(32)
    samples[5]["jpg"] = samples[5]["jpg"][:100]
    makers.write_shard(folder / "0.tar", samples[:16])
    makers.write_shard(folder / "1.tar", samples[16:])
    return folder


def plan(world: int = 1, accumulation: int = 1, steps: int = 10) -> BatchPlan:
    return BatchPlan(
        micro_batch=8 // world // accumulation, accumulation=accumulation, processes=world, num_examples=8 * steps
    )


@pytest.fixture(scope="module")
def reference(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> PixelBatch:
    index_dir = str(tmp_path_factory.mktemp("index"))
    return joined(stream(training_data(shards, plan(), index_dir=index_dir, **AUGMENTED)))


def test_shapes_and_ranges(reference: PixelBatch) -> None:
    assert reference.pixels.shape == (80, 3, 16, 16) and reference.pixels.dtype == torch.uint8
    assert reference.tokens["text_encoder"].shape == (80, 16) and reference.tokens["text_encoder"].dtype == torch.int64
    assert reference.noise.shape == reference.posterior_noise.shape == (80, 4, 8, 8)
    assert reference.noise.dtype == torch.float32
    assert not torch.equal(reference.noise, reference.posterior_noise)
    assert reference.timestep_draw.dtype == torch.float32
    assert reference.timestep_draw.min() >= 0 and reference.timestep_draw.max() < 1
    assert reference.positions.tolist() == list(range(80))


def test_each_good_sample_once_per_epoch(reference: PixelBatch) -> None:
    for first in (0, 32):
        seen = reference.sample_ids[first : first + 32].tolist()
        assert len(set(seen) - {5}) == 31  # the damaged one was replaced by another
    assert 5 not in reference.sample_ids


@pytest.mark.parametrize(
    ("world", "workers", "accumulation"),
    list(itertools.product((1, 2, 4), (0, 2), (1, 2))),
    ids=lambda value: str(value),
)
def test_the_stream_depends_on_nothing_but_position(
    shards: Path, reference: PixelBatch, world: int, workers: int, accumulation: int
) -> None:
    data = training_data(shards, plan(world, accumulation), workers=workers, **AUGMENTED)
    batches = [batch for rank in range(world) for batch in stream(data, rank)]
    assert {len(batch.positions) for batch in batches} == {8 // world // accumulation}
    assert equal_bits(joined(batches), reference)


@pytest.mark.parametrize(("first_step", "workers"), [(1, 0), (3, 2), (7, 0), (9, 2)])
def test_a_resumed_stream_is_the_rest_of_the_uninterrupted_one(
    shards: Path, reference: PixelBatch, first_step: int, workers: int
) -> None:
    data = training_data(shards, plan(accumulation=2), workers=workers, **AUGMENTED)
    loader = data.loader(0, lambda: first_step)
    assert len(loader) == 20
    batches = list(loader)
    assert len(batches) == 2 * (10 - first_step)
    rest = joined(batches)
    assert rest.positions.tolist() == list(range(8 * first_step, 80))
    whole = stream(training_data(shards, plan(accumulation=2), **AUGMENTED))
    assert equal_bits(joined(whole), reference)
    assert equal_bits(rest, joined(whole[2 * first_step :]))


def test_other_seed_other_stream(shards: Path, reference: PixelBatch) -> None:
    other = joined(stream(training_data(shards, plan(), seed=8, **AUGMENTED)))
    for name in ("pixels", "noise", "posterior_noise", "timestep_draw", "sample_ids"):
        assert not torch.equal(getattr(other, name), getattr(reference, name)), name


def test_global_random_state_is_neither_used_nor_moved(shards: Path, reference: PixelBatch) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    assert equal_bits(joined(stream(training_data(shards, plan(), **AUGMENTED))), reference)
    assert torch.equal(torch.get_rng_state(), before)


def test_conditioning_dropout_has_its_rate_and_the_empty_caption(tmp_path: Path) -> None:
    makers.caption_shards(tmp_path, shards=1)
    data = training_data(tmp_path, BatchPlan(10, 1, 1, 1000), dropout_prob=0.3)
    tokens = joined(stream(data)).tokens["text_encoder"]
    dropped = (tokens == torch.from_numpy(data.tokenizers["text_encoder"].encode("").tokens)).all(dim=1)
    assert 250 < int(dropped.sum()) < 350


def test_without_dropout_tokens_are_the_captions(shards_dir: Path) -> None:
    data = training_data(shards_dir)
    batch = joined(stream(data))
    for sample, tokens in zip(batch.sample_ids.tolist(), batch.tokens["text_encoder"], strict=True):
        caption = f"a {makers.COLOURS[sample % 3]} picture"
        assert torch.equal(tokens, torch.from_numpy(data.tokenizers["text_encoder"].encode(caption).tokens))


def test_flips_and_crops_are_drawn(tmp_path: Path) -> None:
    makers.write_shard(tmp_path / "a.tar", makers.caption_samples(1, width=64, height=16))
    still = joined(stream(training_data(tmp_path, BatchPlan(1, 1, 1, 100))))
    assert len(still.pixels.unique(dim=0)) == 1
    flipped = joined(stream(training_data(tmp_path, BatchPlan(1, 1, 1, 100), flip_prob=0.5)))
    assert len(flipped.pixels.unique(dim=0)) == 2
    assert torch.equal(flipped.pixels.unique(dim=0)[0], flipped.pixels.unique(dim=0)[1].flip(-1))
    cropped = joined(stream(training_data(tmp_path, BatchPlan(1, 1, 1, 100), crop="random")))
    assert len(cropped.pixels.unique(dim=0)) > 30  # of 49 offsets


def test_autoencoder_training_needs_no_noise_and_no_tokenizer(shards_dir: Path) -> None:
    batch = stream(training_data(shards_dir, has_noise=False, tokenizer=None, dropout_prob=0.5))[0]
    assert batch.noise.shape == (4, 0) and batch.tokens == {}
    assert batch.posterior_noise.shape == (4, 4, 8, 8)


def test_classes_become_prompts_drawn_per_visit(tmp_path: Path) -> None:
    samples = [{"__key__": f"{i}", "jpg": makers.encode(makers.picture(i)), "cls": i} for i in range(2)]
    makers.write_shard(tmp_path / "a.tar", samples)
    prompts = {0: "zero", 1: ["one", "a one"]}
    data = training_data(tmp_path, BatchPlan(2, 1, 1, 100), kind="ClassificationWebDataset", idx_to_prompt=prompts)
    batch = joined(stream(data))
    drawn = {"zero": 0, "one": 0, "a one": 0}
    for sample, tokens in zip(batch.sample_ids.tolist(), batch.tokens["text_encoder"], strict=True):
        (prompt,) = [
            p for p in drawn if torch.equal(tokens, torch.from_numpy(data.tokenizers["text_encoder"].encode(p).tokens))
        ]
        assert (prompt == "zero") == (sample == 0)
        drawn[prompt] += 1
    assert drawn["zero"] == 50 and 12 < drawn["one"] < 38


def test_report(shards_dir: Path) -> None:
    data = training_data(shards_dir, filters={"original_width": ">=50", "pwatermark": "<0.25"})
    report = data.report()
    (only,) = report
    assert (only.place, only.num_selected) == ("32 samples in 2 shards", 8)
    assert (only.epochs, only.num_steps) == (4.0, 8)
    text = report_text(report)
    assert "32 samples in 2 shards" in text
    assert "filter original_width >= 50: 22 samples" in text
    assert "left: 8 samples" in text
    assert "8 samples 4.00 times each, in 8 steps" in text


def test_bad_filters_are_config_errors(shards_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.params\.filters\.original_width"):
        training_data(shards_dir, filters={"original_width": "__import__('os')"}).report()


def test_a_checkpoint_of_the_same_data_is_accepted(shards_dir: Path) -> None:
    state = training_data(shards_dir, plan(1, 2)).state_dict()
    known = ["options", "fingerprint", "num_samples", "seed", "global_batch", "resampled", "lanes", "window"]
    assert list(state) == known  # those of checkpoints that were written long ago
    training_data(shards_dir, plan(2, 1, steps=50), workers=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 8}, "experiment.seed was 7, now 8"),
        (
            {"filters": {"original_width": ">=50"}},
            "dataset.params.filters was .*>=50.*; 32 samples were selected, now 22",
        ),
        ({"resolution": 32}, "dataset.params.resolution was 16, now 32"),
        ({"buckets": {"mode": "table", "sizes": [[16, 24]]}}, 'dataset.params.buckets.mode was "off", now "table"'),
        ({"plan": BatchPlan(16, 1, 1, 160)}, "system.batch_size × .* × processes was 8, now 16"),
    ],
)
def test_a_checkpoint_of_other_data_is_refused(shards_dir: Path, options: dict[str, object], named: str) -> None:
    state = training_data(shards_dir, plan()).state_dict()
    with pytest.raises(CheckpointError, match=named) as error:
        training_data(shards_dir, **{"plan": plan(), **options}).load_state_dict(state)  # type: ignore[arg-type]
    assert state["fingerprint"] not in str(error.value)


def test_changed_files_are_told_from_changed_options(tmp_path: Path) -> None:
    folder = makers.caption_shards(tmp_path, shards=2)
    state = training_data(folder).state_dict()
    sorted(folder.glob("*.tar"))[1].unlink()
    with pytest.raises(CheckpointError, match=r"the files of dataset\.params\.path.* 32 samples were selected, now 16"):
        training_data(folder).load_state_dict(state)
    del state["options"]  # a checkpoint of an older version
    with pytest.raises(CheckpointError, match="32 samples were selected, now 16"):
        training_data(folder).load_state_dict(state)


def test_stopping_early_ends_the_loader_processes(shards_dir: Path) -> None:
    before = set(torch.multiprocessing.active_children())
    iterator = iter(training_data(shards_dir, workers=2).loader(0, lambda: 0))
    next(iterator)
    assert len(set(torch.multiprocessing.active_children()) - before) == 2
    del iterator
    assert set(torch.multiprocessing.active_children()) <= before


def test_a_shard_that_shrinks_during_training_is_an_error(tmp_path: Path) -> None:
    folder = makers.caption_shards(tmp_path, shards=1)
    data = training_data(folder)
    data.report()
    shard = folder / "000.tar"
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(DataError, match="has changed since it was indexed"):
        stream(data)


def test_only_bad_samples_end_the_run_without_a_traceback_from_a_worker(tmp_path: Path) -> None:
    makers.write_shard(tmp_path / "a.tar", [{"__key__": f"{i}", "jpg": b"broken", "txt": "x"} for i in range(20)])
    for workers in (0, 1):
        with pytest.raises(DataError, match="50 samples in a row could not be used") as error:
            stream(training_data(tmp_path, workers=workers))
        assert "Traceback" not in str(error.value)


def test_stratified_draws_take_one_from_each_part(shards_dir: Path) -> None:
    plan = BatchPlan(micro_batch=8, accumulation=1, processes=1, num_examples=80)
    draws = [batch.timestep_draw.numpy() for batch in stream(training_data(shards_dir, plan, is_stratified=True))]
    assert all(sorted((draw * 8).astype(int)) == list(range(8)) for draw in draws)
    places = np.concatenate(draws) * 8 % 1
    assert len({tuple((draw * 8).astype(int)) for draw in draws}) > 5  # another order every step
    assert abs(places.mean() - 0.5) < 0.1 and places.std() == pytest.approx(12**-0.5, abs=0.06)
    halves = training_data(shards_dir, BatchPlan(2, 2, 2, 80), is_stratified=True)
    split = joined([batch for rank in (0, 1) for batch in stream(halves, rank)]).timestep_draw
    assert np.array_equal(split.numpy(), np.concatenate(draws))


def test_masks_follow_crops_and_flips(tmp_path: Path) -> None:
    """The opaque part is red, so wherever the picture is red the mask counts."""
    image = Image.new("RGBA", (40, 24), (0, 0, 255, 0))
    image.paste((255, 0, 0, 255), (0, 0, 18, 24))
    stream_of = io.BytesIO()
    image.save(stream_of, "PNG")
    opaque = makers.encode(makers.picture(1, 40, 24))
    samples = [{"__key__": f"{i}", "png": stream_of.getvalue(), "txt": "a"} for i in range(7)]
    makers.write_shard(tmp_path / "0.tar", [*samples, {"__key__": "7", "jpg": opaque, "txt": "a"}])
    options = {"crop": "random", "flip_prob": 0.5, "has_mask": True}
    batch = joined(stream(training_data(tmp_path, BatchPlan(8, 1, 1, 64), **options)))
    assert batch.mask.shape == (64, 1, 16, 16) and batch.mask.dtype == torch.uint8
    whole = batch.sample_ids == 7
    assert (batch.mask[whole] == 255).all() and whole.sum() == 8
    red = (batch.pixels[~whole, 1].float() < 128) & (batch.pixels[~whole, 0].float() > 128)
    assert (red == (batch.mask[~whole, 0] > 127)).float().mean() > 0.99  # but for rounding where they meet
    assert 0.2 < red.float().mean() < 0.7 and len({float(r.float().mean()) for r in red}) > 5
    assert stream(training_data(tmp_path, BatchPlan(8, 1, 1, 64)))[0].mask.numel() == 0
