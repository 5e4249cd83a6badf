"""Files in the original layout: the published names and shapes, written once more by hand here; out and in again to the
bit; trained from; and what cannot be written or read."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import yaml
from diffusers import AutoencoderKL, StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from scripts import convert_checkpoint
from sd_training.config.load import load_config
from sd_training.config.schema import ConditioningConfig, ModelConfig, ObjectiveConfig
from sd_training.errors import ConfigError, DataError
from sd_training.export.pipeline import bit_differences, modelspec, save_sorted
from sd_training.export.single_file import original_layout, renamed, write_single_file
from sd_training.models.families import load_family
from tests import makers, published_models
from tests.family_makers import discrete, save_pipeline
from tests.faults.fork_server import shared_server
from tests.integration.training import checkpoint_tensors, options, train, train_in_processes, train_until_killed
from tests.tiny_parts import tiny_text_encoder, tiny_tokenizer, tiny_vae

ROOT = Path(__file__).resolve().parents[3]
Shapes = dict[str, tuple[int, ...]]


# --- The published layouts, as the original code builds its modules ---


def layer(name: str, *shape: int) -> Shapes:
    """A linear layer, a convolution or a norm, with its bias."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def resnet(name: str, into: int, out: int) -> Shapes:
    found = layer(f"{name}.in_layers.0", into) | layer(f"{name}.in_layers.2", out, into, 3, 3)
    found |= layer(f"{name}.emb_layers.1", out, 1280)
    found |= layer(f"{name}.out_layers.0", out) | layer(f"{name}.out_layers.3", out, out, 3, 3)
    return found | (layer(f"{name}.skip_connection", out, into, 1, 1) if into != out else {})


def transformer(name: str, width: int, depth: int, text: int, *, is_linear: bool) -> Shapes:
    cell = () if is_linear else (1, 1)
    found = layer(f"{name}.norm", width)
    for place in ("proj_in", "proj_out"):
        found |= layer(f"{name}.{place}", width, width, *cell)
    for number in range(depth):
        block = f"{name}.transformer_blocks.{number}"
        for attention, source in (("attn1", width), ("attn2", text)):
            found |= {f"{block}.{attention}.to_q.weight": (width, width)}
            found |= {f"{block}.{attention}.to_{own}.weight": (width, source) for own in "kv"}
            found |= layer(f"{block}.{attention}.to_out.0", width, width)
        found |= layer(f"{block}.ff.net.0.proj", 8 * width, width) | layer(f"{block}.ff.net.2", width, 4 * width)
        for number_of_norm in (1, 2, 3):
            found |= layer(f"{block}.norm{number_of_norm}", width)
    return found


def unet(widths: list[int], depths: list[int], middle: int, text: int, labels: int, *, is_linear: bool) -> Shapes:
    """Two residual layers per level; a level of depth 0 has no attention."""
    found = (
        layer("time_embed.0", 1280, 320) | layer("time_embed.2", 1280, 1280) | layer("input_blocks.0.0", 320, 4, 3, 3)
    )
    if labels:
        found |= layer("label_emb.0.0", 1280, labels) | layer("label_emb.0.2", 1280, 1280)
    number, width, before = 0, 320, [320]
    for level, (own, depth) in enumerate(zip(widths, depths, strict=True)):
        for _ in range(2):
            number += 1
            found |= resnet(f"input_blocks.{number}.0", width, own)
            if depth:
                found |= transformer(f"input_blocks.{number}.1", own, depth, text, is_linear=is_linear)
            width = own
            before.append(width)
        if level < len(widths) - 1:
            number += 1
            found |= layer(f"input_blocks.{number}.0.op", width, width, 3, 3)
            before.append(width)
    found |= resnet("middle_block.0", width, width) | resnet("middle_block.2", width, width)
    found |= transformer("middle_block.1", width, middle, text, is_linear=is_linear)
    number = -1
    for level in reversed(range(len(widths))):
        own, depth = widths[level], depths[level]
        for place in range(3):
            number += 1
            found |= resnet(f"output_blocks.{number}.0", width + before.pop(), own)
            if depth:
                found |= transformer(f"output_blocks.{number}.1", own, depth, text, is_linear=is_linear)
            width = own
            if level and place == 2:
                found |= layer(f"output_blocks.{number}.{2 if depth else 1}.conv", width, width, 3, 3)
    found |= layer("out.0", 320) | layer("out.2", 4, 320, 3, 3)
    return {f"model.diffusion_model.{name}": shape for name, shape in found.items()}


