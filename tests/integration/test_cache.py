"""Training from a cache of latents and text states is online training, for several kinds of models; what does not fit a
cache is refused; a builder killed at any moment leaves no wrong row."""

import json
import logging
import math
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

from scripts import bench_data, cache_latents
from sd_training.build import cache as building
from sd_training.build.cache import CacheBuilder
from sd_training.build.dry_run import describe, meta_networks, parameter_counts, run_memory
from sd_training.build.plan import make_plan
from sd_training.build.run import Run
from sd_training.config.load import load_config
from sd_training.data.samples.cache import CACHE_FILE, DTYPES
from sd_training.errors import ConfigError
from sd_training.models.flops import encoding_share
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


def validation_losses(run_dir: Path) -> list[str]:
    return [line for line in (run_dir / "validation.csv").read_text().splitlines() if line]


def pictures(run_dir: Path) -> dict[Path, bytes]:
    """What was drawn."""
    return {path.relative_to(run_dir): path.read_bytes() for path in run_dir.rglob("*.png")}


def test_cached_or_with_encoder_processes_a_run_has_the_same_bits(home: Home) -> None:
    """Buckets, two captions, dropped captions, a bad picture; validation and previews beside encoder processes. Of the
    first family one encoder process without them too, and two, each of which imports everything."""
    cache = home.make("cache", "dtype=fp32")
    assert len(bad_rows(cache)) == 1
    held_out = makers.write_shard(home.folder / "held_out" / "000.tar", makers.caption_samples(4)).parent
    shown = {"validation__path": held_out, "validation__every": 6, "validation__num_levels": 1}
    shown |= {"sampling__every": 6, "sampling__prompts": "[a]", "sampling__num_inference_steps": 1}
    train(home.argv("online", **shown))
    run = train(home.argv("cached", dataset__cache__path=cache))
    assert_equal(home.folder / "online", home.folder / "cached")
    batch = next(iter(run.data.loader(0, lambda: 0)))
    assert batch.moments.shape[0] == 8 and batch.pixels.shape == (8, 0) and batch.tokens == {}
    assert skipped(home.folder / "cached") == skipped(home.folder / "online") != []
    is_first = home.pipeline.parent.name.startswith(FAMILIES[0])
    for number, own in [(1, {}), (2, shown)] if is_first else [(1, shown)]:
        name = f"encoders_{number}"
        words = home.argv(name, distributed__encoders=number, system__workers=2 - number, **own)
        run = train(words)
        assert_equal(home.folder / "online", home.folder / name)
        assert skipped(home.folder / name) == skipped(home.folder / "online")
        assert ({"vae", "text_encoder"} <= {*run.module.idle}) == (not own)
        described = describe(make_plan(load_config(words), is_described=True))
        assert f"1 process and {number} encoder process" in described
        assert ("CPU: frozen, idle" in described) == (not own)
        metrics = (home.folder / name / "metrics.jsonl").read_text().splitlines()
        assert all(json.loads(row)["encoders_s"] > 0 for row in metrics)
    seen = [(validation_losses(own), pictures(own)) for own in (home.folder / "online", home.folder / name)]
    assert seen[0] == seen[1] and all(seen[0])
    counted = make_plan(load_config(home.argv("auto", distributed__encoders="auto"))).encoders
    share = encoding_share(load_config(words))
    assert counted == math.ceil(share / (1 - share)) > 0


@pytest.mark.parametrize("family", ["sana", "z_image", "qwen_image", "flux2"])
def test_one_code_for_a_picture_and_captions_of_their_own_lengths(family: str, tmp_path: Path) -> None:
    """An autoencoder without a posterior, masks that are shapes, and states of several layers. Two of them with encoder
    processes, which import everything."""
    home = Home(tmp_path, save_pipeline(family, tmp_path / "pipeline"), write_shards(tmp_path / "shards"))
    train(home.argv("online"))
    train(home.argv("cached", dataset__cache__path=home.make("cache", "dtype=fp32")))
    assert_equal(tmp_path / "online", tmp_path / "cached")
    if family in ("sana", "flux2"):
        train(home.argv("encoders", distributed__encoders=1, system__workers=1))
        assert_equal(tmp_path / "online", tmp_path / "encoders")


