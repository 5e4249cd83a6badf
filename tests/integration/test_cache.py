"""Training from a cache of latents and text states is online training, for several kinds of models; what does not fit a
cache is refused; a builder killed at any moment leaves no wrong row."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from scripts import cache_latents
from sd_training.build import cache as building
from sd_training.data.samples.cache import CACHE_FILE, DTYPES
from sd_training.errors import ConfigError
from sd_training.training import scaled_pixels
from tests import makers
from tests.family_makers import save_pipeline
from tests.faults.fork_server import shared_server
from tests.integration.training import checkpoint_tensors, losses, options, prepare, train, train_in_processes

FAMILIES = ("stable_diffusion", "sdxl", "sd3")
CHUNK_BYTES = 4096
HALF_ULP = {"fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of rounding; bf16 keeps 8 bits, fp16 11, the first of which is not stored."""


def write_shards(folder: Path) -> Path:
    """Wide, tall and square pictures with two captions each; one cannot be decoded."""
    samples = []
    for number, sample in enumerate(
        [
            *makers.caption_samples(10, width=48, height=32),
            *makers.caption_samples(10, first=10, width=32, height=48),
            *makers.caption_samples(10, first=20, width=32, height=32),
        ]
    ):
        captions = [f"picture {number}", f"one of {number % 4}"]
        samples.append({**sample, "txt": json.dumps(captions)})
    samples[4]["jpg"] = makers.encode(makers.picture(4, 200, 200))[:-300]
    makers.write_shard(folder / "000.tar", samples)
    return folder


def small_pipeline(folder: Path, seed: int = 0) -> Path:
    """The cache holds nothing of the UNet."""
    return makers.save_tiny_pipeline(folder, seed, unet=makers.SMALLER_UNET)


class Home(NamedTuple):
    """A pipeline, and shards."""

    folder: Path
    pipeline: Path
    shards: Path

    def argv(self, run: str, **changes: Any) -> list[str]:
        """Six optimizer steps over all buckets: more samples than there are, so that the bad one is among them."""
        values = {
            "experiment__num_examples_to_see": 48,
            "experiment__save_every": 6,
            "dataset__params__buckets__mode": "table",
            "dataset__params__buckets__sizes": "[[16,16],[16,24],[24,16]]",
            "dataset__params__crop": "center",
            "dataset__params__max_bad_fraction": 1,
            "dataset__params__index_dir": self.folder / "index",
            "conditioning__dropout_prob": 0.2,
            "conditioning__encoder_dropout_prob": 0.2,
            "trainer__accelerator": "cpu",
        }
        return options(self.folder / run, self.pipeline, self.shards, **{**values, **changes})

    def make(self, name: str, *words: str, **changes: Any) -> Path:
        """A cache."""
        folder = self.folder / name
        cache_latents.main([*self.argv("unused", **changes), f"out={folder}", *words])
        return folder


@pytest.fixture(scope="module", params=FAMILIES)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp(request.param)
    return Home(folder, save_pipeline(request.param, folder / "pipeline"), write_shards(folder / "shards"))


