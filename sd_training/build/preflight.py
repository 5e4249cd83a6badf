"""Local files that the options name, and W&B's login, looked at before torch is imported; their problems join those of
the config.

Whether Weights & Biases can be told anything; asked before torch is imported.
"""

import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sd_training.config.check import model_paths
from sd_training.config.data_schema import SourceParams
from sd_training.config.schema import Config, WandbConfig
from sd_training.data.order.buckets import size_problems, training_sizes
from sd_training.data.sources.choose import access_of, path_problems
from sd_training.errors import ConfigError, DataError
from sd_training.export.pictures import read_captions
from sd_training.log import is_main_process
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


_PATH = ("/", "./", "../", "~")
_USUAL_FACTOR = 8
"""Downscale factor of every published autoencoder of the families."""


def local_problems(config: Config) -> list[str]:
    """Data, held-out data, captions and W&B that cannot be used, one sentence each, starting with the option.

    Only the first process of a run looks: the others would list the same folders.
    """
    if not is_main_process():
        return []
    checks = (_model_problems, _data_problems, _caption_problems, _size_problems)
    return [*(problem for check in checks for problem in check(config)), *wandb_problems(config.wandb)]


def _model_problems(config: Config) -> list[str]:
    """Relative paths; a hub id has one slash at most. The config's own check names other paths that do not exist."""
    paths = [(key, path) for key, path in model_paths(config) if path.count("/") > 1 and not path.startswith(_PATH)]
    return [f"{key}: {path!r} does not exist" for key, path in paths if not os.path.exists(path)]


def _data_problems(config: Config) -> list[str]:
    dataset, option = config.dataset, "dataset.params.path"
    named: list[tuple[str, str, SourceParams]] = [(option, dataset.type, dataset.params)]
    named += [(f"dataset.mix.{i}.params.path", entry.type, entry.params) for i, entry in enumerate(dataset.mix)]
    if config.validation.path:
        held_out = replace(dataset.params, path=config.validation.path)
        named.append(("validation.path", dataset.type, held_out))
    access = access_of(dataset.params.remote)
    return [
        problem.replace(option, key) for key, kind, params in named for problem in path_problems(kind, params, access)
    ]


def _caption_problems(config: Config) -> list[str]:
    """The config's own check names a file that does not exist."""
    path = config.experiment.eval_caption_file
    if path is None or not Path(path).is_file():
        return []
    try:
        read_captions(Path(path))
    except DataError as error:
        return [f"experiment.eval_caption_file: {error}"]
    return []


def _size_problems(config: Config) -> list[str]:
    """Sizes that the autoencoder cannot take. What else a denoiser asks of them is known when it is made."""
    try:
        sizes = training_sizes(config.dataset.params).sizes
    except ConfigError as error:
        return error.problems
    factor, path = _downscale_factor(config), config.model.pretrained or config.model.vae.pretrained
    if factor is not None:
        return size_problems(factor, sizes)
    if path is None or os.path.exists(path):
        return []
    remark = "; the model's own factor is not known before it can be read"
    return [f"{problem}{remark}" for problem in size_problems(_USUAL_FACTOR, sizes)] if _is_path(path) else []


def _is_path(path: str) -> bool:
    """Whether a model that is not there was meant as a folder; an autoencoder of the hub may have any factor."""
    return path.startswith(_PATH) or path.count("/") > 1


def _downscale_factor(config: Config) -> int | None:
    """Of the autoencoder, as its settings say; None where they are not in a local folder or in the options."""
    model = config.model
    path = model.pretrained or model.vae.pretrained
    if path is None:
        levels: Any = model.vae.params.get("block_out_channels")
    else:
        subfolder = model.vae.subfolder if model.pretrained is None else None
        folders = [Path(path, subfolder)] if subfolder else [Path(path, "vae"), Path(path)]
        levels = next((found for folder in folders if (found := _levels_in(folder / "config.json")) is not None), None)
    return 2 ** (len(levels) - 1) if isinstance(levels, list) and levels else None


def _levels_in(file: Path) -> Any:
    """`block_out_channels` of a part's settings; files that cannot be read are named when the part is made."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return settings.get("block_out_channels") if isinstance(settings, dict) else None
