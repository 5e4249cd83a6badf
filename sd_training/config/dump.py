"""The resolved configuration as text, without secrets."""

from dataclasses import asdict
from typing import Any

import yaml

from sd_training.config.fields import options
from sd_training.config.permissions import without_permissions
from sd_training.config.schema import Config
from sd_training.redaction import note_secret, redacted_values


def to_plain(config: Config) -> dict[str, Any]:
    """Plain containers of a configuration; `wandb.api_key` is null, and other secrets are hidden (`redaction`)."""
    plain: dict[str, Any] = asdict(config)
    note_secret(plain["wandb"]["api_key"])
    plain["wandb"]["api_key"] = None
    hidden: dict[str, Any] = redacted_values(plain)
    return hidden


def resolved_yaml(config: Config) -> str:
    """YAML that `load_config` reads back to the same configuration, except for W&B's key, what URLs hide, and the
    permissions that the command line alone can give."""
    return str(yaml.safe_dump(without_permissions(to_plain(config)), sort_keys=False, allow_unicode=True, width=120))


def chosen_options(config: Config) -> dict[str, Any]:
    """Dotted option → value of every option that is not at its default, without secrets."""
    plain, changed = to_plain(config), {}
    for key, option in options().items():
        value: Any = plain
        for step in key.split("."):
            value = value[step]
        if value != option.default:
            changed[key] = value
    return changed
