"""The resolved configuration as text, without secrets."""

from dataclasses import asdict
from typing import Any

import yaml

from sd_training.config.schema import Config

_HIDDEN = "(hidden)"


def to_plain(config: Config) -> dict[str, Any]:
    """Plain containers of a configuration; `wandb.api_key` is null, and its text is hidden wherever else it stands."""
    plain: dict[str, Any] = asdict(config)
    secret = plain["wandb"]["api_key"]
    plain["wandb"]["api_key"] = None
    hidden: dict[str, Any] = _hide(plain, secret) if secret else plain
    return hidden


def resolved_yaml(config: Config) -> str:
    """YAML that `load_config` reads back to the same configuration, except for the key of W&B."""
    return str(yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True, width=120))


def _hide(value: Any, secret: str) -> Any:
    if isinstance(value, dict):
        return {_hide(key, secret): _hide(item, secret) for key, item in value.items()}
    if isinstance(value, list):
        return [_hide(item, secret) for item in value]
    return value.replace(secret, _HIDDEN) if isinstance(value, str) else value
