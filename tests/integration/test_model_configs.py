"""Every shipped YAML: it loads without a warning, its model is the published one at full size, and it trains."""

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from sd_training.build.dry_run import describe
from sd_training.build.plan import make_plan
from sd_training.config.check import warnings
from sd_training.config.load import load_config
from sd_training.config.objective_presets import PRESETS
from sd_training.config.schema import Config
from sd_training.errors import ConfigError
from sd_training.models.cost import forward_flops, parameter_counts
from sd_training.models.families import load_family
from sd_training.models.family import Family
from sd_training.training.diffusion_module import DiffusionModule
from tests import makers
from tests.family_makers import save_pipeline, t5_tokenizer
from tests.integration.training import ROOT, checkpoint_tensors, losses, train
from tests.published_models import FORWARD_GFLOP, FROZEN, PARAMETERS, UNSEEN, WRONG_TEXT, vae
from tests.test_configs import IDS, SHIPPED, filled

MODELS = ("sd14", "sd15", "sd2_base", "sd21_v", "sdxl_base", "sd3_medium", "pixart_sigma", "flux", "mmdit_rope")
FROM_SCRATCH = {"imagenet": "sd15", "sd2_base_stage1": "sd2_base", "sd3_stage1": "sd3_medium"}
"""Template → the model that it trains from random weights."""
CONTINUED = ("sd2_base_stage2", "sd3_stage2", "sd3_stage3", "sdxl_multi_aspect")
"""Templates that go on from a pipeline."""
WEIGHTS = "diffusion_pytorch_model.safetensors"


def path_of(name: str) -> Path:
    folder = "models" if name in MODELS else "templates"
    return ROOT / "configs" / folder / f"{name}.yaml"


