"""DreamBooth: class images are drawn once, every micro-batch pairs them with the subject, and the loss weighs them."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts import cache_latents, find_sample
from sd_training.build.dry_run import describe
from sd_training.build.plan import make_plan
from sd_training.build.prior import missing_class_images
from sd_training.config.load import load_config
from sd_training.errors import ConfigError, DataError
from tests import makers
from tests.faults.fork_server import shared_server
from tests.integration.record_ids import RecordIds, read_ids
from tests.integration.test_cache import assert_equal
from tests.integration.training import (
    ROOT,
    losses,
    options,
    prepare,
    train,
    train_in_processes,
    train_until_killed,
)

SUBJECT, CLASS = "a photo of sks dog", "a photo of a dog"
NUM_IMAGES = 6


def write_subject(folder: Path) -> Path:
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.jpg").write_bytes(makers.encode(makers.picture(number, 32, 32)))
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dreambooth")
    makers.save_tiny_pipeline(folder / "pipeline", unet=makers.SMALLER_UNET)
    write_subject(folder / "subject")
    return folder


def argv(home: Path, run: str, prior: str, template: str = "dreambooth_full", **changes: Any) -> list[str]:
    values = {
        "experiment__num_examples_to_see": 48,
        "experiment__save_every": 3,
        "dataset__type": "ImageFolder",
        "dataset__params__captions__text": SUBJECT,
        "dataset__params__resampled": True,
        "dataset__params__index_dir": home / "index",
        "dataset__prior__path": home / prior,
        "dataset__prior__prompt": CLASS,
        "dataset__prior__num_images": NUM_IMAGES,
        "dataset__prior__weight": 0.7,
        "sampling__num_inference_steps": 2,
        "sampling__batch_size": 4,
    }
    words = options(home / run, home / "pipeline", home / "subject", **{**values, **changes})
    return [f"config={ROOT}/configs/templates/{template}.yaml", *words]


def pictures(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.png")}


def test_a_run_with_a_prior(home: Path) -> None:
    """It draws what is missing, on any number of processes, and goes on after SIGKILL to the bit."""
    words = argv(home, "whole", "class")
    with pytest.raises(
        ConfigError, match=r"dataset\.prior\.path: 6 class images of dataset\.prior\.num_images are mis"
    ):
        cache_latents.main([*words, f"out={home / 'cache'}"])
    described = describe(make_plan(load_config(words), is_described=True))
    assert f"{NUM_IMAGES} class images are drawn first" in described
    (home / "ids").mkdir()
    train(words, RecordIds(home / "ids"))
    assert_found(home / "whole", read_ids(home / "ids"))
    drawn = pictures(home / "class")
    assert sorted(drawn) == [f"class_{number:06d}.png" for number in range(NUM_IMAGES)] and len({*drawn.values()}) > 1
    again = describe(make_plan(load_config(words)))
    assert "class images" not in again
    times = [re.findall(r"each sample ([\d.]+) times", text)[0] for text in (described, again)]
    assert times[0] == times[1]  # half of each batch is of class images, drawn or not
    train_in_processes(argv(home, "two", "class_of_two", system__batch_size=4), 2)
    assert pictures(home / "class_of_two") == drawn
    assert losses(home / "two") == pytest.approx(losses(home / "whole"), rel=1e-5)
    for number, kept in ((2, 0), (4, -9)):  # of a copy to a full disk
        (home / "class_of_two" / f"class_00000{number}.png").write_bytes(drawn[f"class_00000{number}.png"][:kept])
    (home / "class_of_two" / "class_000003.png").unlink()
    train_until_killed(argv(home, "broken", "class_of_two"), 1, step=4)
    assert pictures(home / "class_of_two") == drawn
    more = load_config(argv(home, "broken", "class_of_two", dataset__prior__num_images=NUM_IMAGES + 1))
    with pytest.raises(ConfigError, match=r"dataset\.prior\.num_images: 6 -> 7: more class images are another order"):
        describe(make_plan(more, is_described=True))
    train(argv(home, "broken", "class_of_two"))
    assert_equal(home / "whole", home / "broken")
    assert_draws(home / "broken" / "current_pipeline")


def assert_found(run_dir: Path, steps: dict[int, list[tuple[int, int]]]) -> None:
    """`find_sample.py` finds the samples of each step, of both kinds, and the steps of each sample."""
    (stretch,), found = find_sample.open_run(run_dir, ()), set()
    assert sorted(steps) == list(range(6))
    for step, seen in steps.items():
        visits = find_sample.visits_of_step([stretch], step + 1)
        ids = [(visit.request.position, 3 * visit.request.dataset + visit.request.sample) for visit in visits]
        assert ids == seen and [sample < 3 for _, sample in ids] == [True, False] * 4
    for dataset, count in enumerate((3, NUM_IMAGES)):
        for sample in range(count):
            visits = find_sample.visits_of(stretch, dataset, sample)
            found |= {(visit.step, visit.request.position, 3 * dataset + sample) for visit in visits}
    assert found == {(step, *seen) for step in steps for seen in steps[step]}


def assert_draws(folder: Path) -> None:
    """diffusers does, in a process without network."""
    picture = folder.with_name("picture.npy")
    words = [str(folder), str(picture), "stable_diffusion"]
    shared_server().call("tests.integration.test_families:load_and_draw", words, folder.with_name("log"))
    assert np.load(picture).shape == (24, 16, 3)


@pytest.mark.parametrize(
    ("template", "own"),
    [
        ("dreambooth_lora", {"model__lora__merge": True, "model__lora__text_encoder": True}),
        ("dreambooth_full", {"model__train_text_encoder": True}),
    ],
)
def test_two_processes_that_are_killed_continue_to_the_bit(template: str, own: dict[str, Any], home: Path) -> None:
    """Adapters, and all weights, of denoiser and text encoder. No class image has to be drawn."""
    shutil.copytree(home / "subject", home / "given", dirs_exist_ok=True)
    own = {**own, "dataset__prior__num_images": 3, "system__batch_size": 4}
    whole, cut = (argv(home, f"{template}_{run}", "given", template, **own) for run in ("whole", "cut"))
    train_in_processes(whole, 2)
    train_until_killed(cut, 2, step=4)
    assert [path.name for path in (home / f"{template}_cut" / "checkpoints").iterdir()] == ["step=3"]
    train_in_processes(cut, 2)
    assert_equal(home / f"{template}_whole", home / f"{template}_cut")
    assert_draws(home / f"{template}_cut" / "current_pipeline")


def test_every_second_sample_is_a_class_image(home: Path) -> None:
    """And the loss is that of the paper, computed by hand."""
    run = prepare(argv(home, "pairs", "class_of_pairs"))
    tokenizer = run.data.tokenizers["text_encoder"]
    for batch in run.data.loader(0, lambda: 0):
        assert (batch.sample_ids[0::2] < 3).all() and (batch.sample_ids[1::2] >= 3).all()
        assert (batch.positions % 2 == torch.arange(8) % 2).all()
        for row, text in enumerate([SUBJECT, CLASS] * 4):
            if not batch.dropped["text_encoder"][row]:
                assert batch.tokens["text_encoder"][row].tolist() == tokenizer.encode(text).tokens.tolist()
    with torch.no_grad():
        run.module.move_frozen_to(torch.device("cpu"))
        weighted, _, logged = run.module.sample_losses(batch)
        run.module.prior_weight = None
        each = run.module.sample_losses(batch)[0]
    expected = each[0::2].mean() + 0.7 * each[1::2].mean()
    torch.testing.assert_close(weighted.mean(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(logged["prior_loss"], each[1::2].mean(), rtol=1e-6, atol=0)


def test_class_images_of_several_prompts_have_their_own(home: Path) -> None:
    prompts = [CLASS, "a photo of a wolf"]
    words = [word for word in argv(home, "several", "class_of_several") if "prior.prompt" not in word]
    run = prepare([*words, f"dataset.prior.prompt={prompts}"])
    own = [SUBJECT, f"{SUBJECT} in a forest"]  # of the template, which names the class's prompts as well
    assert load_config([*words, f"dataset.prior.prompt={prompts}"]).sampling.prompts == [*own, *prompts]
    without = [word for word in words if "dataset.prior" not in word]
    without += ["dataset.prior.path=null", "dataset.prior.prompt=null"]
    assert load_config(without).sampling.prompts == own
    folder = home / "class_of_several"
    assert {path.stem: path.read_text() for path in folder.glob("*.txt")} == {
        f"class_{number:06d}": prompts[number % 2] for number in range(NUM_IMAGES)
    }
    assert len(pictures(folder)) == NUM_IMAGES
    tokenizer, seen = run.data.tokenizers["text_encoder"], set()
    of = {tuple(tokenizer.encode(text).tokens.tolist()): text for text in prompts}
    for batch in run.data.loader(0, lambda: 0):
        for row in range(1, 8, 2):
            if not batch.dropped["text_encoder"][row]:
                sample = int(batch.sample_ids[row]) - 3
                seen.add(sample)
                assert of[tuple(batch.tokens["text_encoder"][row].tolist())] == prompts[sample % 2]
    assert len(seen) > 3


def test_class_images_of_the_user_count(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "subject", tmp_path / "class")
    config = load_config(argv(home, "own", str(tmp_path / "class")))
    assert missing_class_images(config) == [f"class_{number:06d}.png" for number in range(NUM_IMAGES - 3)]
    for key, value in (("dataset.prior.prompt", "a cat"), ("model.pretrained", "elsewhere")):
        (tmp_path / "class" / "drawn_from.json").write_text(json.dumps({key: value}))
        with pytest.raises(ConfigError, match=rf"were drawn in another way: {key} was '{value}', now"):
            missing_class_images(config)
    (tmp_path / "class" / "drawn_from.json").write_text(json.dumps({"dataset.prior.prompt": CLASS}))
    with pytest.raises(ConfigError, match=r"model\.from_scratch: random weights would draw the 3 class images"):
        missing_class_images(config.replace(model=config.model.replace(from_scratch=True)))
    assert missing_class_images(config)  # an older version did not write what the pictures were drawn by


def test_too_few_class_images_are_of_their_own_option(home: Path, tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    shutil.copy(home / "subject" / "0.jpg", tmp_path / "class")
    own = {"dataset__prior__num_images": 1, "dataset__params__resampled": False, "system__batch_size": 4}
    run = prepare(argv(home, "few", str(tmp_path / "class"), **own))
    with pytest.raises(
        DataError, match=r"^dataset\.prior\.path: 1 sample of .*, fewer than one optimizer step"
    ) as error:
        run.data.prepare_data()
    assert "dataset.params.path" not in str(error.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("dataset.prior.prompt=null", r"dataset\.prior\.prompt: is required"),
        ("dataset.prior.prompt=[a photo, '']", r"dataset\.prior\.prompt: is required"),
        ("system.batch_size=3", r"system\.batch_size: is 3; half of it"),
        ("dataset.params.buckets.mode=ladder", r"dataset\.params\.buckets\.mode: class images are squares"),
        ("dataset.mix=[{params: {path: x}}]", r"dataset\.mix: every sample"),
        ("dataset.prior.path={home}/subject/class", r"dataset\.prior\.path: lies in .*/subject, so its images would"),
    ],
)
def test_what_does_not_fit_a_prior(word: str, said: str, home: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config([*argv(home, "wrong", "none"), word.replace("{home}", str(home))])
