"""Every option described in plain words."""

import pytest

from sd_training.config.data_schema import MixEntry
from sd_training.config.fields import groups, options, walk
from sd_training.config.schema import Config, ObjectiveConfig, SystemConfig, TextEncoderEntry


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("system.batch_size", "a whole number of at least 1"),
        ("optimizer.params.beta1", "a number of at least 0 and below 1"),
        ("optimizer.max_grad_norm", "a number above 0 or null"),
        ("model.use_ema", "true or false"),
        ("model.mixed_precision", "no, bf16 or fp16"),
        ("trainer.devices", "auto or a whole number of at least 1"),
        ("sampling.prompts", "a list of texts"),
        ("dataset.params.path", "a text or a list of texts"),
        ("model.unet.params", "a mapping of texts to any values"),
        ("dataset.params.filters", "a mapping of texts to any values or null"),
    ],
)
def test_allowed_values_in_words(key: str, allowed: str) -> None:
    assert options()[key].allowed == allowed


def test_every_option_and_group_is_documented() -> None:
    assert [key for key, field, _ in walk() if not field.description] == []
    assert "experiment.name" in options()
    assert "model.unet" in groups()


def test_defaults_match_the_dataclasses() -> None:
    required = {key for key, option in options().items() if option.required}
    assert required == {"experiment.log_dir", "experiment.name"}
    own = {key: option.default for key, option in options().items() if key.startswith("system.")}
    assert own == {f"system.{name}": value for name, value in SystemConfig().model_dump().items()}


def test_what_decides_whether_an_option_is_read_is_an_option_with_these_words() -> None:
    for group in (Config, MixEntry, TextEncoderEntry, ObjectiveConfig):
        table = options(group)
        for key, option in table.items():
            for decider, rule in option.readers.items():
                assert set(rule.values) - {None} <= set(table[decider].words), (key, decider)
    readers = options()["objective.adversarial.weight"].readers
    assert [(key, rule.values) for key, rule in readers.items()] == [("model.train", ("vae",))]  # not the group's rule
    assert set(options(MixEntry)["params.image_column"].readers) == {"type"}
