"""Names of sd-training and of earlier versions: they mean today's options, and resolved files have today's."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sd_training.config.changes import changed_options, resolved_yaml
from sd_training.config.fields import OLD_NAMES, OLD_WORDS, RETIRED, options, place_of, shown, value_of
from sd_training.config.load import load_config
from sd_training.errors import ConfigError
from tests.unit.config.loading import BASE, only, write

EXAMPLES = {
    "dataset.params.batch_size": 7,
    "dataset.params.class_mapping": {"0": "a cat"},
    "dataset.params.num_examples_to_see": 70_000,
    "dataset.params.workers": 3,
    "ema.tracks": [0.05, 0.1],
    "system.dist_backend": "gloo",
    "model.ema.path": "someone/average",
    "model.max_grad_norm": 0.5,
}


def test_the_table_leads_from_names_that_are_gone_to_options() -> None:
    assert EXAMPLES.keys() == OLD_NAMES.keys()
    assert not OLD_NAMES.keys() & options().keys() and set(OLD_NAMES.values()) <= options().keys()
    for key, words in OLD_WORDS.items():
        allowed = options()[key].words
        assert set(words.values()) <= set(allowed) and not words.keys() & set(allowed)


@pytest.mark.parametrize("old", OLD_NAMES)
def test_an_old_name_alone_sets_the_option(old: str) -> None:
    new = OLD_NAMES[old]
    others = [word for word in BASE if not word.startswith(f"{new}=")]
    more = ["dataset.type=ClassificationWebDataset"] if "class" in old else []
    config = load_config([*others, f"{old}={EXAMPLES[old]}", "model.use_ema=true", *more])
    assert value_of(config, new) == EXAMPLES[old]
    resolved = yaml.safe_load(resolved_yaml(config))
    assert place_of(resolved, old)[1] not in place_of(resolved, old)[0]


def test_old_and_new_name_may_agree_but_not_contradict(tmp_path: Path) -> None:
    words = ["dataset.params.workers=${system.workers}", "system.workers=2", "dataset.params.batch_size=null"]
    assert load_config([*BASE, *words]).system.workers == 2
    file = write(tmp_path / "a.yaml", "system: {workers: 2}\ndataset: {params: {workers: 6}}\n")
    line = only(*BASE, f"config={file}")
    assert line.startswith("dataset.params.workers: is 6, but system.workers is 2; remove dataset.params.workers")


def test_a_wrong_value_is_named_by_the_new_name_at_the_place_of_the_old(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "dataset:\n  params:\n    workers: many\n")
    assert only(*BASE, f"config={file}").startswith(f'system.workers: is "many" ({file}, line 3); allowed: ')


def test_an_old_word_means_todays(tmp_path: Path) -> None:
    config = load_config([*BASE, "dataset.type=ParquetDataset"])
    assert config.dataset.type == "Parquet" and "type: Parquet" in resolved_yaml(config)
    for word, today in {"false": "off", "true": "blocks", "off": "off", "full": "full"}.items():
        file = write(tmp_path / "a.yaml", f"trainer:\n  compile: {word}\n")
        for given in (f"trainer.compile={word}", f"config={file}"):
            config = load_config([*BASE, given])
            again = yaml.safe_load(resolved_yaml(config))["trainer"]["compile"]
            assert config.trainer.compile == again == today


def test_an_old_word_is_no_change() -> None:
    config = load_config([*BASE, "trainer.compile=blocks"])
    previous = yaml.safe_load(resolved_yaml(config))
    previous["trainer"]["compile"] = True
    assert changed_options(yaml.safe_dump(previous), config) == []
    previous["trainer"]["compile"] = False
    [change] = changed_options(yaml.safe_dump(previous), config)
    assert str(change) == 'trainer.compile: "off" -> "blocks"'


@pytest.mark.parametrize("text", ["ema:\n    path: null", "ema:", "ema: {}\n  max_grad_norm: null"])
def test_an_old_group_may_be_empty(text: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", f"model:\n  {text}\n")
    config = load_config([*BASE, f"config={file}"])
    assert config.ema.path is None and config.optimizer.max_grad_norm is None


def test_another_option_of_an_old_group_is_unknown(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "model:\n  use_ema: true\n  ema:\n    path: a/b\n    decy: 0.9\n")
    assert only(*BASE, f"config={file}").startswith(
        f"model.ema: unknown option ({file}, line 3); did you mean model.use_ema and"
    )


def test_an_old_name_counts_where_the_group_of_the_new_one_is_empty(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "system:\n  # later\ndataset: {params: {workers: 6}}\n")
    assert load_config([*BASE, f"config={file}"]).system.workers == 6


@pytest.mark.parametrize("option", RETIRED)
def test_an_option_that_is_gone_is_accepted_with_what_is_done_now(option: str, tmp_path: Path) -> None:
    assert option not in options()
    name = option.rpartition(".")[2]
    old = write(tmp_path / "a.yaml", yaml.safe_dump(nested(option, RETIRED[option])))
    for words in ([f"config={old}"], [f"{option}={shown(RETIRED[option])}"], [f"{option}=null"]):
        resolved = yaml.safe_load(resolved_yaml(load_config([*BASE, *words])))
        assert name not in place_of(resolved, option)[0]
    gone = f'{option}: is "other", but this option is gone: there is only {shown(RETIRED[option])} now; remove it'
    assert only(*BASE, f"{option}=other") == gone


def nested(option: str, value: Any) -> dict[str, Any]:
    first, _, rest = option.partition(".")
    return {first: nested(rest, value) if rest else value}


def test_a_run_of_an_earlier_version_can_be_started_again() -> None:
    """`config_of_f1e671e.yaml` was written by that commit, with every option; this version reads it without a change
    beside what the messages say."""
    config = load_config([f"config={Path(__file__).with_name('config_of_f1e671e.yaml')}"])
    assert (config.model.train, config.ema.sigma_rels, config.checkpoint.keep_best) == ("denoiser", [], 0)


def test_old_names_in_lists(tmp_path: Path) -> None:
    entry = {"params": {"path": "b", "captions": {"template": None}}}
    encoder = {"pretrained": "google/gemma-2-2b", "target": "Gemma2Model", "apply_final_norm": True}
    config = {"dataset": {"mix": [entry]}, "model": {"pretrained": None, "text_encoders": [encoder]}}
    file = write(tmp_path / "a.yaml", yaml.safe_dump(config))
    with pytest.raises(ConfigError) as error:  # of parts that are missing
        load_config([*BASE, "model.pretrained=null", f"config={file}"])
    assert "unknown option" not in str(error.value)
    encoder["layer"] = -2  # which is not normed any more
    file = write(tmp_path / "b.yaml", yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=r"text_encoders\.0\.apply_final_norm: unknown option"):
        load_config([*BASE, "model.pretrained=null", f"config={file}"])