def test_a_cache_under_bf16_autocast(sd2: Home) -> None:
    """The frozen parts of such a run are copies in bf16, for the builder as in training; a run that casts their weights
    at every step has the same cache. Exports hold the originals, which are written once."""
    cache = sd2.make("autocast", "dtype=fp32", model__mixed_precision="bf16")
    saves = {"experiment__save_every": 3, "experiment__save_only_most_recent": "false"}
    train(sd2.argv("autocast_online", model__mixed_precision="bf16", **saves))
    train(sd2.argv("autocast_cached", model__mixed_precision="bf16", dataset__cache__path=cache))
    assert_equal(sd2.folder / "autocast_online", sd2.folder / "autocast_cached")
    cast = {"model__vae_precision": "bf16", "model__text_encoder_precision": "bf16"}
    prepare(sd2.argv("cast", dataset__cache__path=cache, **cast)).data.prepare_data()
    first, second = (sd2.folder / "autocast_online" / "pipelines" / f"step_{step}" for step in (3, 6))
    files = [path.relative_to(first) for path in first.glob("*/*.safetensors")]
    linked = {file.parent.name for file in files if (first / file).stat().st_ino == (second / file).stat().st_ino}
    assert linked == {"vae", "text_encoder"}


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


def write_tag_folder(folder: Path) -> Path:
    """Twelve square pictures, two of them with a lower score; captions are their tags and a score tag."""
    for part in ("pictures", "metadata"):
        (folder / part).mkdir(parents=True)
    for number in range(12):
        (folder / "pictures" / f"{number}.jpg").write_bytes(makers.encode(makers.picture(40 + number, 32, 32)))
        tags, score = ["red", "blue", f"thing {number % 3}"], 52 if number > 9 else 60
        record = {"path": f"pictures/{number}.jpg", "tags": tags, "score": score}
        (folder / "metadata" / f"{number}.json").write_text(json.dumps(record))
    return folder


def test_mixtures_tags_filters_and_validation(sd2: Home) -> None:
    """In one run, to the bit: two data sets, one of them of tags, a filter in one, held-out data beside the cache."""
    tags = {"type": "TagFolder", "params": {"path": str(write_tag_folder(sd2.folder / "tags"))}, "weight": 1.0}
    tags["params"] |= {"tags": {"score_tags": [50]}, "filters": {"score": ">=55"}}
    changes = {
        "dataset__mix": json.dumps([tags]),
        "dataset__params__filters": "{original_width: '<=62'}",
        "validation__path": write_shards(sd2.folder / "held_out"),
        "validation__every": 3,
        "validation__num_samples": 6,
        "validation__num_levels": 2,
    }
    cache = sd2.make("mixed", "dtype=fp32", **changes)
    train(sd2.argv("mixed_online", **changes))
    run = train(sd2.argv("mixed_cached", dataset__cache__path=cache, **changes))
    assert_equal(sd2.folder / "mixed_online", sd2.folder / "mixed_cached")
    assert validation_losses(sd2.folder / "mixed_online") == validation_losses(sd2.folder / "mixed_cached")
    assert [len(own.index) for own in run.data.datasets] == [30, 12]
    assert len(run.data.datasets[0].selected) < 24 and len(run.data.datasets[1].selected) == 10
    drawn = torch.cat([batch.sample_ids for batch in run.data.loader(0, lambda: 0)])
    assert (drawn < 30).any() and (drawn >= 30).any()
    assert run.data.datasets[1].all_captions(0) == ["blue, red, scr50, thing 0"]


def places_of(run: Run) -> list[str]:
    """Where autoencoder and text encoder are once the frozen networks were moved to `meta`."""
    run.module.move_frozen_to(torch.device("meta"))
    return [run.module.family.parts[name].device.type for name in ("vae", "text_encoder")]