def autoencoder() -> Shapes:
    def block(name: str, into: int, out: int) -> Shapes:
        found = layer(f"{name}.norm1", into) | layer(f"{name}.conv1", out, into, 3, 3)
        found |= layer(f"{name}.norm2", out) | layer(f"{name}.conv2", out, out, 3, 3)
        return found | (layer(f"{name}.nin_shortcut", out, into, 1, 1) if into != out else {})

    found = layer("quant_conv", 8, 8, 1, 1) | layer("post_quant_conv", 4, 4, 1, 1)
    found |= layer("encoder.conv_in", 128, 3, 3, 3) | layer("decoder.conv_in", 512, 4, 3, 3)
    found |= layer("encoder.norm_out", 512) | layer("encoder.conv_out", 8, 512, 3, 3)
    found |= layer("decoder.norm_out", 128) | layer("decoder.conv_out", 3, 128, 3, 3)
    for half in ("encoder", "decoder"):
        found |= block(f"{half}.mid.block_1", 512, 512) | block(f"{half}.mid.block_2", 512, 512)
        found |= layer(f"{half}.mid.attn_1.norm", 512)
        for own in ("q", "k", "v", "proj_out"):
            found |= layer(f"{half}.mid.attn_1.{own}", 512, 512, 1, 1)
    for level, (into, out) in enumerate(pairwise([128, 128, 256, 512, 512])):
        found |= block(f"encoder.down.{level}.block.0", into, out) | block(f"encoder.down.{level}.block.1", out, out)
        if level < 3:
            found |= layer(f"encoder.down.{level}.downsample.conv", out, out, 3, 3)
    for level, into, out in ((3, 512, 512), (2, 512, 512), (1, 512, 256), (0, 256, 128)):
        for place in range(3):
            found |= block(f"decoder.up.{level}.block.{place}", out if place else into, out)
        if level:
            found |= layer(f"decoder.up.{level}.upsample.conv", out, out, 3, 3)
    return {f"first_stage_model.{name}": shape for name, shape in found.items()}


def clip(prefix: str) -> Shapes:
    """OpenAI's CLIP ViT-L/14."""
    found: Shapes = {"embeddings.position_ids": (1, 77), "embeddings.token_embedding.weight": (49408, 768)}
    found |= {"embeddings.position_embedding.weight": (77, 768)} | layer("final_layer_norm", 768)
    for number in range(12):
        block = f"encoder.layers.{number}"
        for own in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found |= layer(f"{block}.self_attn.{own}", 768, 768)
        found |= layer(f"{block}.layer_norm1", 768) | layer(f"{block}.layer_norm2", 768)
        found |= layer(f"{block}.mlp.fc1", 3072, 768) | layer(f"{block}.mlp.fc2", 768, 3072)
    return {f"{prefix}transformer.text_model.{name}": shape for name, shape in found.items()}


def open_clip(prefix: str, width: int, layers: int) -> Shapes:
    found: Shapes = {"positional_embedding": (77, width), "token_embedding.weight": (49408, width), "logit_scale": ()}
    found |= {"text_projection": (width, width)} | layer("ln_final", width)
    for number in range(layers):
        block = f"transformer.resblocks.{number}"
        found |= {f"{block}.attn.in_proj_weight": (3 * width, width), f"{block}.attn.in_proj_bias": (3 * width,)}
        found |= layer(f"{block}.attn.out_proj", width, width)
        found |= layer(f"{block}.ln_1", width) | layer(f"{block}.ln_2", width)
        found |= layer(f"{block}.mlp.c_fc", 4 * width, width) | layer(f"{block}.mlp.c_proj", width, 4 * width)
    return {f"{prefix}model.{name}": shape for name, shape in found.items()}


