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


def chosen_mode(config: WandbConfig) -> str:
    """`wandb.mode`, or, where that is auto, the environment variable `WANDB_MODE` under today's name of its value."""
    if config.mode != "auto":
        return config.mode
    mode = os.environ.get("WANDB_MODE") or "auto"
    return {"run": "online", "dryrun": "offline"}.get(mode, mode)


def wandb_problems(config: WandbConfig) -> list[str]:
    """W&B that was asked for, by a mode or a key, and cannot be had. Without either it is off."""
    mode = chosen_mode(config)
    option = f"wandb.mode: {mode}" if config.mode == mode else f"WANDB_MODE={mode} in the environment"
    match mode:
        case "online" if reason := missing_login(config):
            return [f"{option}, but {reason}"]
        case "offline" if not is_installed():
            return [f"{option}, but {NOT_INSTALLED}"]
        case "auto" if _given_key(config) and is_installed() and (reason := missing_login(config)):
            return [f"wandb.api_key: {reason}" if config.api_key else reason]
        case "auto" | "online" | "offline" | "disabled":
            return []
    return [f"WANDB_MODE: {mode!r} is none of online, offline and disabled; unset it, or choose wandb.mode"]


def missing_login(config: WandbConfig) -> str | None:
    """Why W&B cannot be reached with the options' key, the environment's, or what `wandb login` stored; null if it can.

    W&B checks the form of the key; no server is asked.
    """
    if not is_installed():
        return NOT_INSTALLED
    if not _given_key(config) and not _may_be_stored():
        return f"there is no key; {_REMEDY}"
    # W&B is optional, and takes a second to import.
    from wandb.errors import Error
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    try:
        if config.api_key:
            problem = wbauth.check_api_key(config.api_key)
            return problem and f"{problem.rstrip('.')}; {_REMEDY}"
        host = wandb_setup.singleton().settings.base_url
        found = wbauth.authenticate_session(host=host, source="sd_training", prompt=False, update_session=False)
    except (Error, ValueError) as error:  # ValueError: a variable of the environment has a value that W&B refuses
        return f"{redacted(' '.join(str(error).split())).rstrip('.')}; {_REMEDY}"
    return None if found else f"there is no key for {host}; {_REMEDY}"


def _given_key(config: WandbConfig) -> str | None:
    return config.api_key or os.environ.get("WANDB_API_KEY")


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
