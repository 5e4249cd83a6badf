"""Rules between options: each can fail, and none fails on a good configuration."""

import argparse
import json
from pathlib import Path

import pytest

from sd_training.config.check import check, warnings
from sd_training.config.load import load_config
from sd_training.config.schema import Config
from sd_training.config.value_types import output_path, path_argument
from sd_training.errors import ConfigError

PARTS = ("vae", "text_encoder", "tokenizer", "noise_scheduler_training")
BASE = {
    "experiment.log_dir": "runs",
    "experiment.name": "first",
    "experiment.num_examples_to_see": "100000",
    "dataset.params.path": "data.tar",
    "model.pretrained": "someone/pipeline",
}
FROM_PARTS = {
    **{key: value for key, value in BASE.items() if key != "model.pretrained"},
    **{f"model.{part}.pretrained": "someone/pipeline" for part in PARTS},
    "model.unet.target": "diffusers.UNet2DConditionModel",
}


def load(base: dict[str, str], **changes: str) -> Config:
    options = base | {key.replace("__", "."): value for key, value in changes.items()}
    return load_config([f"{key}={value}" for key, value in options.items()])


def report(base: dict[str, str], **changes: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(base, **changes)
    return error.value.problems


@pytest.mark.parametrize("base", [BASE, FROM_PARTS])
def test_good_configurations_pass_without_a_word(base: dict[str, str]) -> None:
    config = load(base)
    assert check(config) == []
    assert warnings(config) == []


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        (
            {"dataset__params__batch_size": "64", "system__batch_size": "32"},
            "dataset.params.batch_size: is 64, but system.batch_size is 32; remove dataset.params.batch_size",
        ),
        ({"experiment__num_examples_to_see": "null"}, "experiment.num_examples_to_see: is required, or experiment.num"),
        ({"experiment__num_steps": "7"}, "experiment.num_steps: the length of the run is given by experiment.num_exam"),
        (
            {"experiment__num_epochs": "2", "experiment__num_examples_to_see": "null"}
            | {"dataset__mix": "[{params: {path: x}}]"},
            "experiment.num_epochs: with dataset.mix a pass over the data is not defined",
        ),
        (
            {"optimizer__name": "prodigy", "optimizer__params__learning_rate": "1", "optimizer__scale_lr": "sqrt"},
            "optimizer.scale_lr: prodigy finds",
        ),
        ({"dataset__params__num_examples_to_see": "7"}, "dataset.params.num_examples_to_see"),
        ({"dataset__params__filters__a": "open('x')"}, "dataset.params.filters.a"),
        ({"sampling__every": "10"}, "sampling.prompts: is empty"),
        ({"model__lora__alpha": "2"}, "model.lora.alpha: is 2.0, but is only read with model.lora.rank, which is 0"),
        ({"model__lora__rank": "2", "model__train_text_encoder": "true"}, "model.train_text_encoder: model.lora.rank"),
        ({"model__lora__rank": "2", "model__from_scratch": "true"}, "model.from_scratch: makes random weights"),
        (
            {"model__lora__rank": "2", "model__lora__merge": "false"}
            | {"evaluation__every": "1000", "evaluation__inception": "x", "evaluation__path": "y"}
            | {"experiment__save_every": "1000"},
            "evaluation.every: draws from exported pipelines",
        ),
        ({"model__lora__rank": "2", "ema__path": "someone/x", "model__use_ema": "true"}, "ema.path: is of whole"),
        (
            {"model__lora__rank": "2", "model__lora__base": "int8", "distributed__strategy": "fsdp"},
            "model.lora.base: int",
        ),
        (
            {"model__lora__rank": "2", "model__lora__base": "int8", "distributed__mesh__fsdp": "2"},
            "model.lora.base: int",
        ),
        ({"model__lora__rank": "2", "distributed__mesh__tensor": "2"}, "distributed.mesh.tensor: cannot split adapted"),
        ({"model__bf16_norms": "true", "model__mixed_precision": "fp16"}, "model.bf16_norms: true needs model.mixed"),
        ({"model__float8": "rowwise", "model__lora__rank": "2"}, "model.float8: is for weights that are trained"),
        ({"model__float8": "rowwise", "model__mixed_precision": "no"}, "model.float8: needs model.mixed_precision=b"),
        (
            {"model__float8": "rowwise", "model__train": "vae"},
            'model.float8: is "rowwise", but is only read with model',
        ),
        (
            {"distributed__dist_url": "tcp://host:80"},
            'distributed.dist_url: is "tcp://host:80", but this option is gone',
        ),
        (
            {"experiment__log_dir": "gs://b/runs"},
            "experiment.log_dir: 'gs://b/runs' is a URL, and files are written to local or mounted folders only; "
            "checkpoint.mirror copies the checkpoints of a run to an object store",
        ),
        ({"experiment__log_dir": "gs:/b/runs"}, "experiment.log_dir: 'gs:/b/runs' is a URL"),
        ({"experiment__log_dir": "runs/gs://b"}, "experiment.log_dir: 'runs/gs://b' is a URL"),
        (
            {"experiment__log_dir": "$NOWHERE/runs"},
            "experiment.log_dir: '$NOWHERE/runs' names $NOWHERE, which is not set",
        ),
        (
            {"experiment__log_dir": "$STORE/runs"},
            "experiment.log_dir: '$STORE/runs' is a URL, and files are written to",
        ),
        ({"experiment__log_dir": "$A_TOKEN"}, "experiment.log_dir: '$A_TOKEN' names $A_TOKEN, which may hold a secret"),
        ({"experiment__log_dir": "$PRICE"}, "experiment.log_dir: '$PRICE' is '/a$b' with its variables; a path here"),
        (
            {"experiment__log_dir": "~nobody-here/x"},
            "experiment.log_dir: '~nobody-here/x' begins with ~ and a user that",
        ),
        ({"experiment__name": "a$HOME"}, 'experiment.name: is "a$HOME"'),
        ({"experiment__name": ".."}, 'experiment.name: is ".."'),
        ({"experiment__name": "~root"}, 'experiment.name: is "~root"'),
        ({"experiment__name": "a/b"}, 'experiment.name: is "a/b"'),
        ({"dataset__params__index_dir": "s3://b/index"}, "dataset.params.index_dir: 's3://b/index' is a URL"),
        ({"dataset__params__remote__cache_dir": "s3://b/c"}, "dataset.params.remote.cache_dir: 's3://b/c' is a URL"),
        ({"model__pretrained": "./nowhere"}, "model.pretrained: './nowhere' does not exist"),
        ({"model__pretrained": "~/nowhere"}, "model.pretrained: '~/nowhere' does not exist (~ is not expanded)"),
        ({"checkpoint__mirror": "s3://key:word@bucket/x"}, "checkpoint.mirror: is "),
        (
            {"checkpoint__mirror": "https://bucket/x"},
            'checkpoint.mirror: is "https://bucket/x" (command line); allowed',
        ),
        ({"ema__path": "/nowhere", "model__use_ema": "true"}, "ema.path: '/nowhere' does not exist"),
        (
            {"model__vae_scaling_factor": "keep"},
            'model.vae_scaling_factor: is "keep", but is only read with model.train=vae',
        ),
        (
            {"objective__kl_weight": "1"},
            "objective.kl_weight: is 1.0, but is only read with model.train=vae, not denoiser",
        ),
        (
            {"dataset__params__idx_to_prompt__0": "a cat"},
            'dataset.params.idx_to_prompt: is {"0": "a cat"}, but is only read with dataset.type=Class',
        ),
        (
            {"dataset__params__captions__drop_tag_prob": "0.5"},
            "dataset.params.captions.drop_tag_prob: is 0.5, but is only read with dataset.params.captions.tag_",
        ),
        ({"dataset__type": "ClassificationWebDataset"}, "dataset.params.idx_to_prompt: is required"),
    ],
)
def test_contradictions(changes: dict[str, str], start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    for name, value in {"STORE": "gs://b", "A_TOKEN": "12345678", "PRICE": "/a$b"}.items():
        monkeypatch.setenv(name, value)
    problems = report(BASE, **changes)
    assert len(problems) == 1, problems
    assert problems[0].startswith(start)


def test_output_paths_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nowhere/somebody")
    monkeypatch.setenv("SCRATCH", "/scratch")
    assert output_path("~/runs") == Path("/nowhere/somebody/runs")
    assert output_path("$SCRATCH/${SCRATCH}x/runs") == Path("/scratch//scratchx/runs")
    with pytest.raises(argparse.ArgumentTypeError, match="'gs://b/x' is a URL"):
        path_argument("gs://b/x")


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"model__vae__pretrained": "null"}, "model.vae: is required"),
        ({"model__tokenizer__pretrained": "null"}, "model.tokenizer.pretrained: is required"),
        ({"model__unet__target": "null"}, "model.unet: is required"),
        ({"model__noise_scheduler_training__pretrained": "null"}, "model.noise_scheduler_training: is required"),
        ({"model__unet__pretrained": "a/b"}, "model.unet.target: is not read together with model.unet.pretrained"),
        ({"model__vae__params__latent_channels": "4"}, "model.vae.params: is not read"),
        (
            {"model__unet__subfolder": "unet"},
            'model.unet.subfolder: is "unet", but is only read with model.unet.pretrained, which',
        ),
        ({"model__revision": "main"}, "model.revision"),
    ],
)
def test_parts(changes: dict[str, str], start: str) -> None:
    problems = report(FROM_PARTS, **changes)
    assert len(problems) == 1, problems
    assert problems[0].startswith(start)