@pytest.fixture(scope="module")
def sd2(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("one")
    return Home(folder, small_pipeline(folder / "pipeline"), write_shards(folder / "shards"))


def end_of(run_dir: Path) -> tuple[list[float], dict[str, Tensor]]:
    return losses(run_dir), checkpoint_tensors(run_dir, 6)


def assert_equal(run_dir: Path, other: Path) -> None:
    (first, tensors), (second, others) = end_of(run_dir), end_of(other)
    assert first == second
    assert tensors.keys() == others.keys()
    assert [name for name, value in tensors.items() if not torch.equal(value, others[name])] == []


def bad_rows(cache: Path) -> list[str]:
    """Why pictures have no row."""
    found = list[str]()
    for path in sorted(cache.glob("moments-*")):
        with safe_open(path, "pt") as file:
            found += json.loads(file.metadata()["bad"]).values()
    return found


def skipped(run_dir: Path) -> list[tuple[str, str, int]]:
    """Samples that training has replaced."""
    path = run_dir / "bad_samples.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [(row["key"], row["reason"], row["position"]) for row in rows]


def test_training_from_a_cache_is_online_training(home: Home) -> None:
    cache = home.make("cache", "dtype=fp32")
    assert len(bad_rows(cache)) == 1
    train(home.argv("online"))
    run = train(home.argv("cached", dataset__cache__path=cache))
    assert_equal(home.folder / "online", home.folder / "cached")
    batch = next(iter(run.data.loader(0, lambda: 0)))
    assert batch.moments.shape[0] == 8 and batch.pixels.shape == (8, 0) and batch.tokens == {}
    assert skipped(home.folder / "cached") == skipped(home.folder / "online") != []


def test_a_cache_under_bf16_autocast(sd2: Home) -> None:
    """The frozen parts of such a run are copies in bf16, for the builder as in training."""
    cache = sd2.make("autocast", "dtype=fp32", model__mixed_precision="bf16")
    train(sd2.argv("autocast_online", model__mixed_precision="bf16"))
    train(sd2.argv("autocast_cached", model__mixed_precision="bf16", dataset__cache__path=cache))
    assert_equal(sd2.folder / "autocast_online", sd2.folder / "autocast_cached")


@pytest.mark.parametrize("dtype", HALF_ULP)
def test_stored_rows_are_rounded_once(sd2: Home, dtype: str) -> None:
    """Every field of every batch of an epoch; what is not stored is equal to the bit."""
    cache = sd2.make(f"cache_{dtype}", f"dtype={dtype}")
    online, cached = prepare(sd2.argv("x")), prepare(sd2.argv("x", dataset__cache__path=cache))
    family, wrong = online.module.family, list[str]()
    for plain, stored in zip(online.data.loader(0, lambda: 0), cached.data.loader(0, lambda: 0), strict=True):
        with torch.no_grad():
            moments = family.moments(scaled_pixels(plain.pixels), "fp32")
            states = family.encode_text(
                "text_encoder", plain.tokens["text_encoder"], plain.token_masks["text_encoder"]
            )[0]
        for exact, kept in ((moments, stored.moments), (states, stored.text_states["text_encoder"])):
            assert kept.dtype == DTYPES[dtype] and torch.equal(exact.to(DTYPES[dtype]), kept)
            normal = exact.abs() > 2.0**-14  # fp16 has fewer bits below
            assert ((exact - kept.float()).abs() <= HALF_ULP[dtype] * exact.abs())[normal].all()
        for name in ("noise", "posterior_noise", "timestep_draw", "original_size", "crop_top_left", "sample_ids"):
            wrong += [] if torch.equal(getattr(plain, name), getattr(stored, name)) else [name]
    assert wrong == []


def test_random_crops_and_online_text(sd2: Home) -> None:
    changes = {
        "dataset__params__crop": "random",
        "dataset__params__buckets__mode": "off",
        "dataset__params__buckets__sizes": "null",
    }
    cache = sd2.make("crops", "crops=3", "text=none", "dtype=fp32", **changes)
    run = prepare(sd2.argv("crops_run", dataset__cache__path=cache, **changes))
    batches = list(run.data.loader(0, lambda: 0))
    assert all(batch.moments.numel() and batch.tokens["text_encoder"].numel() for batch in batches)
    assert len({tuple(place) for batch in batches for place in batch.crop_top_left.tolist()}) > 3


@pytest.mark.parametrize(("strategy", "workers"), [("ddp", 1), ("fsdp", 0)])
def test_two_processes(sd2: Home, strategy: str, workers: int) -> None:
    """Also with loader processes of builder and run; what they read does not depend on the strategy."""
    cache, runs = sd2.folder / "two", {}
    changes = {"distributed__strategy": strategy, "system__batch_size": 4, "system__workers": workers}
    words = [*sd2.argv("unused", **changes), f"out={cache}", "dtype=fp32", "processes=2"]
    train_in_processes(words, 2, "scripts.cache_latents")
    for name, more in (("online", {"system__workers": 0}), ("cached", {"dataset__cache__path": cache})):
        runs[name] = sd2.folder / f"{strategy}_{name}"
        train_in_processes(sd2.argv(runs[name].name, **{**changes, **more}), 2)
    assert_equal(runs["online"], runs["cached"])


def refused(home: Home, cache: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        run = prepare(home.argv("refused", dataset__cache__path=cache, **changes))
        run.data.prepare_data()
    return str(error.value)


def test_what_does_not_fit_is_refused_by_name(sd2: Home) -> None:
    cache = sd2.make("cache", "dtype=fp32")
    other = sd2._replace(pipeline=small_pipeline(sd2.folder / "other", seed=1))
    text = refused(other, cache)
    assert "weights of model.vae differ" in text and "weights of model.text_encoder differ" in text
    words = small_pipeline(sd2.folder / "words")
    path = words / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 12}))
    text = refused(sd2._replace(pipeline=words), cache)
    assert "tokenizer of model.text_encoder differ" in text and "weights" not in text
    shards = write_shards(sd2.folder / "shards_2")
    makers.write_shard(shards / "000.tar", makers.caption_samples(30, first=7))
    assert "files of dataset.params.path differ" in refused(sd2._replace(shards=shards), cache)
    assert "sizes of dataset.params.buckets" in refused(sd2, cache, dataset__params__buckets__sizes="[[16,16],[16,32]]")
    assert "captions" in refused(sd2, cache, dataset__params__captions__prefix="photo of ")
    assert "model.vae_precision was fp32, now bf16" in refused(sd2, cache, model__vae_precision="bf16")
    assert "dataset.params.crop" in refused(sd2, cache, dataset__params__crop="random")
    assert "objective.masked_loss" in refused(sd2, cache, objective__masked_loss="alpha")
    assert "holds no cache.json" in refused(sd2, sd2.folder)
    next(cache.glob("moments-*")).rename(sd2.folder / "away")
    assert "is not finished: 1 of" in refused(sd2, cache)


