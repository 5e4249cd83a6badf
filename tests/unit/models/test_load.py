"""Loading: parts and mistakes, the hub's answers, and settings of a repository that are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from sd_training.config.schema import ConditioningConfig, ModelConfig, ObjectiveConfig, PartConfig
from sd_training.data.order.buckets import size_problems
from sd_training.errors import ConfigError, DataError
from sd_training.export.pipeline import load_pipeline
from sd_training.models.families import load_family
from sd_training.models.family import Family, latent_grid
from sd_training.models.load import (
    effective_part,
    load_noise_scheduler,
    load_part,
    refused_settings,
)
from sd_training.models.schedulers import prediction_warning
from tests import makers
from tests.faults.hostile_files import canary_pickle


def load_network(model: ModelConfig, part: str, *, seed: int, meta: bool = False) -> Any:
    return load_part(part, effective_part(model, part), seed=seed, meta=meta)


def load_stable_diffusion(model: ModelConfig, objective: ObjectiveConfig, *, seed: int, meta: bool = False) -> Family:
    return load_family(model, objective, ConditioningConfig(), seed=seed, meta=meta)


def parts_from(folder: Path, **changes: PartConfig) -> ModelConfig:
    names = ("vae", "text_encoder", "tokenizer", "unet", "noise_scheduler_training", "noise_scheduler_inference")
    return ModelConfig(**{name: PartConfig(pretrained=str(folder)) for name in names} | changes)  # type: ignore[arg-type]


def test_whole_pipeline_and_parts_give_the_same_weights(pipeline_dir: Path) -> None:
    whole = load_stable_diffusion(ModelConfig(pretrained=str(pipeline_dir)), ObjectiveConfig(), seed=0)
    own = {
        "unet": PartConfig(pretrained=str(pipeline_dir / "unet")),
        "vae": PartConfig(pretrained=str(pipeline_dir / "vae")),
    }
    parts = load_stable_diffusion(parts_from(pipeline_dir, **own), ObjectiveConfig(), seed=0)
    for name in ("unet", "vae", "text_encoder"):
        for left, right in zip(whole.parts[name].parameters(), parts.parts[name].parameters(), strict=True):
            assert torch.equal(left, right)
    assert whole.vae.config.scaling_factor == 0.7


@pytest.mark.parametrize("folder", [".", "unet"])
def test_another_prediction_type_than_that_of_the_stored_weights_is_a_warning(pipeline_dir: Path, folder: str) -> None:
    model = ModelConfig(unet=PartConfig(pretrained=str(pipeline_dir / folder)))
    assert prediction_warning(model, "unet", "epsilon") is None
    assert "the weights of model.unet.pretrained answer epsilon" in str(prediction_warning(model, "unet", "edm"))
    assert prediction_warning(ModelConfig(), "unet", "edm") is None


def test_random_weights_depend_on_seed_and_part_only(pipeline_dir: Path) -> None:
    model = ModelConfig(unet=PartConfig(target="diffusers.UNet2DConditionModel", params=makers.UNET_PARAMS))
    before = torch.get_rng_state()
    first, again, other = (load_network(model, "unet", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_meta_networks_have_the_right_size(pipeline_dir: Path) -> None:
    model = ModelConfig(pretrained=str(pipeline_dir))
    for part in ("unet", "vae", "text_encoder"):
        meta, real = load_network(model, part, seed=0, meta=True), load_network(model, part, seed=0)
        assert all(p.is_meta for p in meta.parameters())
        assert sum(p.numel() for p in meta.parameters()) == sum(p.numel() for p in real.parameters())


@pytest.mark.parametrize(
    ("part", "config", "message"),
    [
        (
            "unet",
            {"target": "os.system"},
            "model.unet.target: 'os.system' is not allowed; use one of UNet2DConditionModel",
        ),
        ("vae", {"target": "UNet2DConditionModel"}, "model.vae.target: .* use one of AutoencoderDC, AutoencoderKL"),
        ("unet", {"params": {"in_chanels": 4}}, "model.unet.params.in_chanels: .* did you mean 'in_channels'"),
        ("unet", {"params": {"block_out_channels": [7]}}, "model.unet.params: UNet2DConditionModel cannot be made"),
        (
            "unet",
            {"pretrained": "/nowhere/at/all"},
            "model.unet.pretrained: '/nowhere/at/all' is no folder here",
        ),
        (
            "unet",
            {"pretrained": "some/model"},
            "model.unet.pretrained: 'some/model' is no folder here, and it is not in the local cache, and",
        ),
    ],
)
def test_mistakes_name_the_option(part: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_network(ModelConfig(**{part: PartConfig(**config)}), part, seed=0)  # type: ignore[arg-type]


def test_a_folder_without_the_part_is_named(tmp_path: Path, pipeline_dir: Path) -> None:
    shutil.copytree(pipeline_dir, tmp_path / "p")
    shutil.rmtree(tmp_path / "p" / "unet")
    with pytest.raises(ConfigError, match=r"model.unet.pretrained: .* has no folder 'unet' and is no unet itself"):
        load_network(ModelConfig(pretrained=str(tmp_path / "p")), "unet", seed=0)


def test_pickled_weights_are_not_loaded(tmp_path: Path, pipeline_dir: Path) -> None:
    shutil.copytree(pipeline_dir / "unet", tmp_path / "unet")
    weights = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save({}, tmp_path / "unet" / "diffusion_pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ConfigError, match=r"model.unet.pretrained: .* cannot be loaded"):
        load_network(ModelConfig(unet=PartConfig(pretrained=str(tmp_path / "unet"))), "unet", seed=0)


def test_a_missing_tensor_is_refused(tmp_path: Path, pipeline_dir: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(pipeline_dir / "unet", tmp_path / "unet")
    weights = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    tensors.pop("conv_in.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model.unet.pretrained: .*conv_in.weight"):
        load_network(ModelConfig(unet=PartConfig(pretrained=str(tmp_path / "unet"))), "unet", seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"cross_attention_dim": 24},
            "model.unet.params.cross_attention_dim: is 24, but the other parts need 16",
        ),
        (
            {"in_channels": 3, "out_channels": 3},
            "model.unet.params.in_channels: is 3, but the other parts need 4",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(change: dict[str, Any], message: str, pipeline_dir: Path) -> None:
    unet = PartConfig(params={**makers.UNET_PARAMS, **change})
    with pytest.raises(ConfigError, match=message):
        load_stable_diffusion(parts_from(pipeline_dir, unet=unet), ObjectiveConfig(), seed=0, meta=True)


def test_resolution_that_does_not_fit_names_the_nearest(pipeline_dir: Path) -> None:
    vae = load_network(ModelConfig(pretrained=str(pipeline_dir)), "vae", seed=0)
    factor = latent_grid(vae).downscale
    assert size_problems(factor, [(16, 16)]) == []
    assert "dataset.params.resolution: 17 is not a multiple" in size_problems(factor, [(17, 17)])[0]
    assert "use 16 or 18" in size_problems(factor, [(17, 17)])[0]
    assert "factor 2 × the denoiser's patch size 2; use 16 or 20" in size_problems(factor, [(18, 18)], 2)[0]
    problems = size_problems(factor, [(16, 17), (17, 16), (21, 16)])
    assert [problem.partition(" is")[0] for problem in problems] == [f"dataset.params.buckets: {n}" for n in (17, 21)]


def test_scheduler_settings_follow_the_objective(pipeline_dir: Path) -> None:
    model = ModelConfig(pretrained=str(pipeline_dir))
    plain = load_stable_diffusion(model, ObjectiveConfig(), seed=0)
    assert plain.schedulers.sampler.config.prediction_type == "epsilon"
    objective = ObjectiveConfig(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    parts = load_stable_diffusion(model, objective, seed=0)
    assert parts.schedulers.sampler.config.prediction_type == "v_prediction"
    assert parts.schedulers.sampler.config.rescale_betas_zero_snr
    assert parts.schedulers.sampler.config.timestep_spacing == "trailing"
    assert parts.schedulers.objective.prediction_type == "v_prediction"


def test_zero_snr_needs_v_prediction(pipeline_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"objective.rescale_betas_zero_snr: true needs prediction_type v_prediction"):
        load_stable_diffusion(
            ModelConfig(pretrained=str(pipeline_dir)), ObjectiveConfig(rescale_betas_zero_snr=True), seed=0
        )


def test_a_v_prediction_folder_trains_v(tmp_path: Path) -> None:
    folder = makers.save_tiny_pipeline(tmp_path / "v", prediction_type="v_prediction")
    parts = load_stable_diffusion(ModelConfig(pretrained=str(folder)), ObjectiveConfig(), seed=0)
    assert parts.schedulers.objective.prediction_type == "v_prediction"


def test_sampler_class_comes_from_the_folder_or_the_target(tmp_path: Path, pipeline_dir: Path) -> None:
    inference = PartConfig(pretrained=str(pipeline_dir), target="EulerDiscreteScheduler")
    parts = load_stable_diffusion(
        parts_from(pipeline_dir, noise_scheduler_inference=inference), ObjectiveConfig(), seed=0
    )
    assert type(parts.schedulers.sampler).__name__ == "EulerDiscreteScheduler"
    assert parts.schedulers.sampler.config.beta_schedule == "scaled_linear"
    shutil.copytree(pipeline_dir, tmp_path / "p")
    config = tmp_path / "p" / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"_class_name": "subprocess.Popen"}))
    with pytest.raises(ConfigError, match=r"'subprocess.Popen' is not allowed"):
        load_stable_diffusion(ModelConfig(pretrained=str(tmp_path / "p")), ObjectiveConfig(), seed=0)


def test_ema_weights_by_path(pipeline_dir: Path) -> None:
    network = load_network(ModelConfig(pretrained=str(pipeline_dir)), "unet", seed=0)
    again = load_part("unet", PartConfig(pretrained=str(pipeline_dir)), seed=0, option="ema.path")
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), network.parameters(), strict=True))
    with pytest.raises(ConfigError, match=r"^ema.path: '/nowhere/x' is no folder here"):
        load_part("unet", PartConfig(pretrained="/nowhere/x"), seed=0, option="ema.path")


def test_a_repository_of_the_hub_is_a_pipeline_or_the_part_itself(
    pipeline_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name, source in (("pipeline", pipeline_dir), ("part", pipeline_dir / "text_encoder")):
        cache = tmp_path / f"models--owner--{name}"
        shutil.copytree(source, cache / "snapshots" / "abc")
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text("abc")
        load_part("text_encoder", PartConfig(pretrained=f"owner/{name}"), seed=0)
    (cache / "snapshots" / "abc" / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    with pytest.raises(ConfigError, match=r"'owner/part' has adapter_config.json"):
        load_part("text_encoder", PartConfig(pretrained="owner/part"), seed=0)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(path: Path, text: str) -> None:
    path.write_text(text)


def pickled_shard(folder: Path, weights: str, name: str) -> None:
    (folder / weights).rename(folder.parent / "elsewhere.safetensors")
    (folder / "x.bin").write_bytes(canary_pickle(folder.parents[1] / "canary"))
    (folder / f"{weights}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))


UNET, TEXT = "diffusion_pytorch_model.safetensors", "model.safetensors"
HOSTILE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "kernel": (
        "text_encoder",
        lambda p: edit(p / "text_encoder/config.json", _attn_implementation="someone/kernel"),
        "kernels from elsewhere are never",
    ),
    "adapter": (
        "text_encoder",
        lambda p: rewrite(p / "text_encoder/adapter_config.json", '{"base_model_name_or_path": "someone/else"}'),
        "adapters are not loaded with a model",
    ),
    "quantizer": (
        "text_encoder",
        lambda p: edit(p / "text_encoder/config.json", quantization_config={"quant_method": "bitsandbytes"}),
        "has quantization_config",
    ),
    "pickled unet": ("unet", lambda p: pickled_shard(p / "unet", UNET, "x.bin"), "names 'x.bin'"),
    "unet elsewhere": ("unet", lambda p: pickled_shard(p / "unet", UNET, "../elsewhere.safetensors"), "names '../else"),
    "pickled text": ("text_encoder", lambda p: pickled_shard(p / "text_encoder", TEXT, "x.bin"), "names 'x.bin'"),
    "no index": ("unet", lambda p: rewrite(p / "unet" / f"{UNET}.index.json", "[]"), "not readable as JSON"),
    "deep": ("unet", lambda p: rewrite(p / "unet/config.json", "[" * 9999), "not readable as JSON"),
    "huge": ("unet", lambda p: edit(p / "unet/config.json", block_out_channels=[8, 10**9]), "cannot be"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_parts_are_refused(name: str, tmp_path: Path, pipeline_dir: Path) -> None:
    part, change, reason = HOSTILE[name]
    folder = tmp_path / "pipeline"
    shutil.copytree(pipeline_dir, folder)
    change(folder)
    for is_meta in (False, True):
        with pytest.raises(ConfigError, match=rf"model\.{part}\.pretrained: .*{reason}"):
            load_network(ModelConfig(pretrained=str(folder)), part, seed=0, meta=is_meta)
    with pytest.raises(DataError):
        load_pipeline(folder)
    assert not (tmp_path / "canary").exists()


def test_code_of_a_tokenizer_is_not_run_nor_asked_about(
    tmp_path: Path, pipeline_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(pipeline_dir, folder)
    code = f"import os\nos.mkdir({str(tmp_path / 'canary')!r})\nfrom transformers import CLIPTokenizer as Custom\n"
    (folder / "tokenizer" / "custom.py").write_text(code)
    mark = {"auto_map": {"AutoTokenizer": ["custom.Custom", None]}, "tokenizer_class": "Custom"}
    edit(folder / "tokenizer/tokenizer_config.json", **mark)
    config = ModelConfig(pretrained=str(folder))
    with pytest.raises(ConfigError, match=r"model\.tokenizer\.pretrained: .* cannot be loaded as AutoTokenizer"):
        load_part("tokenizer", effective_part(config, "tokenizer").replace(target="AutoTokenizer"), seed=0)
    load_part("tokenizer", effective_part(config, "tokenizer"), seed=0)
    assert not (tmp_path / "canary").exists() and "[y/N]" not in capfd.readouterr().out


def test_a_scheduler_that_asks_for_everything_is_a_sentence(tmp_path: Path, pipeline_dir: Path) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(pipeline_dir, folder)
    edit(folder / "scheduler/scheduler_config.json", num_train_timesteps=10**15)
    with pytest.raises(ConfigError, match="cannot be loaded as DD"):
        load_noise_scheduler(ModelConfig(pretrained=str(folder)), "noise_scheduler_training")


@pytest.mark.parametrize(
    "settings",
    [
        {"_attn_implementation": "sdpa", "_attn_implementation_autoset": True, "attn_implementation": None},
        {"text_config": {"attn_implementation": {"text": "flash_attention_2"}}},
        {"auto_map": {"AutoModel": "x.Y"}, "quantization_config": None},
    ],
)
def test_usual_settings_pass(settings: dict[str, object]) -> None:
    assert list(refused_settings(settings, "x")) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"text_config": {"attn_implementation": {"text": "a/b"}}},
        {"layers": [{"attn_implementation_internal": "a@b"}]},
        {"kernel_config": {"x": "a/b:c"}},
    ],
)
def test_kernels_are_found_wherever_they_stand(settings: dict[str, object]) -> None:
    assert len(list(refused_settings(settings, "x"))) == 1


def one_part(folder: Path, part: str = "unet", *, from_scratch: bool = False, **own: Any) -> ModelConfig:
    return ModelConfig(pretrained=str(folder), from_scratch=from_scratch, **{part: PartConfig(**own)})  # type: ignore[arg-type]


def test_one_part_comes_from_elsewhere(tmp_path: Path, pipeline_dir: Path) -> None:
    other = makers.save_tiny_pipeline(tmp_path / "other", seed=7, unet=makers.SMALLER_UNET)
    both = (ModelConfig(pretrained=str(folder)) for folder in (pipeline_dir, other))
    whole, theirs = (load_stable_diffusion(model, ObjectiveConfig(), seed=0).parts for model in both)
    for own in (other, other / "unet"):
        mixed = load_stable_diffusion(one_part(pipeline_dir, pretrained=str(own)), ObjectiveConfig(), seed=0).parts
        assert same_weights(mixed["unet"], theirs["unet"]) and not same_weights(mixed["unet"], whole["unet"])
        assert same_weights(mixed["vae"], whole["vae"]) and same_weights(mixed["text_encoder"], whole["text_encoder"])


def same_weights(left: Any, right: Any) -> bool:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_one_part_begins_from_scratch_in_its_stored_architecture(pipeline_dir: Path) -> None:
    stored = load_network(ModelConfig(pretrained=str(pipeline_dir)), "unet", seed=0)
    random, again, other = (load_network(one_part(pipeline_dir, from_scratch=True), "unet", seed=s) for s in (0, 0, 1))
    settings = [{k: v for k, v in network.config.items() if k[0] != "_"} for network in (random, stored)]
    assert settings[0] == settings[1]
    assert same_weights(random, again) and not same_weights(random, other) and not same_weights(random, stored)
    changed = one_part(pipeline_dir, from_scratch=True, params={"layers_per_block": 2})
    deeper = load_stable_diffusion(changed, ObjectiveConfig(), seed=0, meta=True).denoiser
    assert deeper.config.layers_per_block == 2 and len(deeper.down_blocks[0].resnets) == 2
    assert prediction_warning(changed, "unet", "edm") is None


@pytest.mark.parametrize(
    ("part", "own", "message"),
    [
        ("unet", {"from_scratch": True, "params": {"in_chanels": 4}}, r"model\.unet\.params\.in_chanels: .* did you"),
        ("unet", {"from_scratch": True, "params": {"cross_attention_dim": 24}}, r"cross_attention_dim: is 24, but the"),
        ("unet", {"pretrained": "/nowhere/x"}, r"model\.unet\.pretrained: '/nowhere/x' is no folder here"),
        ("transformer", {"pretrained": "x/y"}, r"model\.transformer: stable_diffusion has none; its denoiser is model"),
    ],
)
def test_mistakes_of_one_part_name_it(part: str, own: dict[str, Any], message: str, pipeline_dir: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_stable_diffusion(one_part(pipeline_dir, part, **own), ObjectiveConfig(), seed=0, meta=True)
