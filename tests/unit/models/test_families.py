"""Which family a config means, and parts that do not fit, per family."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sd_training.config.schema import ConditioningConfig, ModelConfig, ObjectiveConfig, PartConfig
from sd_training.errors import ConfigError
from sd_training.models.families import FAMILIES, load_family
from sd_training.models.family import Family, run_text_encoder
from tests.family_makers import PIPELINES, save_pipeline
from tests.tiny_parts import UNET_PARAMS, save_tiny_pipeline
from tests.unit.models.denoiser_steps import load_tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: save_pipeline(name, root / name) for name in PIPELINES}


def load(model: ModelConfig, conditioning: ConditioningConfig | None = None, **objective: Any) -> Family:
    return load_family(model, ObjectiveConfig(**objective), conditioning or ConditioningConfig(), seed=0, meta=True)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_folder_says_its_family(folders: dict[str, Path], name: str) -> None:
    family = load(ModelConfig(pretrained=str(folders[name])))
    assert family.name == name.removesuffix("_without_t5")
    assert type(family) is FAMILIES[family.name]
    assert (family.parts.get("text_encoder_3") is None) == (name != "sd3")
    wrong = "flux" if family.name != "flux" else "sdxl"
    with pytest.raises(ConfigError, match=f"model.family: is {wrong}, but model.pretrained .* is {family.name}"):
        load(ModelConfig(pretrained=str(folders[name]), family=wrong))  # type: ignore[arg-type]


def parts_of(folder: Path, family: str, **changes: PartConfig) -> ModelConfig:
    """Every part from the folder, but the changed ones."""
    names = [path.name for path in folder.iterdir() if path.is_dir() and path.name != "scheduler"]
    parts: dict[str, Any] = {name: PartConfig(pretrained=str(folder)) for name in names}
    parts["noise_scheduler_training"] = PartConfig(pretrained=str(folder))
    return ModelConfig(family=family, **{**parts, **changes})  # type: ignore[arg-type]


MISFITS = [
    ("sdxl", "unet", {"cross_attention_dim": 24}, "cross_attention_dim: is 24, but the other parts need 32"),
    (
        "sdxl",
        "unet",
        {"addition_embed_type": None},
        "addition_embed_type: is None, but the other parts need text_time",
    ),
    ("sdxl", "unet", {"projection_class_embeddings_input_dim": 70}, "is 70, but the other parts need 64"),
    ("sd3", "transformer", {"pooled_projection_dim": 30}, "is 30, but the other parts need 32"),
    (
        "sd3",
        "transformer",
        {"joint_attention_dim": 48},
        "joint_attention_dim: is 48, but the other parts need 32",
    ),
    (
        "sd3",
        "transformer",
        {"in_channels": 4, "out_channels": 4},
        "in_channels: is 4, but the other parts need 8",
    ),
    (
        "pixart",
        "transformer",
        {"caption_channels": 20},
        "caption_channels: is 20, but the other parts need 32",
    ),
    ("pixart", "transformer", {"out_channels": 7}, "out_channels: is 7, but the other parts need 4"),
    ("flux", "transformer", {"in_channels": 16}, "in_channels: is 16, but the other parts need 32"),
    ("sana", "transformer", {"caption_channels": 20}, "caption_channels: is 20, but the other parts need 16"),
    ("sana", "transformer", {"cross_attention_dim": 32}, "cross_attention_dim: is 32, but the other parts need 16"),
    ("sana", "transformer", {"guidance_embeds": True}, "guidance_embeds: is True, but the other parts need False"),
    ("z_image", "transformer", {"cap_feat_dim": 20}, "cap_feat_dim: is 20, but the other parts need 16"),
    ("z_image", "transformer", {"siglip_feat_dim": 8}, "siglip_feat_dim: is 8, but the other parts need None"),
    ("qwen_image", "transformer", {"joint_attention_dim": 20}, "joint_attention_dim: is 20, but the other parts need"),
    ("qwen_image", "transformer", {"in_channels": 4}, "in_channels: is 4, but the other parts need 16"),
    ("qwen_image", "transformer", {"zero_cond_t": True}, "zero_cond_t: is True, but the other parts need False"),
    ("flux2", "transformer", {"joint_attention_dim": 20}, "joint_attention_dim: is 20, but the other parts need 48"),
    ("flux2", "transformer", {"in_channels": 4}, "in_channels: is 4, but the other parts need 16"),
    ("flux2", "transformer", {"guidance_embeds": True}, "guidance_embeds: is True, but the other parts need False"),
    ("flux", "transformer", {"pooled_projection_dim": 20}, "is 20, but the other parts need 16"),
]


@pytest.mark.parametrize(("family", "part", "change", "said"), MISFITS)
def test_parts_that_do_not_fit_are_named(
    folders: dict[str, Path], family: str, part: str, change: dict[str, Any], said: str
) -> None:
    from diffusers import DiffusionPipeline

    stored = DiffusionPipeline.from_pretrained(folders[family], low_cpu_mem_usage=False).components[part]
    params = {name: value for name, value in stored.config.items() if not name.startswith("_")}
    own = PartConfig(target=type(stored).__name__, params={**params, **change})
    with pytest.raises(ConfigError, match=said):
        load(parts_of(folders[family], family, **{part: own}))


def test_pictures_beyond_sd3s_positions_are_refused(folders: dict[str, Path]) -> None:
    family = load(ModelConfig(pretrained=str(folders["sd3"])))
    assert family.size_problems([(64, 64)]) == []
    assert "72 pixels, but pos_embed_max_size of the transformer allows 64" in family.size_problems([(16, 72)])[0]
    assert "patch size 2; use 16 or 20" in family.size_problems([(18, 18)])[0]


def test_options_of_other_families_are_refused(folders: dict[str, Path]) -> None:
    sd3 = ModelConfig(pretrained=str(folders["sd3"]))
    with pytest.raises(ConfigError, match=r"conditioning\.null_text: zeros is only read by sdxl"):
        load(sd3, ConditioningConfig(null_text="zeros"))
    with pytest.raises(ConfigError, match=r"conditioning\.crop_dropout_prob: 0.1 is only read by sdxl"):
        load(sd3, ConditioningConfig(crop_dropout_prob=0.1))
    with pytest.raises(ConfigError, match=r"objective\.shift\.mode: tokens needs FlowMatchEulerDiscreteScheduler"):
        unet = ModelConfig(pretrained=str(folders["sdxl"]))
        load(unet, prediction_type="flow_prediction", shift={"mode": "tokens"})


def test_params_override_single_settings_of_a_stored_flow_scheduler(folders: dict[str, Path]) -> None:
    own = PartConfig(params={"shift": 2.0})
    model = ModelConfig(pretrained=str(folders["sd3"]), noise_scheduler_training=own)
    assert load(model).schedulers.sampler.config.shift == load(model).schedulers.objective.static_shift == 2.0
    model = ModelConfig(pretrained=str(folders["sd3"]), noise_scheduler_training=PartConfig(params={"shif": 2.0}))
    with pytest.raises(ConfigError, match="has no such parameter; did you mean 'shift'"):
        load(model)


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("sd3", {"use_dynamic_shifting": True, "time_shift_type": "linear"}, "time_shift_type 'linear' is not known"),
        ("sdxl", {"prediction_type": "other"}, "prediction_type 'other' is none of epsilon, v_prediction"),
    ],
)
def test_what_is_not_known_of_a_stored_scheduler_is_refused(
    name: str, params: dict[str, Any], said: str, folders: dict[str, Path]
) -> None:
    model = ModelConfig(pretrained=str(folders[name]), noise_scheduler_training=PartConfig(params=params))
    with pytest.raises(ConfigError, match=said):
        load(model)


def test_pictures_have_the_trained_size_by_default(pipeline_dir: Path) -> None:
    family = load(ModelConfig(pretrained=str(pipeline_dir)))
    family.set_default_size(48)
    assert family.pipeline().unet.config.sample_size == 24


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("sd3", {"preset": "edm"}),
        ("mmdit_rope", {"preset": "edm"}),
        ("flux", {"prediction_type": "epsilon"}),
        ("pixart", {"preset": "sd3"}),
    ],
)
def test_objectives_that_a_pipeline_cannot_sample_are_refused(
    folders: dict[str, Path], name: str, objective: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="cannot be sampled by the pipeline of this family; use "):
        load(ModelConfig(pretrained=str(folders[name])), **objective)


def test_text_encoders_of_other_classes_and_lengths_are_refused(folders: dict[str, Path], pipeline_dir: Path) -> None:
    without = PartConfig(pretrained=str(pipeline_dir / "text_encoder"))
    with pytest.raises(ConfigError, match="is a CLIPTextModel, but sd3 needs a CLIPTextModelWithProjection"):
        load(parts_of(folders["sd3"], "sd3", text_encoder=PartConfig(target="CLIPTextModel", params={})))
    long = PartConfig(pretrained=str(folders["pixart"] / "tokenizer"), target="T5Tokenizer")
    with pytest.raises(ConfigError, match="512 tokens per caption, but text_encoder takes 16"):
        load(parts_of(pipeline_dir, "stable_diffusion", text_encoder=without, tokenizer=long))


def test_shifts_are_sampled_as_they_are_trained(folders: dict[str, Path]) -> None:
    model = ModelConfig(
        pretrained=str(folders["sd3"]),
        noise_scheduler_training=PartConfig(params={"shift": 3.0}),
        noise_scheduler_inference=PartConfig(params={"use_dynamic_shifting": True}),
    )
    sampler = load(model).schedulers.sampler
    assert not sampler.config.use_dynamic_shifting and sampler.config.shift == 3.0
    heun = PartConfig(target="FlowMatchHeunDiscreteScheduler")
    sampler = load(model.replace(noise_scheduler_inference=heun)).schedulers.sampler
    assert type(sampler).__name__ == heun.target and sampler.config.shift == 3.0
    with pytest.raises(
        ConfigError, match=r"inference\.target: FlowMatchHeunDiscreteScheduler cannot sample flux; use "
    ):
        load(ModelConfig(pretrained=str(folders["flux"]), noise_scheduler_inference=heun))
    with pytest.raises(
        ConfigError, match=r"inference\.target: FlowMatchHeunDiscreteScheduler cannot sample prediction"
    ):
        load(ModelConfig(pretrained=str(folders["sdxl"]), noise_scheduler_inference=heun), preset="sd3")


def test_an_exported_shift_is_taken_up_again(tmp_path: Path, folders: dict[str, Path]) -> None:
    shift = {"mode": "static", "value": 3.0}
    first = load_family(
        ModelConfig(pretrained=str(folders["stable_diffusion"])),
        ObjectiveConfig(prediction_type="flow_prediction", shift=shift),  # type: ignore[arg-type]
        ConditioningConfig(),
        seed=0,
    )
    first.pipeline().save_pretrained(tmp_path / "flow")
    second = load(ModelConfig(pretrained=str(tmp_path / "flow")))
    objective = second.schedulers.objective
    assert objective.prediction_type == "flow_prediction" and objective.static_shift == 3.0
    assert second.schedulers.sampler.config.flow_shift == 3.0


def test_edm_follows_the_deviation_of_the_latents(folders: dict[str, Path]) -> None:
    for params, deviation, mean in (({}, 1.0, -0.507), ({"sigma_data": 0.5}, 0.5, -1.2)):
        own = PartConfig(target="EDMEulerScheduler", params={"sigma_data": 1.0, **params})
        parts = parts_of(folders["stable_diffusion"], "stable_diffusion", noise_scheduler_training=own)
        for objective in ({}, {"preset": "edm"}):
            family = load(parts, **objective)
            density = family.schedulers.objective.config.timestep_density
            assert (density.name, family.schedulers.objective.config.loss_weighting.name) == ("log_normal", "edm")
            assert density.mean == pytest.approx(mean, abs=1e-3)
            assert family.schedulers.sampler.config.sigma_data == family.schedulers.objective.sigma_data == deviation


def test_a_named_density_beside_a_preset_takes_nothing_of_the_presets(folders: dict[str, Path]) -> None:
    family = load(ModelConfig(pretrained=str(folders["sd3"])), preset="sd3", timestep_density={"name": "mode"})
    assert family.schedulers.objective.config.timestep_density.name == "mode"


LISTED = [
    ({"layer": -9}, r"text_encoders\.0\.layer: -9, but the encoder has layers -1 to -2"),
    ({"pooling": "projection"}, r"text_encoders\.0\.pooling: projection, but T5EncoderModel has none; use mean"),
    ({"pooling": "mean"}, "pooled_dim: is 16, but the other parts need 48"),
    ({"layer": None, "pooling": "mean"}, r"text_dims: is \[32\], but the other parts need \[\]"),
]


@pytest.mark.parametrize(("change", "said"), LISTED)
def test_what_listed_text_encoders_cannot_give_is_named(
    folders: dict[str, Path], tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(folders["mmdit_rope"], folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["text_options"]["text_encoder"] |= change
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=said):
        load(ModelConfig(pretrained=str(folder)))


def test_levels_of_a_unet_are_cut_where_their_heads_can_be_divided(tmp_path: Path) -> None:
    """Stable Diffusion 2 has 5, 10, 20 and 20 heads."""
    unet = {**UNET_PARAMS, "attention_head_dim": [1, 2], "block_out_channels": [16, 16]}
    family, cut = load(ModelConfig(pretrained=str(save_tiny_pipeline(tmp_path, unet=unet)))), set()
    for block in family.blocks():
        heads = [module.heads for name, module in block.named_modules() if name in ("attn1", "attn2")]
        plan = family.tensor_plan(block, 2)
        assert ("ff.net.0.proj" in plan) == bool(heads)
        assert ("attn1.to_q" in plan) == ("attn2.to_out.0" in plan) == (heads == [2, 2])
        cut.add(tuple(heads))
        attention = [module for name, module in block.named_modules() if name in ("attn1", "attn2")]
        assert [module.heads for module in attention] == [1] * len(heads)
    assert cut == {(), (1, 1), (2, 2)}


def test_decoders_keep_nothing_for_further_tokens(tmp_path: Path) -> None:
    family = load_tiny("qwen_image", tmp_path / "pipeline")
    encoder, tokens = family.text_network("text_encoder"), torch.ones(1, 4, dtype=torch.int64)
    assert encoder(tokens).past_key_values is not None
    assert run_text_encoder(encoder, tokens).past_key_values is None