def test_what_a_cache_delivers_takes_no_device_memory(sd2: Home) -> None:
    caches = {text: sd2.make(f"idle_{text}", f"text={text}") for text in ("none", "states")}
    argv = sd2.argv("idle", dataset__cache__path=caches["states"])
    assert places_of(prepare(argv)) == ["cpu", "cpu"]
    assert places_of(prepare([*argv, f"dataset.cache.path={caches['none']}"])) == ["cpu", "meta"]
    for needed in ("sampling.every=2", f"validation.path={write_shards(sd2.folder / 'apart')}"):
        assert places_of(prepare([*argv, "sampling.prompts=[a]", needed])) == ["meta", "meta"]
    plan = make_plan(load_config(argv))
    networks, family = meta_networks(plan.config)
    counts = parameter_counts(networks)
    frozen = 4 * (counts["vae"] + counts["text_encoder"])
    memory = run_memory(plan, networks, family)
    assert (memory["frozen"], memory["CPU: frozen, idle"]) == (0, frozen)
    assert memory["or, before them, encoding"] == 0
    online = run_memory(make_plan(load_config(sd2.argv("idle"))), networks, family)
    assert (online["frozen"], online["CPU: frozen, idle"]) == (frozen, 0)
    with pytest.raises(ConfigError, match=r"dataset\.cache\.path: .* holds no cache\.json"):
        describe(make_plan(load_config([*argv, f"dataset.cache.path={sd2.folder}"])))