def test_no_part_at_all_is_one_problem() -> None:
    base = {key: value for key, value in BASE.items() if key != "model.pretrained"}
    [problem] = report(base)
    assert problem.startswith("model.pretrained: is required")
    [problem] = report(base, model__train="vae")
    assert problem.startswith("model.vae: is required: give `pretrained`")


def test_a_pretrained_noise_scheduler_takes_params() -> None:
    load(FROM_PARTS, model__noise_scheduler_training__params__beta_end="0.02")
    load(FROM_PARTS, model__noise_scheduler_inference__target="DDIMScheduler")


def test_autoencoder_training_needs_the_autoencoder_only() -> None:
    base = {key: value for key, value in BASE.items() if key != "model.pretrained"} | {"model.train": "vae"}
    load(base, model__vae__target="AutoencoderKL", objective__kl_weight="0.1")
    for key, value in {
        "dataset.params.captions.prefix": "a photo of ",
        "experiment.num_eval_images": "5",
        "model.bf16_weights": "true",
        "model.family": "sdxl",
        "model.noise_scheduler_training.params.beta_end": "0.02",
        "model.text_encoder_precision": "fp32",
        "model.unet.pretrained": "someone/pipeline",
        "model.vae_precision": "fp32",
        "model.attention": "flash",
        "model.vae_batch": "4",
        "model.xformers": "true",
        "sampling.every": "5",
        "sampling.guidance_scale": "3",
        "objective.snr_gamma": "5",
        "objective.prediction_type": "epsilon",
        "conditioning.dropout_prob": "0",
        "model.vae_slicing": "true",
        "model.vae_tiling": "true",
        "trainer.compile": "blocks",
    }.items():
        [problem] = report(base | {"model.vae.target": "AutoencoderKL", key: value})
        assert problem.startswith(f"{key}: is ") or key.endswith("params.beta_end")
        assert problem.endswith(" is only read with model.train=denoiser, not vae; remove it")


