"""Whether Weights & Biases can be told anything; asked before torch is imported."""

import os
from importlib.util import find_spec
from pathlib import Path

from sd_training.config.schema import WandbConfig
from sd_training.redaction import redacted

NOT_INSTALLED = "the package wandb is not installed; pip install wandb"
_REMEDY = "set WANDB_API_KEY, run `wandb login`, or choose wandb.mode=offline"


def is_installed() -> bool:
    """Whether the package is there; it is optional."""
    return find_spec("wandb") is not None


def missing_login(config: WandbConfig) -> str | None:
    """Why W&B cannot be reached with the options' key, the environment's, or what `wandb login` stored; null if it can.

    The key itself is never looked at here, and no server is asked.
    """
    if not is_installed():
        return NOT_INSTALLED
    if config.api_key or os.environ.get("WANDB_API_KEY"):
        return None
    if not _may_be_stored():
        return f"there is no key; {_REMEDY}"
    # W&B is optional, and takes seconds to import.
    from wandb.errors import AuthenticationError
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    try:
        host = wandb_setup.singleton().settings.base_url
        found = wbauth.authenticate_session(host=host, source="sd_training", prompt=False, update_session=False)
    except AuthenticationError as error:
        return f"{redacted(str(error))}; {_REMEDY}"
    return None if found else f"there is no key for {host}; {_REMEDY}"


def _may_be_stored() -> bool:
    """Whether any of the files is there that W&B looks into; without them it need not be imported."""
    if os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = Path("~").expanduser()
    netrc = os.environ.get("NETRC")
    settings = Path(os.environ.get("WANDB_CONFIG_DIR", home / ".config" / "wandb"))
    project = Path(os.environ.get("WANDB_DIR", "."))
    files = [Path(netrc).expanduser()] if netrc else [home / ".netrc", home / "_netrc"]
    files += [folder / "settings" for folder in (settings, project / "wandb", project / ".wandb")]
    return any(file.exists() for file in files)