def read(name: str) -> Any:
    return yaml.safe_load(path_of(name).read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in shipped files are relative to the project."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tokenizers of the two kinds."""
    folder = tmp_path_factory.mktemp("words")
    makers.tiny_tokenizer().save_pretrained(folder / "clip")
    t5_tokenizer().save_pretrained(folder / "t5")
    return {kind: str(folder / kind) for kind in ("clip", "t5")}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with everything that any shipped file asks of a sample."""
    told = {"original_width": 2048, "original_height": 2048, "punsafe": 0.0, "pwatermark": 0.0}
    samples = [
        {
            "__key__": f"{i:06d}",
            "jpg": makers.encode(makers.picture(i, *((40, 32), (32, 40), (36, 36))[i % 3])),
            "txt": f"a {makers.COLOURS[i % 3]} picture",
            "cls": i % 10,
            "json": json.dumps(told).encode(),
        }
        for i in range(24)
    ]
    folder = tmp_path_factory.mktemp("shards")
    makers.write_shard(folder / "000.tar", samples)
    return folder


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
    assert {path.stem for path in (ROOT / "configs" / "templates").glob("*")} == {*FROM_SCRATCH, *CONTINUED}


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


def test_what_no_count_shows_is_as_published(whole: tuple[str, Family]) -> None:
    name, family = whole
    settings, prediction, noise = UNSEEN[name]
    assert {key: family.denoiser.config[key] for key in settings} == settings
    assert family.objective.prediction_type == prediction
    assert not family.objective.rescale_betas_zero_snr
    sampler = family.schedulers.sampler.config
    if isinstance(noise, tuple):
        assert (sampler["beta_schedule"], sampler["beta_start"], sampler["beta_end"]) == noise
    else:
        assert (sampler["use_dynamic_shifting"], sampler["shift"]) == (noise is None, noise or 1.0)


@pytest.mark.parametrize("name", [*MODELS, *FROM_SCRATCH, *CONTINUED])
def test_a_tenth_is_trained_without_text_and_weights_are_averaged(name: str, tmp_path: Path) -> None:
    config = load_config(filled(path_of(name), tmp_path / "captions.csv"))
    options, encoders = config.conditioning, {"sdxl": 2, "sd3": 3, "mmdit_rope": 3}.get(family_name(name), 1)
    null_share = options.dropout_prob + (1 - options.dropout_prob) * options.encoder_dropout_prob**encoders
    assert null_share == pytest.approx(0.1, abs=1e-3)
    assert config.model.use_ema
    assert config.ema.path == (config.model.pretrained if name in CONTINUED else None)


@pytest.mark.parametrize("name", MODELS)
def test_an_autoencoder_of_other_channels_is_refused(name: str, words: dict[str, str], tmp_path: Path) -> None:
    config = full_size(name, FROZEN[name] | {"vae": vae(8)}, words, tmp_path)
    with pytest.raises(ConfigError, match=r"model\.(unet|transformer)\.params\.in_channels: .* 8|32 wide"):
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


@pytest.mark.parametrize("name", [*MODELS, *FROM_SCRATCH])
def test_headers_give_the_memory_that_a_dry_run_estimates(
    name: str, words: dict[str, str], shards: Path, tmp_path: Path
) -> None:
    frozen = FROZEN[FROM_SCRATCH.get(name, name)]
    report = describe(make_plan(full_size(name, frozen, words, tmp_path, str(shards))))
    figure = report.partition("device memory per process, without activations: ")[2].partition(" =")[0]
    header = " ".join(line.lstrip("# ") for line in path_of(name).read_text(encoding="utf-8").split("\n"))
    assert figure
    assert f"Memory: {figure} per process without activations (estimate of --dry-run, not measured)" in header


@pytest.mark.parametrize("name", [*MODELS, *FROM_SCRATCH, *CONTINUED])
def test_headers_say_what_was_not_measured(name: str) -> None:
    header = path_of(name).read_text(encoding="utf-8").partition("\nsystem:")[0]
    assert "images/s: not measured" in " ".join(line.lstrip("# ") for line in header.split("\n"))
    assert name not in MODELS or "model.pretrained=" in header


@pytest.mark.parametrize(("template", "model"), FROM_SCRATCH.items())
def test_templates_from_scratch_train_the_model_of_that_name(
    template: str, model: str, words: dict[str, str], tmp_path: Path
) -> None:
    ours, theirs = (on_meta(full_size(name, FROZEN[model], words, tmp_path)).denoiser for name in (template, model))
    shapes = [{name: p.shape for name, p in denoiser.named_parameters()} for denoiser in (ours, theirs)]
    assert shapes[0] == shapes[1]


# --- Two steps at tiny size ---


@pytest.fixture(scope="module")
def tiny_pipelines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Family → folder, made when first asked for."""
    folder, made = tmp_path_factory.mktemp("tiny"), dict[str, Path]()

    def of(family: str) -> Path:
        if family not in made:
            made[family] = save_pipeline(family, folder / family)
        return made[family]

    return of


def family_name(name: str) -> str:
    kinds = ("sdxl", "sd3", "pixart", "flux", "mmdit_rope")
    return next((kind for kind in kinds if name.startswith(kind)), "stable_diffusion")


def tiny_run(name: str, pipeline: Path, shards: Path, folder: Path) -> list[str]:
    """The shipped file on a tiny pipeline, at a tiny size; objective, optimizer, schedule, average and conditioning
    are its own."""
    values = read(name)
    changes: dict[str, Any] = {
        "experiment.log_dir": folder,
        "experiment.num_examples_to_see": 4,
        "experiment.save_every": 2,
        "system.batch_size": 2,
        "system.gradient_accumulation": 1,
        "system.workers": 0,
        "model.pretrained": pipeline,
        "model.mixed_precision": "no",
        "dataset.params.path": shards,
        "dataset.params.resolution": 16,
        "logging.every": 1,
        "logging.progress_bar": False,
    }
    if values["model"].get("vae", {}).get("pretrained") == "???":
        changes["model.vae.pretrained"] = pipeline
    if "buckets" in values["dataset"]["params"]:
        changes |= {f"dataset.params.buckets.{k}": v for k, v in {"step": 4, "min_side": 8, "max_side": 32}.items()}
    return [f"config={path_of(name)}", *(f"{key}={value}" for key, value in changes.items())]


@pytest.mark.parametrize("name", [*MODELS, *FROM_SCRATCH, *CONTINUED])
def test_trains_two_steps_and_exports_its_objective(
    name: str, tiny_pipelines: Any, shards: Path, tmp_path: Path
) -> None:
    pipeline = tiny_pipelines(family_name(name))
    argv = tiny_run(name, pipeline, shards, tmp_path)
    run = train(argv)
    run_dir = tmp_path / read(name)["experiment"]["name"]
    assert len(losses(run_dir)) == 2
    assert all(math.isfinite(loss) for loss in losses(run_dir))
    assert isinstance(run.module, DiffusionModule)
    family = run.module.encoders.family
    before, after = load_file(pipeline / family.denoiser_part / WEIGHTS), raw_weights(run_dir)
    assert before.keys() >= after.keys()
    assert any(not torch.equal(before[part], tensor) for part, tensor in after.items())
    scheduler = run_dir / "current_pipeline" / "scheduler" / "scheduler_config.json"
    check_exported(json.loads(scheduler.read_text()), load_config(argv), family)


def raw_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """What is trained, not its average, which some files update rarely."""
    start = "weights:network."
    stored = checkpoint_tensors(run_dir, 2)
    return {name.removeprefix(start): tensor for name, tensor in stored.items() if name.startswith(start)}


def check_exported(stored: Mapping[str, Any], config: Config, family: Family) -> None:
    """The exported scheduler against the file's options."""
    assert config.objective.preset is not None
    prediction = PRESETS[config.objective.preset]["prediction_type"]
    assert family.objective.prediction_type == prediction
    chosen = config.model.noise_scheduler_inference.target
    if prediction != "flow_prediction":
        assert stored["prediction_type"] == prediction
        assert stored.get("rescale_betas_zero_snr", False) is bool(family.objective.rescale_betas_zero_snr)
        assert stored["_class_name"] == (chosen or "DDIMScheduler")
        noise = config.model.noise_scheduler_training.params
        assert {key: stored[key] for key in noise} == noise
        return
    shift = config.objective.shift
    assert stored["_class_name"] == "FlowMatchEulerDiscreteScheduler"
    assert stored["use_dynamic_shifting"] is (shift.mode == "tokens")
    if shift.mode == "static":
        assert stored["shift"] == shift.value
    if shift.mode == "tokens":
        theirs = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        ours = (shift.base_tokens, shift.max_tokens, shift.base_shift, shift.max_shift)
        assert tuple(stored[key] for key in theirs) == ours