def test_a_filter_may_keep_less(sd2: Home) -> None:
    cache = sd2.make("all", "dtype=fp32", "text=none")
    changes = {"dataset__params__filters": "{original_width: '<=60'}", "system__batch_size": 2}
    run = prepare(sd2.argv("less", dataset__cache__path=cache, **changes))
    assert next(iter(run.data.loader(0, lambda: 0))).moments.numel()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["crops=2"], "crops: 2, but dataset.params.crop is center"),
        (["dtype=fp8"], "dtype: is 'fp8'"),
        (["text=pooled"], "text: pooled, but states are read from every text encoder"),
        (
            ["dataset.params.captions.tag_separator=,", "dataset.params.captions.shuffle_tags_prob=0.5"],
            "dataset.params.captions.shuffle_tags_prob: captions are arranged anew",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused(sd2: Home, words: list[str], message: str) -> None:
    samples = [{**sample, "txt": "a, b, c"} for sample in makers.caption_samples(8)]
    tags = sd2._replace(shards=makers.write_shard(sd2.folder / "tags" / "000.tar", samples).parent)
    with pytest.raises(ConfigError, match=message):
        tags.make("none", *words)
    assert not (sd2.folder / "none" / CACHE_FILE).exists()


def test_a_full_disk_is_found_before_the_start(sd2: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_latents, "_RESERVE", 2.0**60)
    with pytest.raises(ConfigError, match="GiB are needed"):
        sd2.make("full")
    assert not (sd2.folder / "full").exists()


def contents(folder: Path) -> dict[str, Any]:
    """File → metadata and tensors; the header's order of the metadata changes from process to process."""
    found: dict[str, Any] = {CACHE_FILE: (folder / CACHE_FILE).read_text()}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key).numpy().tobytes() for key in file.keys()}  # noqa: SIM118
            found[path.name] = file.metadata(), tensors
    return found


def build_in_small_chunks(words: list[str]) -> None:
    """In a process of the fork server."""
    building._CHUNK_BYTES = CHUNK_BYTES
    cache_latents.main(words)


def kills(home: Home, count: int, num_files: int) -> Iterator[tuple[int | None, set[str]]]:
    """The same builder again and again, ended by SIGKILL some files on; yields its status and the files after each."""
    folder, chance = home.folder / "killed", random.Random(count)
    target, words = f"{__name__}:{build_in_small_chunks.__name__}", [*home.argv("unused"), f"out={folder}"]

    def names() -> set[str]:
        return {path.name for path in folder.iterdir()} if folder.exists() else set()

    for _ in range(count):
        goal = len(names()) + chance.randint(1, max(1, (num_files - len(names())) // 2))
        process = shared_server().start(target, words, home.folder / "killed.log", os.environ)
        while process.poll() is None and len(names()) < goal:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.01))
        process.send(signal.SIGKILL)
        yield process.wait(60), names()


def test_a_killed_builder_goes_on(sd2: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice; `CACHE_KILLS=20` says how often."""
    monkeypatch.setattr(building, "_CHUNK_BYTES", CHUNK_BYTES)
    whole, statuses = contents(sd2.make("whole")), []
    assert len(whole) > 20
    for status, names in kills(sd2, int(os.environ.get("CACHE_KILLS", "2")), len(whole)):
        assert {name.removesuffix(".partial") for name in names} <= whole.keys()
        statuses.append(status)
    assert -signal.SIGKILL in statuses
    assert contents(sd2.make("killed")) == whole