def test_random_crops_and_online_text(sd2: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no more than one chunk stays mapped."""
    monkeypatch.setattr("sd_training.build.cache._CHUNK_BYTES", 4096)
    monkeypatch.setattr("sd_training.data.samples.cache._MAX_MAPPED", 1)
    changes = {
        "dataset__params__crop": "random",
        "dataset__params__buckets__mode": "off",
        "dataset__params__buckets__sizes": "null",
    }
    cache = sd2.make("crops", "crops=3", "text=none", "dtype=fp32", **changes)
    run = prepare(sd2.argv("crops_run", dataset__cache__path=cache, **changes))
    batches = list(run.data.loader(0, lambda: 0))
    assert all(batch.moments.numel() and batch.tokens["text_encoder"].numel() for batch in batches)
    assert len(list(cache.glob("moments-*"))) > 2 and run.data.cache is not None and len(run.data.cache._open) <= 2
    assert len({tuple(place) for batch in batches for place in batch.crop_top_left.tolist()}) > 3


@pytest.mark.parametrize(
    ("processes", "own"),
    [
        (2, {"distributed__strategy": "ddp", "system__workers": 1}),
        (2, {"distributed__strategy": "fsdp"}),
        (2, {"distributed__strategy": "deepspeed_2"}),
        (4, {"distributed__mesh__data": 2, "distributed__mesh__fsdp": 2}),
        (2, {"distributed__mesh__tensor": 2}),
    ],
    ids=["ddp", "fsdp", "deepspeed_2", "hsdp", "tensor"],
)
def test_several_processes(sd2: Home, processes: int, own: dict[str, Any]) -> None:
    """Also with loader processes of builder and run; what they read does not depend on the strategy."""
    name = f"{processes}_{own.get('distributed__strategy', 'mesh')}"
    words = [f"out={(cache := sd2.folder / 'several')}", "dtype=fp32", f"processes={processes}"]
    if not cache.exists():  # one for all of them
        train_in_processes([*sd2.argv("unused", system__batch_size=4, **own), *words], 2, "scripts.cache_latents")
    own = {**own, "system__batch_size": 8 if "distributed__mesh__tensor" in own else 8 // processes}
    for run, more in (("online", {"system__workers": 0}), ("cached", {"dataset__cache__path": cache})):
        train_in_processes(sd2.argv(f"{run}_{name}", **{**own, **more}), processes)
    assert_equal(sd2.folder / f"online_{name}", sd2.folder / f"cached_{name}")


def test_pooled_text_alone_is_stored(tmp_path: Path) -> None:
    """Of FLUX, whose CLIP gives a vector and whose T5 gives states, which are made online."""
    pipeline = save_pipeline("flux", tmp_path / "pipeline")
    home = Home(tmp_path, pipeline, write_shards(tmp_path / "shards"))
    cache = home.make("cache", "dtype=fp32", "text=pooled")
    train(home.argv("online"))
    run = train(home.argv("cached", dataset__cache__path=cache))
    assert_equal(tmp_path / "online", tmp_path / "cached")
    batch = next(iter(run.data.loader(0, lambda: 0)))
    assert {*batch.tokens} == {"text_encoder_2"} and {*batch.text_pooled} == {"text_encoder"}


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


def test_text_options_decide_the_states(tmp_path: Path) -> None:
    home = Home(tmp_path, save_pipeline("mmdit_rope", tmp_path / "pipeline"), write_shards(tmp_path / "shards"))
    cache = home.make("cache")
    path = home.pipeline / "model_index.json"
    index = json.loads(path.read_text())
    index["text_options"]["text_encoder"]["layer"] = -2
    path.write_text(json.dumps(index))
    assert "layers and pooling of model.text_encoders" in refused(home, cache)


def test_another_cache_is_not_written_into_the_same_folder(sd2: Home) -> None:
    """Its finished files would count as its own."""
    cache = sd2.make("once", "text=none", dataset__params__filters="{original_width: '>=55'}")
    with pytest.raises(ConfigError, match=r"holds another cache: selected samples differ; .*; give another folder"):
        sd2.make("once", "text=none", dataset__params__filters="{original_width: '<55'}")
    with pytest.raises(ConfigError, match="it is stored in another way"):
        sd2.make("once", "text=none", "dtype=fp32", dataset__params__filters="{original_width: '>=55'}")
    assert sd2.make("once", "text=none", dataset__params__filters="{original_width: '>=55'}") == cache


def test_a_filter_may_keep_less(sd2: Home) -> None:
    """And the benchmark of the loader reads a cache."""
    cache = sd2.make("all", "dtype=fp32", "text=none")
    arguments = bench_data.parse_arguments([*sd2.argv("bench", dataset__cache__path=cache), "--batch", "4"])
    assert next(bench_data.own_batches(bench_data.cached_data(arguments))).moments.shape[0] == 4
    changes = {"dataset__params__filters": "{original_width: '<=60'}", "system__batch_size": 2}
    run = prepare(sd2.argv("less", dataset__cache__path=cache, **changes))
    assert next(iter(run.data.loader(0, lambda: 0))).moments.numel()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["crops=2"], "crops: 2, but dataset.params.crop is center"),
        (["dtype=fp8"], "dtype: is 'fp8'"),
        (["model.train_text_encoder=true"], "model.train_text_encoder: the states of a trained encoder change"),
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


def test_a_dry_run_says_what_is_needed_and_writes_nothing(sd2: Home, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, cache_latents.log.name):
        sd2.make("dry", "--dry-run")
    assert any("chunks, 0 of them done: 0.00 GiB are needed" in message for message in caplog.messages), caplog.messages
    assert not (sd2.folder / "dry").exists()


def contents(folder: Path) -> dict[str, Any]:
    """File → metadata and tensors; the header's order of the metadata changes from process to process."""
    found: dict[str, Any] = {CACHE_FILE: (folder / CACHE_FILE).read_text()}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key).numpy().tobytes() for key in file.keys()}  # noqa: SIM118
            found[path.name] = file.metadata(), tensors
    return found


def test_every_rank_reads_its_own_share(sd2: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged chunk is made anew by the rank that has it; together all chunks are read once."""
    monkeypatch.setattr("sd_training.build.cache._CHUNK_BYTES", 4096)
    folder = sd2.make("shares")
    given, words, _ = cache_latents.parse([*sd2.argv("unused"), f"out={folder}"])
    builder = cache_latents.make_builder(given, make_plan(load_config(words), is_described=True))
    damaged = folder / builder.jobs[4].name
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    read = list[str]()
    is_whole = CacheBuilder._is_whole
    monkeypatch.setattr(CacheBuilder, "_is_whole", lambda own, name: read.append(name) or is_whole(own, name))
    found = [[job.name for job in builder.missing(rank, 3)] for rank in range(3)]
    assert found == [[], [damaged.name], []]
    assert sorted(read) == sorted(job.name for job in builder.jobs)
    damaged.unlink()
    assert [[job.name for job in builder.missing(rank, 3)] for rank in range(3)] == [[damaged.name]] * 3


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
