"""The resolved configuration as text, and what a start changes against the one that left it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sd_training.config.changes import (
    EXPORTED,
    batch_plan_of,
    changed_options,
    refused_changes,
    resolved_yaml,
    to_plain,
)
from sd_training.config.fields import groups, options
from sd_training.config.load import load_config
from sd_training.config.plan import BatchPlan
from tests.unit.config.loading import BASE, only

MIX = "dataset.mix=[{{params: {{path: b.tar}}, weight: {weight}}}]"


def changes(before: list[str], now: list[str]) -> list[str]:
    """As they are told; the data set is given by both or by none of them."""
    base = [word for word in BASE if not any(word.partition("=")[0] + "=" in other for other in now)]
    previous = resolved_yaml(load_config([*base, *before]))
    return [str(change) for change in changed_options(previous, load_config([*base, *now]))]


def test_both_values_of_each_changed_option() -> None:
    before = ["optimizer.params.weight_decay=0.1", "dataset.params.filters={width: '>=1'}", MIX.format(weight=1)]
    now = ["objective.snr_gamma=5", "dataset.params.filters={width: '>=2', height: '>3'}", MIX.format(weight=2)]
    assert sorted(changes(before, now)) == [
        "dataset.mix.0.weight: 1.0 -> 2.0",
        'dataset.params.filters.height: null -> ">3"',
        'dataset.params.filters.width: ">=1" -> ">=2"',
        "objective.snr_gamma: null -> 5.0",
        "optimizer.params.weight_decay: 0.1 -> 0.01",
    ]
    assert changes(now, now) == []


@pytest.mark.parametrize(
    "start",
    [
        {},
        {"batch_plan": None},
        {"batch_plan": {"micro_batch": 2}},
        {"batch_plan": vars(BatchPlan(2, 1, 1, 8)) | {"of_another_version": 1}},
        {"batch_plan": vars(BatchPlan(0, 1, 1, 8))},
        {"batch_plan": vars(BatchPlan(16, 1, 1, 8))},
    ],
)
def test_the_batch_arithmetic_of_another_version_is_none(start: dict[str, Any]) -> None:
    assert batch_plan_of(start) is None
    assert batch_plan_of({"batch_plan": vars(BatchPlan(2, 1, 1, 8))}) == BatchPlan(2, 1, 1, 8)


def test_an_option_that_is_gone_is_named() -> None:
    config = load_config(BASE)
    before = yaml.safe_load(resolved_yaml(config))
    before["dataset"]["params"]["icc_to_srgb"] = False
    before["checkpoint"]["best_by"] = "training_loss"
    assert list(map(str, changed_options(yaml.safe_dump(before), config))) == [
        'checkpoint.best_by: "training_loss" -> "validation_loss"',
        "dataset.params.icc_to_srgb: false -> true",
    ]


def test_a_configuration_that_an_earlier_version_wrote_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = yaml.safe_load(resolved_yaml(load_config(BASE)))
    values["dataset"]["params"] |= {"icc_to_srgb": False}
    values["dataset"]["params"]["captions"] |= {"template": None}
    values["checkpoint"] |= {"best_by": "training_loss"}
    values["distributed"] |= {"dist_url": "env://"}
    values["objective"]["timestep_density"] |= {"alpha": 1.0, "beta": 1.0, "bias": "none", "bias_range": [0.0, 1.0]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    load_config([f"config={tmp_path}/config.yaml"])
    assert [record.getMessage().partition(" is not read any more")[0] for record in caplog.records] == [
        'checkpoint.best_by: "training_loss"',
        "dataset.params.icc_to_srgb: false",
    ]


def test_no_secret_is_told() -> None:
    told = changes(
        ["wandb.api_key=0123456789abcdef", "dataset.params.path=https://me:word@host/a.tar?token=x"],
        ["wandb.api_key=fedcba9876543210", "dataset.params.path=https://me:other@host/b.tar?token=y"],
    )
    assert told == ['dataset.params.path: "https://host/a.tar?(hidden)" -> "https://host/b.tar?(hidden)"']


@pytest.mark.parametrize("previous", ["", "[1, 2]", "a: [", "model: text", "model: {use_ema: true, gone: 3}"])
def test_a_file_of_another_version_is_compared_as_far_as_it_goes(previous: str) -> None:
    told = [change.key for change in changed_options(previous, load_config(BASE))]
    assert ("model.use_ema" in told) == ("use_ema: true" in previous)


def test_what_decides_the_export_exists_and_is_refused(tmp_path: Path) -> None:
    assert set(EXPORTED) <= options().keys() | groups().keys()
    before = resolved_yaml(load_config([*BASE, "model.use_ema=true"]))
    now = changed_options(before, load_config([*BASE, "optimizer.params.learning_rate=1"]))
    (problem,) = refused_changes(now, [], tmp_path)
    assert problem.startswith("model.use_ema: was true at the last start of ") and "is false now" in problem
    assert "'experiment.allow_changed=[model.use_ema]'" in problem
    assert refused_changes(now, ["model.use_ema"], tmp_path) == []


def test_another_spelling_of_a_folder_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path)
    before = resolved_yaml(load_config([*BASE, f"model.pretrained={tmp_path}"]))
    assert changed_options(before, load_config([*BASE, f"model.pretrained={tmp_path / 'link'}"])) == []
    (tmp_path / "link").unlink()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "model_index.json").write_text("{}")
    assert len(changed_options(before, load_config([*BASE, f"model.pretrained={tmp_path / 'link'}"]))) == 1


def test_a_permission_for_nothing_is_a_mistake() -> None:
    line = only(*BASE, "experiment.allow_changed=[model.use_emma]")
    assert line.startswith("experiment.allow_changed: 'model.use_emma' needs no permission or is unknown")


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
    assert "0123secret" not in repr(config.wandb.replace(entity=None))


def test_the_dump_is_plain_and_leaves_the_configuration_alone() -> None:
    config = load_config([*ARGV, "wandb.api_key=0123secret"])
    to_plain(config)["model"]["unet"]["params"]["x"] = 1
    assert config.model.unet.params == {}
    assert config.wandb.api_key == "0123secret"
