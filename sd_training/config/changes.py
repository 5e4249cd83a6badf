"""What is kept of a configuration: its text without secrets, the record of starts, and what a start changes against the
start before it."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sd_training.config.fields import (
    RETIRED,
    is_below,
    option_of,
    options,
    place_of,
    replace_old_words,
    shown,
    value_of,
)
from sd_training.config.plan import BatchPlan
from sd_training.config.schema import Config
from sd_training.errors import ConfigError
from sd_training.log import note_secret, redacted_values

CONFIG = "config.yaml"
"""Resolved configuration of the last start that trained, in the run folder."""
RECORD = "run.json"
"""An entry for every start, in the run folder; with the lines of its configuration where the start before had another
one."""
PERMISSION = "allow_pipe"
"""Name of the option that a file cannot set to true, and that is not written to one."""
_PERMISSION_KEY = f"dataset.params.{PERMISSION}"


def to_plain(config: Config) -> dict[str, Any]:
    """Plain containers of a configuration; `wandb.api_key` is null, and other secrets are hidden (`log.redacted`)."""
    note_secret(config.wandb.api_key)
    return redacted_values(config.replace(wandb=config.wandb.replace(api_key=None)).model_dump())


def resolved_yaml(config: Config) -> str:
    """YAML that `load_config` reads back to the same configuration, except for W&B's key, what URLs hide, and the
    permissions that the command line alone can give."""
    return str(yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True, width=120))


def chosen_options(config: Config) -> dict[str, Any]:
    """Dotted option → value of every option that is not at its default, without secrets."""
    plain = to_plain(config)
    values = {key: _value(plain, key) for key in options()} | {_PERMISSION_KEY: value_of(config, _PERMISSION_KEY)}
    return {key: value for key, value in values.items() if value != options()[key].default}


_PARTS = (
    "bf16_weights family from_scratch noise_scheduler_inference noise_scheduler_training pretrained revision "
    "single_file_config text_encoder text_encoder_2 text_encoder_3 text_encoders tokenizer tokenizer_2 tokenizer_3 "
    "train transformer unet use_ema vae vae_scaling_factor"
)
_OTHERS = ("conditioning.null_text", "objective.shift", "objective.sigma_data")
EXPORTED = (*(f"model.{name}" for name in _PARTS.split()), *_OTHERS)
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
        return f"{self.key}: {shown(self.before, self.key)} -> {shown(self.now, self.key)}"

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
    elif before != now and not _is_same_folder(before, now):
        yield Change(key, before, now)


def _is_same_folder(before: Any, now: Any) -> bool:
    """Whether two texts are spellings of one local path, such as by a link."""
    both = (before, now)
    return all(isinstance(text, str) and os.path.exists(text) for text in both) and os.path.samefile(*both)


def changed_options(previous: str, config: Config) -> list[Change]:
    """What differs from the `config.yaml` of an earlier start; an option that it lacks had its default.

    Args:
        previous: the text of the file. An unreadable file is ignored.
        config: of this start.
    """
    try:
        before = yaml.safe_load(previous)
    except yaml.YAMLError:
        return []
    if not isinstance(before, dict):
        return []
    now = yaml.safe_load(resolved_yaml(config))
    replace_old_words(before)
    keys = [*RETIRED, *(key for key in options() if key != "experiment.allow_changed")]
    return [change for key in keys for change in differences(key, _value(before, key), _value(now, key))]


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Entries of earlier starts; a file that a crash cut short counts as none."""
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def batch_plan_of(start: Mapping[str, Any]) -> BatchPlan | None:
    """The batch arithmetic of a start; None where it has none that this version can use."""
    try:
        plan = BatchPlan(**start["batch_plan"])
        return plan if plan.num_steps else None
    except (KeyError, TypeError, ZeroDivisionError, ConfigError):
        return None


def refused_changes(changes: Sequence[Change], allowed: Sequence[str], run_dir: Path) -> list[str]:
    """One sentence for each change that would make another export of the run and that is not allowed."""
    refused = [change for change in changes if is_below(change.key, EXPORTED) and not is_below(change.key, allowed)]
    keys = ",".join(dict.fromkeys(option_of(change.key).key for change in refused))
    return [
        f"{change.key}: was {shown(change.before)} at the last start of {run_dir} and is {shown(change.now)} now; this "
        "decides what current_pipeline holds: restore it, take another experiment.name, or allow it with "
        f"'experiment.allow_changed=[{keys}]'"
        for change in refused
    ]


def _value(holder: Any, key: str) -> Any:
    group, name = place_of(holder, key)
    return group.get(name, RETIRED[key] if key in RETIRED else options()[key].default)
