"""Every shipped YAML: it loads without a warning, and its model is the published one at full size."""

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sd_training.build.dry_run import AT_MOST, meta_networks, parameter_counts, run_memory, size_text
from sd_training.build.plan import balanced_encoders, make_plan
from sd_training.config.check import warnings
from sd_training.config.load import load_config
from sd_training.config.plan import Layout, Mesh
from sd_training.config.schema import Config
from sd_training.errors import ConfigError
from sd_training.models.attention import attention_calls
from sd_training.models.families import load_family
from sd_training.models.family import Family
from sd_training.models.flops import encoding_share, forward_flops
from tests import makers
from tests.family_makers import t5_tokenizer
from tests.integration.shipped_models import (
    AUTOENCODERS,
    CONTINUED,
    FINETUNED,
    FROM_SCRATCH,
    MODELS,
    family_name,
    in_the_project,  # noqa: F401 - a fixture
    path_of,
    read,
    write_shards,
)
from tests.integration.training import ROOT
from tests.published_models import ATTENTION, FORWARD_GFLOP, FROZEN, PARAMETERS, UNSEEN, WRONG_TEXT
from tests.test_configs import IDS, SHIPPED, filled


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tokenizers of the two kinds."""
    folder = tmp_path_factory.mktemp("words")
    words = makers.tiny_tokenizer()
    words.model_max_length = 77
    words.chat_template = "{{ messages[0].content }}"
    words.save_pretrained(folder / "clip")
    t5_tokenizer().save_pretrained(folder / "t5")
    return {kind: str(folder / kind) for kind in ("clip", "t5")}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


def local_parts(name: str, frozen: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    """`model` options that put random parts of these arguments where the file names a hub id."""
    parts: dict[str, Any] = {}
    for part, own in read(name)["model"].items():
        if part == "text_encoders":
            parts[part] = [
                entry | {"pretrained": None, "params": params, "tokenizer": words["clip"]}
                for entry, params in zip(own, frozen[part], strict=True)
            ]
        elif part.startswith("tokenizer") and frozen[part.replace("tokenizer", "text_encoder")].get("d_model"):
            parts[part] = {"pretrained": words["t5"]}
        elif part.startswith("tokenizer"):
            parts[part] = {"pretrained": words["clip"]}
        elif part == "noise_scheduler_training" and "pretrained" in own:
            parts[part] = {"pretrained": None, "target": "DDPMScheduler"}
        elif isinstance(own, dict) and "pretrained" in own:
            parts[part] = {"pretrained": None, "params": frozen[part]}
    return {"model": parts}


def full_size(
    name: str, frozen: Mapping[str, Any], words: Mapping[str, str], folder: Path, shards: str = "nowhere"
) -> Config:
    """The shipped file with its hub parts replaced, and what lets it take a few small pictures."""
    here = {
        "experiment": {"log_dir": str(folder)},
        "system": {"batch_size": 1, "gradient_accumulation": 1},
        "dataset": {"params": {"path": shards, "buckets": {"upscale": True}}},
    }
    stand_ins = folder / f"{name}_parts.yaml"
    stand_ins.write_text(yaml.safe_dump(local_parts(name, frozen, words) | here), encoding="utf-8")
    return load_config([f"config={path_of(name)},{stand_ins}"])


def on_meta(config: Config) -> Family:
    return load_family(config.model, config.objective, config.conditioning, seed=0, meta=True)


@pytest.fixture(scope="module", params=MODELS)
def whole(
    request: pytest.FixtureRequest, words: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Family]:
    """A model at full size without weights."""
    name = request.param
    return name, on_meta(full_size(name, FROZEN[name], words, tmp_path_factory.mktemp(name)))


@pytest.mark.parametrize("path", SHIPPED, ids=IDS)
def test_shipped_files_warn_of_nothing(path: Path, tmp_path: Path) -> None:
    assert warnings(load_config(filled(path, tmp_path / "captions.csv"))) == []


def test_every_model_and_template_is_tried_here() -> None:
    assert {path.stem for path in (ROOT / "configs" / "models").glob("*")} == {*MODELS}
    templates = {path.stem for path in (ROOT / "configs" / "templates").glob("*")}
    assert templates == {*FROM_SCRATCH, *CONTINUED, *FINETUNED, *AUTOENCODERS}


def test_full_size_models_have_the_published_parameters(whole: tuple[str, Family]) -> None:
    name, family = whole
    counts = parameter_counts(family.networks())
    assert next(iter(counts)) == family.denoiser_part
    assert {part: round(counts[part] / 1e6, 1) for part in PARAMETERS[name]} == PARAMETERS[name]
    if name == "mmdit_rope":
        assert counts["transformer"] == 1_247_517_187


def test_full_size_models_cost_the_known_operations(whole: tuple[str, Family], monkeypatch: pytest.MonkeyPatch) -> None:
    name, family = whole
    for (side, tokens), expected in FORWARD_GFLOP.get(name, {}).items():
        text = family.blank_conditioning(1, torch.device("meta"))
        text.states = [states[:, :tokens] for states in text.states]
        text.masks = [mask if mask is None else mask[:, :tokens] for mask in text.masks]
        assert text.states[0].shape[1] == tokens
        with monkeypatch.context() as patch:
            patch.setattr(family, "blank_conditioning", lambda count, device, text=text: text)
            gflop = forward_flops(family, side, side) / 1e9
        half_a_digit = 0.5 * 10.0 ** -len(expected.partition(".")[2])
        assert gflop == pytest.approx(float(expected), rel=1e-3, abs=half_a_digit), (side, tokens)
        if name == "flux":  # what NVIDIA's MLPerf entry (training results 5.1) counts per picture of a step
            assert 3 * gflop == pytest.approx(20.3e3, rel=0.01)


def test_full_size_models_ask_for_attention_of_known_kinds(whole: tuple[str, Family]) -> None:
    """A new mask, or another type, would take the fast kernels away in silence."""
    name, family = whole
    calls = attention_calls(family, (256, 256), "bf16")
    found: dict[tuple[int, bool], int] = {}
    for call, count in calls.items():
        assert call.dtype == torch.bfloat16
        kind = call.query[-1], call.mask is not None
        found[kind] = found.get(kind, 0) + count
    assert found == ATTENTION[name]


def test_what_no_count_shows_is_as_published(whole: tuple[str, Family]) -> None:
    name, family = whole
    settings, prediction, noise = UNSEEN[name]
    assert {key: family.denoiser.config[key] for key in settings} == settings
    assert family.schedulers.objective.prediction_type == prediction
    assert not family.schedulers.objective.config.rescale_betas_zero_snr
    sampler = family.schedulers.sampler.config
    if isinstance(noise, tuple):
        assert (sampler["beta_schedule"], sampler["beta_start"], sampler["beta_end"]) == noise
    else:
        assert (sampler["use_dynamic_shifting"], sampler["shift"]) == (noise is None, noise or 1.0)


@pytest.mark.parametrize("name", [*MODELS, *FROM_SCRATCH, *CONTINUED])
def test_a_tenth_is_trained_without_text_and_weights_are_averaged(name: str, tmp_path: Path) -> None:
    config = load_config(filled(path_of(name), tmp_path / "captions.csv"))
    options, encoders = config.conditioning, {"sdxl": 2, "sd3": 3, "mmdit_rope": 3}.get(family_name(name), 1)
    assert isinstance(options.encoder_dropout_prob, float)
    null_share = options.dropout_prob + (1 - options.dropout_prob) * options.encoder_dropout_prob**encoders
    assert null_share == pytest.approx(0.1, abs=1e-3)
    assert config.model.use_ema
    assert config.ema.path == (config.model.pretrained if name in CONTINUED else None)


@pytest.mark.parametrize("name", MODELS)
def test_an_autoencoder_of_other_channels_is_refused(name: str, words: dict[str, str], tmp_path: Path) -> None:
    other = {"z_dim": 8, "latents_mean": None} if name == "qwen_image" else {"latent_channels": 8}
    config = full_size(name, FROZEN[name] | {"vae": FROZEN[name]["vae"] | other}, words, tmp_path)
    with pytest.raises(ConfigError, match=r"model\.(unet|transformer)\.params\.in_channels: .* need (8|32)"):
        on_meta(config)


@pytest.mark.parametrize("name", WRONG_TEXT)
def test_a_text_encoder_of_another_width_is_refused(name: str, words: dict[str, str], tmp_path: Path) -> None:
    part, params, option = WRONG_TEXT[name]
    config = full_size(name, FROZEN[name] | {part: params}, words, tmp_path)
    with pytest.raises(ConfigError, match=rf"model\.(unet|transformer)\.params\.{option}: "):
        on_meta(config)


def test_a_listed_text_encoder_of_another_width_is_refused(words: dict[str, str], tmp_path: Path) -> None:
    frozen = copy.deepcopy(FROZEN["mmdit_rope"])
    frozen["text_encoders"][0]["hidden_size"] = 2048
    with pytest.raises(ConfigError, match=r"model\.transformer\.params\.text_dims: "):
        on_meta(full_size("mmdit_rope", frozen, words, tmp_path))


def test_encoder_processes_that_keep_up(words: dict[str, str], tmp_path: Path) -> None:
    """Stable Diffusion 2 at 512 pixels: 1.16 of 3.57 TFLOP are those of the frozen encoders."""
    config = full_size("sd2_base", FROZEN["sd2_base"], words, tmp_path)
    assert encoding_share(config) == pytest.approx(1.16 / 3.57, abs=0.005)
    assert [balanced_encoders(config, gpus) for gpus in (1, 2, 3, 4, 8)] == [0, 1, 1, 2, 3]


def header(name: str) -> str:
    """The comment at the top of a shipped file, in one line."""
    text = path_of(name).read_text(encoding="utf-8").partition("\nsystem:")[0]
    return " ".join(line.lstrip("# ") for line in text.split("\n"))


def as_shipped(name: str, words: Mapping[str, str], folder: Path, *more: str) -> Config:
    """The file with its own batch, and random parts of full size."""
    model = FROM_SCRATCH.get(name, CONTINUED.get(name, name))
    begun = name if name not in CONTINUED else model
    full_size(begun, FROZEN[model], words, folder)
    system = "{" + ", ".join(f"{key}: {value}" for key, value in read(name)["system"].items()) + "}"
    files = [path_of(model), path_of(name)] if name in CONTINUED else [path_of(name)]
    paths = ",".join(map(str, [*files, folder / f"{begun}_parts.yaml"]))
    anew = ["model.pretrained=null", "ema.path=null"] if name in CONTINUED else []
    return load_config([f"config={paths}", f"system={system}", *anew, *more])


@pytest.mark.parametrize("name", [*MODELS, *FROM_SCRATCH, *CONTINUED])
def test_the_batch_fits_the_gpus_of_the_header_by_the_estimate_of_a_dry_run(
    name: str, words: dict[str, str], tmp_path: Path
) -> None:
    """With a twentieth left for CUDA itself and fragments. The GB of a GPU are GiB: 80 are 81,559 MiB (nvidia-smi)."""
    text = header(name)
    sizes = [size for pair in re.findall(r"(\d+) GB GPUs|GPUs with (\d+) GB", text) for size in pair if size]
    smaller = re.findall(r"; with (\d+) GB add (.+?)\. ", text)
    assert sizes and len(smaller) == text.count("GB add")
    for gigabytes, own in [*((size, "") for size in sizes), *smaller]:
        config = as_shipped(name, words, tmp_path, *own.split())
        plan = make_plan(config, is_described=True)
        if sharing := re.search(r"(\d+) or more GPUs with", text):
            plan = replace(plan, layout=Layout("fsdp", Mesh(1, int(sharing[1]), 1)))
        memory = run_memory(plan, *meta_networks(config))
        assert memory[AT_MOST] < 0.95 * int(gigabytes) * 2**30, (name, gigabytes, own, memory)
        if not own and name not in CONTINUED:
            figure = size_text(memory["sum without activations"])
            assert f"Memory: {figure} per process without activations (estimate of --dry-run, not measured)" in text


@pytest.mark.parametrize("name", [*MODELS, *FROM_SCRATCH, *CONTINUED, *AUTOENCODERS])
def test_headers_say_what_was_not_measured(name: str) -> None:
    text = header(name)
    assert "images/s: not measured" in text
    assert name not in MODELS or "model.pretrained=" in text


@pytest.mark.parametrize(("template", "model"), FROM_SCRATCH.items())
def test_templates_from_scratch_train_the_model_of_that_name(
    template: str, model: str, words: dict[str, str], tmp_path: Path
) -> None:
    ours, theirs = (on_meta(full_size(name, FROZEN[model], words, tmp_path)).denoiser for name in (template, model))
    shapes = [{name: p.shape for name, p in denoiser.named_parameters()} for denoiser in (ours, theirs)]
    assert shapes[0] == shapes[1]