def test_class_prompts_inline_and_from_a_file(tmp_path: Path) -> None:
    classes = BASE | {"dataset.type": "ClassificationWebDataset"}
    load(classes, dataset__params__idx_to_prompt__0="a cat")
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps({"0": "a cat", "1": ["a dog", "one dog"]}))
    load(classes, dataset__params__class_mapping=str(file))
    [problem] = report(classes, dataset__params__class_mapping=str(file), dataset__params__idx_to_prompt__0="a cat")
    assert problem.startswith("dataset.params.class_mapping: is ") and "a second name of it" in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "must be a mapping (a file: JSON)"),
        ("[]", "must be a mapping"),
        ("{}", "at least one class"),
        ('{"0": []}', "idx_to_prompt.0: must be a mapping"),
        ('{"0": 3}', "idx_to_prompt.0: must be a mapping"),
        ('{"1": "a", "01": "b"}', "idx_to_prompt.01: this class is listed twice"),
        (None, "cannot read"),
    ],
)
def test_bad_class_prompts(text: str | None, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    if text is not None:
        file.write_text(text)
    classes = BASE | {"dataset.type": "ClassificationWebDataset", "dataset.params.idx_to_prompt": str(file)}
    [problem] = report(classes)
    assert expected in problem


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"lr_scheduler__params__warmup_length": "4000"}, "lr_scheduler.params.warmup_length: 4,000 steps"),
        ({"lr_scheduler__params__learning_rate": "1"}, "optimizer.params.learning_rate: 0.0001 is not used"),
        ({"ema__decay": "0.5"}, "ema.decay: is not used"),
        ({"experiment__num_eval_images": "5"}, "experiment.num_eval_images: is not used"),
        ({"sampling__prompts": "[a cat]"}, "sampling.prompts: is not used, because sampling.every is 0"),
        (
            {"dataset__params__filters__width": ">=64", "dataset__mix": "[{params: {path: b.tar}}]"},
            "dataset.mix.0.params.filters: has none",
        ),
        ({"model__unet__target": "UNet2DConditionModel"}, "model.unet: its own settings are not used"),
    ],
)
def test_warnings(changes: dict[str, str], start: str) -> None:
    found = warnings(load(BASE, **changes))
    assert len(found) == 1, found
    assert found[0].startswith(start)


def test_overrides_of_the_stored_noise_scheduler_are_used() -> None:
    assert warnings(load(BASE, model__noise_scheduler_training__params__beta_end="0.02")) == []


def test_adapters_of_random_weights_are_refused() -> None:
    base = {key: value for key, value in FROM_PARTS.items() if key != "model.unet.pretrained"}
    assert report(base, model__lora__rank="2")[0].startswith("model.lora.rank: adapters belong to trained weights")
