"""What scripts/generate_examples.py draws with adapters, few-step models, ControlNets and images, against diffusers
called by hand."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import peft
import pytest
import torch
from diffusers import (
    ControlNetModel,
    DiffusionPipeline,
    EulerDiscreteScheduler,
    LCMScheduler,
    UNet2DConditionModel,
)
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file

from scripts import generate_examples
from sd_training.models.mmdit_rope import MMDiTRope
from tests import makers
from tests.family_makers import save_pipeline
from tests.faults.fork_server import shared_server
from tests.faults.tiny_run import TORCHRUN
from tests.integration.commands import ROOT, fails
from tests.integration.test_generate_examples import draw

PROMPTS = ["a red square", "a blue circle"]
SIZE = {"height": 16, "width": 16}


def save_trained(family: str, folder: Path) -> Path:
    """A pipeline whose output depends on all of its weights, which is not so at the start of a training."""
    save_pipeline(family, folder)
    if family == "mmdit_rope":
        network = MMDiTRope.from_pretrained(folder / "transformer")
        torch.manual_seed(0)
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        network.save_pretrained(folder / "transformer")
    return folder


def save_lora(pipeline: Any, folder: Path, seed: int) -> Path:
    """Adapters of random weights for the denoiser of a pipeline, which gets them itself."""
    network = pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer
    targets = ["to_q", "to_v"] if hasattr(pipeline, "unet") else ["query", "key_value"]
    torch.manual_seed(seed)
    network.add_adapter(
        peft.LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False), f"made_{seed}"
    )
    tensors = peft.get_peft_model_state_dict(network, adapter_name=f"made_{seed}")
    part = "unet" if hasattr(pipeline, "unet") else "transformer"
    folder.mkdir()
    save_file(
        {f"{part}.{name}": tensor for name, tensor in tensors.items()}, folder / "pytorch_lora_weights.safetensors"
    )
    return folder / "pytorch_lora_weights.safetensors"


def save_controlnet(pipeline: Any, folder: Path, seed: int) -> Path:
    """A ControlNet whose outputs are not zero."""
    torch.manual_seed(seed)
    net = ControlNetModel.from_unet(pipeline.unet, conditioning_embedding_out_channels=(8, 8))
    for name, parameter in net.named_parameters():
        if name.startswith("controlnet_"):
            torch.nn.init.normal_(parameter, std=0.2)
    net.save_pretrained(folder)
    return folder


def by_hand(pipeline: Any, number: int = 0, **options: Any) -> NDArray[np.uint8]:
    """What the pipeline draws in a call for one picture."""
    pipeline.set_progress_bar_config(disable=True)
    given = {"prompt": PROMPTS[number], "num_inference_steps": 2, "guidance_scale": 7.5, **options}
    return np.asarray(pipeline(generator=torch.Generator().manual_seed(number), **given).images[0])


def drawn(out: Path, number: int = 0) -> NDArray[np.uint8]:
    return np.asarray(Image.open(out / f"{number:06d}.png"))


@pytest.mark.parametrize("family", ["stable_diffusion", "mmdit_rope"])
def test_several_adapters_with_weights(family: str, tmp_path: Path) -> None:
    folder = save_trained(family, tmp_path / "pipeline")
    made = DiffusionPipeline.from_pretrained(folder)
    one, two = (save_lora(made, tmp_path / f"lora_{seed}", seed) for seed in (1, 2))
    words = ["--prompt", PROMPTS[0], "--lora", f"{one}:0.5", "--lora", two.parent]
    (line,) = draw(folder, tmp_path / "out", *words)
    assert [weight for _, weight in line["loras"]] == [0.5, 1.0]
    pipeline = DiffusionPipeline.from_pretrained(folder)
    plain = by_hand(pipeline, **SIZE)
    for name, path in {"a": one, "b": two}.items():
        pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=name)
    pipeline.set_adapters(["a", "b"], [0.5, 1.0])
    assert np.array_equal(drawn(tmp_path / "out"), by_hand(pipeline, **SIZE))
    assert not np.array_equal(drawn(tmp_path / "out"), plain)


def test_a_few_step_denoiser_and_adapters(pipeline_dir: Path, tmp_path: Path) -> None:
    """As SDXL-Lightning's UNet and LCM's adapters are drawn with."""
    made = makers.tiny_pipeline(seed=1, unet=makers.SMALLER_UNET)
    save_file(made.unet.state_dict(), tmp_path / "unet.safetensors")
    few = ["--prompt", PROMPTS[0], "--guidance-scale", "1", "--steps", "4"]
    trailing = ["--scheduler", "EulerDiscreteScheduler", "--scheduler-params", "timestep_spacing=trailing"]
    (line,) = draw(pipeline_dir, tmp_path / "lightning", *few, "--denoiser", tmp_path / "unet.safetensors", *trailing)
    assert line["scheduler_params"] == {"timestep_spacing": "trailing"}
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(pipeline_dir)
    own = pipeline.scheduler.config
    lora = save_lora(pipeline, tmp_path / "lora", 3)
    draw(pipeline_dir, tmp_path / "lcm", *few, "--lora", lora, "--scheduler", "LCMScheduler")
    pipeline.scheduler = LCMScheduler.from_config(own)
    options = {**SIZE, "guidance_scale": 1.0, "num_inference_steps": 4}
    assert np.array_equal(drawn(tmp_path / "lcm"), by_hand(pipeline, **options))
    pipeline.unet, pipeline.scheduler = made.unet, EulerDiscreteScheduler.from_config(own, timestep_spacing="trailing")
    assert np.array_equal(drawn(tmp_path / "lightning"), by_hand(pipeline, **options))


def save_images(folder: Path, count: int, size: tuple[int, int] = (16, 16)) -> list[Image.Image]:
    """Pictures under the names of numbered prompts."""
    folder.mkdir()
    images = [makers.picture(7 + i, *size) for i in range(count)]
    for i, image in enumerate(images):
        image.save(folder / f"{i:06d}.png")
    return images


def test_a_controlnet_with_images_of_other_sizes(pipeline_dir: Path, tmp_path: Path) -> None:
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(pipeline_dir)
    folder = save_controlnet(pipeline, tmp_path / "net", 1)
    images = save_images(tmp_path / "edges", 2, (37, 21))
    rows = [f"{prompt},edges/00000{i}.png" for i, prompt in enumerate(PROMPTS)]
    (tmp_path / "prompts.csv").write_text("\n".join(["prompt,control_image", *rows]))
    words = ["--prompts", tmp_path / "prompts.csv", "--controlnet", f"{folder}:0.7", "--batch-size", "1"]
    assert len(draw(pipeline_dir, tmp_path / "out", *words)) == 2
    net = ControlNetModel.from_pretrained(folder)
    hand = diffusers.StableDiffusionControlNetPipeline.from_pipe(pipeline, controlnet=net)
    for i, image in enumerate(images):
        sized = image.resize((16, 16), Image.Resampling.LANCZOS)
        found = by_hand(hand, i, image=sized, controlnet_conditioning_scale=0.7, **SIZE)
        assert np.array_equal(drawn(tmp_path / "out", i), found)
        assert not np.array_equal(found, by_hand(hand, i, image=sized, controlnet_conditioning_scale=0.0, **SIZE))


def test_controlnets_initial_images_and_adapters_on_two_processes(tmp_path: Path) -> None:
    """In the size of their images; each process draws one of the two."""
    folder = save_pipeline("sdxl", tmp_path / "pipeline")
    pipeline = diffusers.StableDiffusionXLPipeline.from_pretrained(folder)
    nets = [save_controlnet(pipeline, tmp_path / f"net{i}", i) for i in (1, 2)]
    lora = save_lora(diffusers.StableDiffusionXLPipeline.from_pretrained(folder), tmp_path / "lora", 1)
    columns = [save_images(tmp_path / name, 2, (32, 16)) for name in ("begin", "edges", "depth")]
    rows = [f"{p},begin/00000{i}.png,edges/00000{i}.png,depth/00000{i}.png" for i, p in enumerate(PROMPTS)]
    table = tmp_path / "prompts.csv"
    table.write_text("\n".join(["prompt,init_image,control_image,control_image_2", *rows]))
    words = [ROOT / "scripts/generate_examples.py", "--pipeline", folder, "--prompts", table, "--out", tmp_path / "out"]
    words += ["--steps", "4", "--strength", "0.5", "--batch-size", "1", "--device", "cpu", "--lora", lora]
    words += [w for net in nets for w in ("--controlnet", f"{net}:0.5")]
    command = ["--standalone", "--nproc_per_node", "2", *map(str, words)]
    log = tmp_path / "log.txt"
    assert shared_server().start(TORCHRUN, command, log, os.environ).wait(300) == 0, log.read_text()
    made = [ControlNetModel.from_pretrained(net) for net in nets]
    hand = diffusers.StableDiffusionXLControlNetImg2ImgPipeline.from_pipe(pipeline, controlnet=made)
    pictures = {}
    for weights in (None, lora):
        if weights is not None:
            hand.load_lora_weights(str(weights.parent), weight_name=weights.name)
        for i, (begin, *control) in enumerate(zip(*columns, strict=True)):
            options = {"image": begin, "control_image": control, "strength": 0.5, "num_inference_steps": 4}
            options |= {"controlnet_conditioning_scale": [0.5, 0.5], "height": 16, "width": 32}
            pictures[i, weights] = by_hand(hand, i, **options)
    for i in range(2):
        assert np.abs(drawn(tmp_path / "out", i).astype(int) - pictures[i, lora].astype(int)).max() <= 1
        assert np.abs(pictures[i, lora].astype(int) - pictures[i, None].astype(int)).max() > 5


@pytest.mark.parametrize("family", ["stable_diffusion", "sdxl", "sd3", "flux"])
def test_image_to_image(family: str, tmp_path: Path) -> None:
    folder = save_pipeline(family, tmp_path / "pipeline")
    images = save_images(tmp_path / "begin", 1)
    words = ["--prompt", PROMPTS[0], "--init-image", tmp_path / "begin/000000.png", "--strength", "0.5", "--steps", "4"]
    (line,) = draw(folder, tmp_path / "out", *words)
    assert line["strength"] == 0.5
    hand = diffusers.AutoPipelineForImage2Image.from_pipe(DiffusionPipeline.from_pretrained(folder))
    size = SIZE if family in ("sd3", "flux") else {}
    found = by_hand(hand, image=images[0], strength=0.5, num_inference_steps=4, **size)
    assert np.array_equal(drawn(tmp_path / "out"), found)


def test_negative_prompts_and_rescaled_guidance(tmp_path: Path) -> None:
    folder = save_pipeline("sdxl", tmp_path / "pipeline")
    table = tmp_path / "prompts.csv"
    table.write_text(f"prompt,negative_prompt\n{PROMPTS[0]},blurred\n{PROMPTS[1]},\n")
    lines = draw(folder, tmp_path / "out", "--prompts", table, "--guidance-rescale", "0.7", "--negative-prompt", "grey")
    assert [line["negative_prompt"] for line in lines] == ["blurred", "grey"]
    hand = diffusers.StableDiffusionXLPipeline.from_pretrained(folder)
    for i, negative in enumerate(["blurred", "grey"]):
        found = by_hand(hand, i, negative_prompt=negative, guidance_rescale=0.7, **SIZE)
        assert np.abs(drawn(tmp_path / "out", i).astype(int) - found.astype(int)).max() <= 1
        assert not np.array_equal(found, by_hand(hand, i, **SIZE))


@pytest.mark.parametrize("family", ["stable_diffusion", "flux", "flux2", "mmdit_rope"])
def test_a_film_of_the_denoising(family: str, tmp_path: Path) -> None:
    folder = save_trained(family, tmp_path / "run/current_pipeline")
    words = ["--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--steps", "5"]
    lines = draw(folder.parent, tmp_path / "out", *words)
    plain = drawn(tmp_path / "out")
    assert draw(folder.parent, tmp_path / "out", *words, "--gif") == lines
    assert np.array_equal(drawn(tmp_path / "out"), plain)
    for name in ("000000", "000001"):
        with Image.open(tmp_path / f"out/{name}.gif") as film, Image.open(tmp_path / f"out/{name}.png") as picture:
            assert film.n_frames == 5 and film.size == picture.size
            film.seek(4)  # 256 colours
            assert np.abs(np.asarray(film.convert("RGB")).astype(int) - np.asarray(picture)).mean() < 8


def test_what_flux2_does_not_take_is_refused(tmp_path: Path) -> None:
    words = ["--pipeline", save_pipeline("flux2", tmp_path / "pipeline"), "--prompt", "a", "--out", tmp_path / "out"]
    more = ["--steps", "2", "--negative-prompt", "blurred"]
    assert "Flux2KleinPipeline of diffusers takes no negative_prompt" in fails(generate_examples.main, *words, *more)


def test_pictures_made_with_something_else_are_not_mixed(pipeline_dir: Path, tmp_path: Path) -> None:
    lora = save_lora(makers.tiny_pipeline(unet=makers.SMALLER_UNET), tmp_path / "lora", 1)
    words = ["--pipeline", pipeline_dir, "--prompt", PROMPTS[0], "--out", tmp_path / "out"]
    draw(pipeline_dir, tmp_path / "out", "--prompt", PROMPTS[0])
    for more, said in (
        (["--lora", lora], "loras None instead of [["),
        (["--negative-prompt", ""], "negative_prompt None instead of ''"),
        (["--scheduler-params", "timestep_spacing=trailing"], "scheduler_params None instead of {'timestep_spacing'"),
        (["--guidance-rescale", "0.5"], "guidance_rescale None instead of 0.5"),
    ):
        assert said in fails(generate_examples.main, *words, "--steps", "2", "--height", "16", "--width", "16", *more)
    draw(pipeline_dir, tmp_path / "other", "--prompt", PROMPTS[0], "--lora", lora)
    assert "loras [[" in fails(lambda argv: draw(pipeline_dir, tmp_path / "other", *argv), "--prompt", PROMPTS[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lora", "made.bin"], "--lora: made.bin is no *.safetensors file"),
        (["--lora", "other.safetensors:0,5"], "is no *.safetensors file; a weight is a number, as in PATH:0.5"),
        (["--lora", "empty"], "empty has no adapters; draw with --pipeline empty"),
        (["--lora", "other.safetensors:0.5"], "--lora: other.safetensors does not fit StableDiffusionPipeline ("),
        (
            ["--denoiser", "other.safetensors"],
            "--denoiser: other.safetensors does not fit UNet2DConditionModel (Error(s) in loading",
        ),
        (["--denoiser", "broken.safetensors"], "--denoiser: broken.safetensors does not fit"),
        (["--controlnet", "nowhere"], "--controlnet: nowhere is no folder"),
        (["--controlnet", "empty", "--control-image", "p.png"], "--controlnet: 'empty' cannot be loaded as ControlNet"),
        (["--controlnet", "empty"], "control_image: 1 of 1 prompts have none; give --control-image"),
        (["--control-image", "p.png"], "--control-image: 1 for 0 of --controlnet"),
        (
            ["--init-image", "broken.safetensors"],
            "init_image: broken.safetensors is not there, or is no",
        ),
        (["--init-image", "empty"], "init_image: empty is not there"),
        (["--init-image", "p.png", "--strength", "0.2"], "--strength: 0.2 of 2 steps is none"),
        (
            ["--init-image", "p.png", "--guidance-rescale", "0.2"],
            "Img2ImgPipeline of diffusers takes no guidance_rescale",
        ),
        (["--strength", "0"], "--strength: 0.0 must be above 0"),
        (["--strength", "0.5"], "--strength: is only read with --init-image"),
        (
            ["--guidance-rescale", "0.7", "--guidance-scale", "1"],
            "--guidance-rescale: 0.7 must be 0 with a guidance",
        ),
        (
            ["--controlnet", "wide", "--control-image", "p.png"],
            "--controlnet: wide has block_out_channels=[16, 16], and the denoiser of StableDiffusionPipeline has [8]",
        ),
        (["--guidance-rescale", "2"], "--guidance-rescale: 2.0 must be from 0 to 1"),
        (
            ["--scheduler-params", "timestep_spaceing=trailing"],
            "params.timestep_spaceing: DDIMScheduler has no such parameter; did you mean 'timestep_spacing'?",
        ),
        (["--scheduler-params", "timestep_spacing=both"], "scheduler DDIMScheduler: both is not supported"),
        (["--scheduler", "LCMScheduler", "--steps", "60"], "scheduler LCMScheduler:"),
    ],
)
def test_mistakes_are_sentences(
    pipeline_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Sequence[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    save_file({"unet.mid_block.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    makers.picture(0).save(tmp_path / "p.png")
    if "wide" in options:
        wide = UNet2DConditionModel(**{**makers.UNET_PARAMS, "block_out_channels": [16, 16]})
        ControlNetModel.from_unet(wide, conditioning_embedding_out_channels=(8, 8)).save_pretrained(tmp_path / "wide")
    assert said in fails(lambda argv: draw(pipeline_dir, tmp_path / "out", *argv), "--prompt", "a", *options)


@pytest.mark.parametrize(
    ("text", "path", "weight"),
    [("a/b:0.5", "a/b", 0.5), ("a:1e-1", "a", 0.1), ("a:-2", "a", -2.0), ("a", "a", 1.0), ("a:b", "a:b", 1.0)],
)
def test_weights_of_files(text: str, path: str, weight: float) -> None:
    assert generate_examples.weighted(text) == (Path(path), weight)


@pytest.mark.parametrize("text", ["a=[", "novalue"])
def test_parameters_of_samplers_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not KEY=VALUE"):
        generate_examples.scheduler_param(text)
