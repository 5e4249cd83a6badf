"""The resolved configuration as text."""

from dataclasses import replace
from pathlib import Path

from sd_training.config.changes import resolved_yaml, to_plain
from sd_training.config.load import load_config

ARGV = (
    "experiment.log_dir=runs",
    "experiment.name=007",
    "experiment.num_examples_to_see=100000",
    "dataset.params.path=[a.tar, 'b{0..9}.tar']",
    "dataset.params.filters.original_width=>=512",
    "model.pretrained=someone/pipeline",
    "model.mixed_precision=no",
    "optimizer.params.epsilon=1e-8",
    "sampling.prompts=['ein Käfer', '#1']",
)


def test_the_dump_loads_to_the_same_configuration(tmp_path: Path) -> None:
    config = load_config(ARGV)
    file = tmp_path / "config.yaml"
    file.write_text(resolved_yaml(config), encoding="utf-8")
    assert load_config([f"config={file}"]) == config


def test_permissions_are_not_written_and_can_be_given_again(tmp_path: Path) -> None:
    mix = "dataset.mix=[{params: {path: a.tar}}, {params: {path: 'pipe:cat a.tar'}}]"
    words = ["dataset.params.allow_pipe=true", "dataset.mix[1].params.allow_pipe=true"]
    config = load_config([*ARGV, mix, *words])
    file = tmp_path / "config.yaml"
    file.write_text(resolved_yaml(config), encoding="utf-8")
    assert "allow_pipe" not in file.read_text()
    assert load_config([f"config={file}", *words]) == config
    assert not load_config([f"config={file}"]).dataset.mix[1].params.allow_pipe


def test_the_key_is_written_nowhere() -> None:
    config = load_config(
        [*ARGV, "wandb.api_key=0123secret", "wandb.entity=${wandb.api_key}", "ema.path=x/${wandb.api_key}"]
    )
    assert config.wandb.api_key == "0123secret"
    assert to_plain(config)["wandb"]["api_key"] is None
    assert "0123secret" not in resolved_yaml(config)
    assert "0123secret" not in repr(config.wandb.api_key and replace(config.wandb, entity=None))


def test_the_dump_is_plain_and_leaves_the_configuration_alone() -> None:
    config = load_config([*ARGV, "wandb.api_key=0123secret"])
    to_plain(config)["model"]["unet"]["params"]["x"] = 1
    assert config.model.unet.params == {}
    assert config.wandb.api_key == "0123secret"