_SMALL = {"widths": [320, 640, 1280, 1280], "depths": [1, 1, 1, 0], "middle": 1, "labels": 0}
_XL = {"widths": [320, 640, 1280], "depths": [0, 2, 10], "middle": 10, "labels": 2816}
_XL_TEXT = clip("conditioner.embedders.0.") | open_clip("conditioner.embedders.1.", 1280, 32)
PUBLISHED: dict[str, tuple[Shapes, int]] = {
    "sd15": (unet(**_SMALL, text=768, is_linear=False) | autoencoder() | clip("cond_stage_model."), 1131),
    "sd21_v": (
        unet(**_SMALL, text=1024, is_linear=True) | autoencoder() | open_clip("cond_stage_model.", 1024, 24),
        1228,
    ),
    "sdxl_base": (unet(**_XL, text=2048, is_linear=True) | autoencoder() | _XL_TEXT, 2515),
}
"""Model → names and shapes, and how many tensors its published file has."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_are_the_published_ones(name: str) -> None:
    """Of the published sizes, on the meta device."""
    expected, count = PUBLISHED[name]
    assert len(expected) == count
    params = yaml.safe_load((ROOT / f"configs/models/{name}.yaml").read_text())["model"]["unet"]["params"]
    frozen = dict(published_models.FROZEN[name])
    with torch.device("meta"):
        networks: dict[str, Any] = {"unet": UNet2DConditionModel(**params), "vae": AutoencoderKL(**frozen.pop("vae"))}
        for part, config in frozen.items():
            cls = CLIPTextModelWithProjection if part == "text_encoder_2" else CLIPTextModel
            networks[part] = cls(CLIPTextConfig(**config))
    settings = {
        part: network.config.to_dict() if "text" in part else network.config for part, network in networks.items()
    }
    settings["scheduler"] = {"prediction_type": "epsilon"}
    found = renamed(settings, {part: network.state_dict() for part, network in networks.items()})
    assert {key: tuple(tensor.shape) for key, tensor in found.items()} == expected


# --- Out and in again ---


def stable_diffusion_2(folder: Path) -> Path:
    words = tiny_tokenizer()
    text = tiny_text_encoder(len(words), layers=2)
    text.config.hidden_act = "gelu"
    sizes = {**makers.UNET_PARAMS, "use_linear_projection": True}
    StableDiffusionPipeline(
        vae=tiny_vae(), text_encoder=text, tokenizer=words, unet=UNet2DConditionModel(**sizes),
        scheduler=discrete(prediction_type="v_prediction"), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def sdxl(folder: Path) -> Path:
    """diffusers tells the text encoders of a file by their widths."""
    words = tiny_tokenizer()
    sizes: dict[str, Any] = {"cross_attention_dim": 16 + 24, "addition_embed_type": "text_time"}
    sizes |= {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 24 + 6 * 8}
    StableDiffusionXLPipeline(
        vae=tiny_vae(), text_encoder=tiny_text_encoder(len(words), 16, layers=2), tokenizer=words,
        text_encoder_2=tiny_text_encoder(len(words), 24, layers=2, has_projection=True), tokenizer_2=tiny_tokenizer(),
        unet=UNet2DConditionModel(**{**makers.UNET_PARAMS, **sizes, "use_linear_projection": True}),
        scheduler=discrete(prediction_type="v_prediction", rescale_betas_zero_snr=True), add_watermarker=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder


MAKERS = {
    "StableDiffusionPipeline": lambda folder: makers.save_tiny_pipeline(folder),
    "StableDiffusion2": stable_diffusion_2,
    "StableDiffusionXLPipeline": sdxl,
}


@pytest.fixture(scope="module", params=MAKERS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path, Path]:
    """Name; the pipeline, a copy of it without weights, and its file."""
    home = tmp_path_factory.mktemp("single")
    folder = MAKERS[request.param](home / "pipeline")
    shutil.copytree(folder, home / "settings", ignore=shutil.ignore_patterns("*.safetensors"))
    file = home / "single.safetensors"
    write_single_file(folder, file)
    return request.param, folder, home / "settings", file


def states(parts: dict[str, Any]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    for name in ("unet", "vae", "text_encoder", "text_encoder_2"):
        if name in parts:
            yield name, parts[name].state_dict()


def test_out_and_in_again_is_the_same_to_the_bit(case: tuple[str, Path, Path, Path], tmp_path: Path) -> None:
    name, folder, settings, file = case
    model = ModelConfig(pretrained=str(file), single_file_config=str(settings))
    objective = ObjectiveConfig()
    ours = load_family(model, objective, ConditioningConfig(), seed=0)
    whole = load_family(ModelConfig(pretrained=str(folder)), objective, ConditioningConfig(), seed=0)
    cls = getattr(diffusers, "StableDiffusionPipeline" if name == "StableDiffusion2" else name)
    theirs = cls.from_single_file(str(file), config=str(settings), local_files_only=True)
    for (part, own), (_, before), (_, other) in zip(
        states(ours.parts), states(whole.parts), states(theirs.components), strict=True
    ):
        assert bit_differences(before, own) == bit_differences(before, other) == [], part
    with safe_open(file, "pt") as stored:
        spec = {key.removeprefix("modelspec."): value for key, value in stored.metadata().items()}
    assert (spec["format"], spec["sai_model_spec"], spec["title"]) == ("pt", "1.0.0", "single")
    kinds = {"StableDiffusionPipeline": "v1", "StableDiffusion2": "v1", "StableDiffusionXLPipeline": "xl-v1-base"}
    assert spec["architecture"] == f"stable-diffusion-{kinds[name]}"  # a tiny one of the second version is 16 wide
    assert spec["resolution"] == "16x16"
    assert spec["prediction_type"] == ("epsilon" if name == "StableDiffusionPipeline" else "v")
    ours.pipeline().save_pretrained(tmp_path / "again")
    again = original_layout(tmp_path / "again")
    assert bit_differences(load_file(file), {key: tensor.contiguous() for key, tensor in again.items()}) == []
    assert {"v_pred", "ztsnr"} <= again.keys() or not name.startswith("StableDiffusionXL")


def test_a_run_begins_with_a_file_and_its_export_becomes_one(shards_dir: Path, tmp_path: Path, capsys: Any) -> None:
    folder = makers.save_tiny_pipeline(tmp_path / "pipeline")
    file, ours = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    write_single_file(folder, file)
    shutil.copytree(folder, tmp_path / "settings", ignore=shutil.ignore_patterns("*.safetensors"))
    argv = options(tmp_path / "run", file, shards_dir, experiment__num_examples_to_see=8)
    argv += [f"model.single_file_config={tmp_path / 'settings'}", "optimizer.params.learning_rate=0"]
    train([*argv, "model.use_ema=false"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["convert", str(tmp_path / "run"), str(ours)])
        convert_checkpoint.main()
    assert f"{ours}: 349 tensors" in capsys.readouterr().out
    assert bit_differences(load_file(file), load_file(ours)) == []
    umask = os.umask(0o077)
    os.umask(umask)
    assert ours.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_file_is_the_same_at_every_save(tmp_path: Path) -> None:
    """safetensors alone orders the metadata anew each time."""
    folder = makers.save_tiny_pipeline(tmp_path / "pipeline", unet=makers.SMALLER_UNET)
    file, plain = tmp_path / "x.safetensors", tmp_path / "plain.safetensors"
    seen = set[bytes]()
    for _ in range(5):
        write_single_file(folder, file)
        seen.add(file.read_bytes())
    assert len(seen) == 1
    with safe_open(file, "pt") as stored:
        metadata = stored.metadata()
    save_file(load_file(file), plain, metadata)
    assert file.stat().st_size == plain.stat().st_size and metadata["format"] == "pt"
    with safe_open(plain, "pt") as stored:
        assert stored.metadata() == metadata
    text = {"title": 'naïve "日本"\n\x01'}
    save_sorted({"a": torch.arange(3.0)}, file, text)
    assert torch.equal(load_file(file)["a"], torch.arange(3.0))
    with safe_open(file, "pt") as stored:
        assert stored.metadata() == {"format": "pt", **text}


def test_a_file_that_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    folder = makers.save_tiny_pipeline(tmp_path / "pipeline", unet=makers.SMALLER_UNET)
    with pytest.raises(DataError, match=r"/proc/x\.safetensors: cannot be written: .*; name another place"):
        write_single_file(folder, Path("/proc/x.safetensors"))
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(b"")
    with pytest.raises(ConfigError, match="is no pipeline folder: "):
        write_single_file(folder, tmp_path / "x.safetensors")
    weights.unlink()
    weights.mkdir()
    with pytest.raises(ConfigError, match="is no pipeline folder: "):
        write_single_file(folder, tmp_path / "x.safetensors")


def test_two_processes_that_are_killed_train_from_a_file_as_from_the_folder(shards_dir: Path, tmp_path: Path) -> None:
    folder = makers.save_tiny_pipeline(tmp_path / "pipeline", unet=makers.SMALLER_UNET)
    write_single_file(folder, file := tmp_path / "in.safetensors")
    changes = {"experiment__num_examples_to_see": 32, "experiment__save_every": 2, "system__batch_size": 4}
    train_in_processes(options(tmp_path / "folder", folder, shards_dir, **changes), 2)
    argv = options(tmp_path / "file", file, shards_dir, **changes, model__single_file_config=folder)
    train_until_killed(argv, 2, step=3)
    train_in_processes(argv, 2)
    found, expected = (checkpoint_tensors(tmp_path / name, 4) for name in ("file", "folder"))
    assert bit_differences(expected, found) == []
    words = [str(tmp_path / "file" / "current_pipeline"), str(tmp_path / "picture.npy"), "stable_diffusion"]
    shared_server().call("tests.integration.test_families:load_and_draw", words, tmp_path / "log")
    assert (tmp_path / "picture.npy").is_file()


def test_mistakes_name_option_or_file(case: tuple[str, Path, Path, Path], tmp_path: Path) -> None:
    _, folder, settings, file = case
    words = ["experiment.log_dir=x", "experiment.name=x", "experiment.num_examples_to_see=64", "dataset.params.path=x"]
    for more, said in (
        ([f"model.pretrained={file}"], "in the original layout, give model.single_file_config as well"),
        (
            [f"model.pretrained={folder}", f"model.single_file_config={settings}"],
            r"no \*\.safetensors file, which model",
        ),
        (
            [f"model.pretrained={file}", f"model.single_file_config={tmp_path}"],
            r"model\.single_file_config: .* is no pip",
        ),
        (
            [f"model.single_file_config={settings}", "model.unet.target=UNet2DConditionModel"],
            "only read with model.pret",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config([*words, *more])
    model = ModelConfig(pretrained=str(tmp_path / "short.safetensors"), single_file_config=str(settings))
    for part, missing in (
        ("unet", "input_blocks.0.0.bias"),
        ("text_encoder", ("final_layer_norm.bias", "ln_final.bias")),
    ):
        tensors = {key: tensor for key, tensor in load_file(file).items() if not key.endswith(missing)}
        save_file(tensors, tmp_path / "short.safetensors")
        with pytest.raises(ConfigError, match=rf"model\.{part}\.pretrained: .*short.safetensors' lacks tensors of a "):
            load_family(model, ObjectiveConfig(), ConditioningConfig(), seed=0)
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match=r"model\.vae\.pretrained: .* cannot be loaded as AutoencoderKL"):
        load_family(
            model.replace(pretrained=str(tmp_path / "broken.safetensors")),
            ObjectiveConfig(),
            ConditioningConfig(),
            seed=0,
        )


def test_what_has_no_such_layout_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    target = tmp_path / "x.safetensors"
    flux = save_pipeline("pixart", tmp_path / "pixart")
    with pytest.raises(ConfigError, match="is a PixArtSigmaPipeline; only Stable Diffusion 1"):
        write_single_file(flux, target)
    with pytest.raises(ConfigError, match="is no pipeline folder"):
        write_single_file(tmp_path, target)
    other = makers.save_tiny_pipeline(tmp_path / "other")
    weights = other / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(weights), "encoder_hid_proj.weight": torch.zeros(1)}, weights)
    with pytest.raises(DataError, match="of an architecture that the original layout does not have"):
        write_single_file(other, target)
    model = ModelConfig(pretrained=str(weights), single_file_config=str(flux))
    with pytest.raises(ConfigError, match=r"model\.single_file_config: is only known for stable_diffusion and sdxl"):
        load_family(model, ObjectiveConfig(), ConditioningConfig(), seed=0)
    assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize("change", [{"prediction_type": "sample"}, {"_class_name": "FlowMatchEulerDiscreteScheduler"}])
def test_readers_of_such_a_file_could_not_sample_these(change: dict[str, str], tmp_path: Path) -> None:
    settings = makers.save_tiny_pipeline(tmp_path / "pipeline") / "scheduler" / "scheduler_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | change))
    with pytest.raises(ConfigError, match=rf"scheduler: .*{next(iter(change.values()))}.*; readers of"):
        write_single_file(tmp_path / "pipeline", tmp_path / "single.safetensors")


@pytest.mark.parametrize(
    ("width", "prediction", "name"),
    [(768, "epsilon", "v1"), (1024, "epsilon", "v2-512"), (1024, "v_prediction", "v2-768-v")],
)
def test_versions_of_stable_diffusion_by_the_width_of_the_text(width: int, prediction: str, name: str) -> None:
    config = {"cross_attention_dim": width}
    spec = modelspec("stable_diffusion", config, prediction, 512, "a", is_adapter=True)
    assert spec["modelspec.architecture"] == f"stable-diffusion-{name}/lora"
    assert "modelspec.prediction_type" not in modelspec("flux", {}, "flow_prediction", 512, "a", is_adapter=False)
