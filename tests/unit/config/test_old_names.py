"""Second names of sd-training and names of older files: they mean today's options, and resolved files have today's."""

from pathlib import Path

import pytest
import yaml

from sd_training.config.changes import changed_options, resolved_yaml
from sd_training.config.fields import OLD_NAMES, OLD_WORDS, options, value_of, words_of
from sd_training.config.load import load_config
from tests.unit.config.loading import BASE, only, write

EXAMPLES = {
    "dataset.params.batch_size": 7,
    "dataset.params.num_examples_to_see": 70_000,
    "dataset.params.workers": 3,
    "system.dist_backend": "gloo",
    "system.dist_url": "tcp://a:1",
    "ema.tracks": [0.1],
}


def test_the_table_leads_from_names_that_are_gone_to_options() -> None:
    assert EXAMPLES.keys() == OLD_NAMES.keys()
    assert not OLD_NAMES.keys() & options().keys() and set(OLD_NAMES.values()) <= options().keys()
    for key, words in OLD_WORDS.items():
        allowed = words_of(options()[key].annotation)
        assert set(words.values()) <= set(allowed) and not words.keys() & set(allowed)


@pytest.mark.parametrize("old", OLD_NAMES)
def test_an_old_name_alone_sets_the_option(old: str) -> None:
    new = OLD_NAMES[old]
    others = [word for word in BASE if not word.startswith(f"{new}=")]
    config = load_config([*others, f"{old}={EXAMPLES[old]}", "model.use_ema=true"])
    assert value_of(config, new) == EXAMPLES[old]
    resolved = yaml.safe_load(resolved_yaml(config))
    *groups, name = old.split(".")
    for group in groups:
        resolved = resolved[group]
    assert name not in resolved


def test_old_and_new_name_may_agree_but_not_contradict(tmp_path: Path) -> None:
    words = ["dataset.params.workers=${system.workers}", "system.workers=2", "dataset.params.batch_size=null"]
    assert load_config([*BASE, *words]).system.workers == 2
    file = write(tmp_path / "a.yaml", "system: {workers: 2}\ndataset: {params: {workers: 6}}\n")
    line = only(*BASE, f"config={file}")
    assert line.startswith("dataset.params.workers: is 6, but system.workers is 2; remove dataset.params.workers")


def test_a_wrong_value_is_named_by_the_new_name_at_the_place_of_the_old(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "dataset:\n  params:\n    workers: many\n")
    assert only(*BASE, f"config={file}").startswith(f'system.workers: is "many" ({file}, line 3); allowed: ')


def test_an_old_word_means_todays() -> None:
    config = load_config([*BASE, "model.train=unet"])
    assert config.model.train == "denoiser" and "train: denoiser" in resolved_yaml(config)


def test_the_file_of_an_older_start_has_changed_nothing() -> None:
    config = load_config([*BASE, "model.use_ema=true", "ema.sigma_rels=[0.1]"])
    before = yaml.safe_load(resolved_yaml(config))
    before["model"]["train"], before["ema"]["tracks"] = "unet", before["ema"].pop("sigma_rels")
    before["dataset"]["params"] |= {"batch_size": 32, "workers": None, "num_examples_to_see": None}
    assert changed_options(yaml.safe_dump(before), config) == []


def test_an_old_name_counts_where_the_group_of_the_new_one_is_empty(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "system:\n  # later\ndataset: {params: {workers: 6}}\n")
    assert load_config([*BASE, f"config={file}"]).system.workers == 6
