"""What a start of a run changes against the start before it, and what of that it must not change by accident."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sd_training.config.dump import resolved_yaml
from sd_training.config.fields import options
from sd_training.config.problems import is_below, shown
from sd_training.config.schema import Config

EXPORTED = (
    "conditioning.null_text",
    "model.bf16_weights",
    "model.family",
    "model.noise_scheduler_training",
    "model.pretrained",
    "model.revision",
    "model.text_encoder",
    "model.text_encoder_2",
    "model.text_encoder_3",
    "model.text_encoders",
    "model.tokenizer",
    "model.tokenizer_2",
    "model.tokenizer_3",
    "model.train",
    "model.transformer",
    "model.unet",
    "model.use_ema",
    "model.vae",
    "model.vae_scaling_factor",
    "objective.shift",
    "objective.sigma_data",
)
"""Options, and groups of them, that decide which weights and parts `current_pipeline` holds. What the checkpoint itself
knows, such as the prediction type and the optimizer, is compared when it is loaded."""


@dataclass(frozen=True)
class Change:
    """One option that has another value than before. Both values are without secrets."""

    key: str
    """Dotted name; inside mappings and lists further steps, as in `dataset.mix.0.weight`."""
    before: Any
    now: Any

    def __str__(self) -> str:
        before, now = shown(self.before, self.key), shown(self.now, self.key)
        return f"{self.key}: {before} -> {now}" if before != now else f"{self.key}: differs beyond {now}"

    def sentence(self) -> str:
        """Inside a list of such, in an error."""
        return f"{self.key} was {shown(self.before, self.key)}, now {shown(self.now, self.key)}"


def differences(key: str, before: Any, now: Any) -> Iterator[Change]:
    """Where two values of an option differ; mappings, and lists of one length, are entered."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*before, *now]):
            yield from differences(f"{key}.{name}", before.get(name), now.get(name))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(f"{key}.{number}", one, other)
    elif before != now:
        yield Change(key, before, now)


def changed_options(previous: str, config: Config) -> list[Change]:
    """What differs from the `config.yaml` of an earlier start; an option that it lacks had its default.

    Args:
        previous: the text of the file. One that is no configuration tells nothing.
        config: of this start.
    """
    try:
        before = yaml.safe_load(previous)
    except yaml.YAMLError:
        return []
    if not isinstance(before, dict):
        return []
    now = yaml.safe_load(resolved_yaml(config))
    keys = [key for key in options() if key != "experiment.allow_changed"]
    return [change for key in keys for change in differences(key, _value(before, key), _value(now, key))]


def refused_changes(changes: Sequence[Change], allowed: Sequence[str], run_dir: Path) -> list[str]:
    """One sentence for each change that would make another export of the run and that is not allowed."""
    refused = [change for change in changes if is_below(change.key, EXPORTED) and not is_below(change.key, allowed)]
    refused = [change for change in refused if not _is_same_place(change)]
    keys = ",".join(dict.fromkeys(_option_of(change.key) for change in refused))
    return [
        f"{change.key}: was {shown(change.before)} at the last start of {run_dir} and is {shown(change.now)} now; this "
        "decides what current_pipeline holds: restore it, take another experiment.name, or allow it with "
        f"'experiment.allow_changed=[{keys}]'"
        for change in refused
    ]


def unknown_permissions(config: Config) -> Iterator[str]:
    """Entries of `experiment.allow_changed` that allow nothing."""
    for key in config.experiment.allow_changed:
        if not is_below(key, EXPORTED):
            yield (
                f"experiment.allow_changed: {key!r} needs no permission or is no option; those that do are "
                f"{', '.join(EXPORTED)}"
            )


def _value(holder: Any, key: str) -> Any:
    for step in key.split("."):
        if not isinstance(holder, dict) or step not in holder:
            return options()[key].default
        holder = holder[step]
    return holder


def _option_of(key: str) -> str:
    """The option that a place inside its value belongs to."""
    while key not in options():
        key = key.rpartition(".")[0]
    return key


def _is_same_place(change: Change) -> bool:
    """Whether both values are paths of one folder: another spelling changes nothing."""
    paths = [Path(value) for value in (change.before, change.now) if isinstance(value, str)]
    return len(paths) == 2 and all(path.exists() for path in paths) and paths[0].samefile(paths[1])
