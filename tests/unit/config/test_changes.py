"""What a start changes against the start before it, by the configuration that the earlier one left."""

from pathlib import Path

import pytest

from sd_training.config.changes import EXPORTED, changed_options, refused_changes
from sd_training.config.dump import resolved_yaml
from sd_training.config.fields import groups, options
from sd_training.config.load import load_config
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


def test_no_secret_is_told() -> None:
    told = changes(
        ["wandb.api_key=0123456789abcdef", "dataset.params.path=https://me:word@host/a.tar?token=x"],
        ["wandb.api_key=fedcba9876543210", "dataset.params.path=https://me:other@host/b.tar?token=y"],
    )
    assert told == ['dataset.params.path: "https://host/a.tar?(hidden)" -> "https://host/b.tar?(hidden)"']


def test_long_values_that_begin_alike_are_told_apart() -> None:
    (told,) = changes([f"experiment.project={'x' * 200}"], [f"experiment.project={'x' * 200}y"])
    assert told.startswith("experiment.project: differs beyond")


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


def test_another_spelling_of_a_folder_is_no_change_of_the_export(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path)
    before = resolved_yaml(load_config([*BASE, f"model.pretrained={tmp_path}"]))
    now = changed_options(before, load_config([*BASE, f"model.pretrained={tmp_path / 'link'}"]))
    assert len(now) == 1 and refused_changes(now, [], tmp_path) == []


def test_a_permission_for_nothing_is_a_mistake() -> None:
    line = only(*BASE, "experiment.allow_changed=[model.use_emma]")
    assert line.startswith("experiment.allow_changed: 'model.use_emma' needs no permission or is no option")
