"""The resolved configuration as text, without secrets."""

from dataclasses import asdict
from typing import Any

import yaml

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
