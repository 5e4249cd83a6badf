"""Checks of local files, hub ids and the login to Weights & Biases, made before torch is imported; their problems join
those of the config."""

import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sd_training.config.check import model_folder_problem, model_paths
from sd_training.config.data_schema import SourceParams
from sd_training.config.fields import options, value_of
from sd_training.config.schema import Config, WandbConfig
from sd_training.data.order.buckets import size_problems, training_sizes
from sd_training.data.sources.choose import access_of, path_problems
from sd_training.errors import ConfigError, DataError
from sd_training.export.pictures import read_captions
from sd_training.log import is_main_process
from sd_training.redaction import redacted

NOT_INSTALLED = "the package wandb is not installed; pip install wandb"
_REMEDY = "set WANDB_API_KEY, run `wandb login`, or choose wandb.mode=offline"


_PATH = ("/", "./", "../", "~")
_USUAL_FACTOR = 8
"""Downscale factor of every published autoencoder of the families."""


def local_problems(config: Config) -> list[str]:
    """Model, data, held-out data, captions and W&B that cannot be used, one sentence each, starting with the option.

    Only the first process of a run looks: the others would list the same folders.
    """
    if not is_main_process():
        return []
    checks = (_model_problems, _data_problems, _caption_problems, _size_problems)
    return [*(problem for check in checks for problem in check(config)), *wandb_problems(config.wandb)]


def _model_problems(config: Config) -> list[str]:
    """Relative paths, which have more than the one slash of a hub id, and hub ids. The config's own check names other
    paths that do not exist."""
    problems = []
    for key, path in model_paths(config):
        if os.path.exists(path) or path.startswith(_PATH):
            continue
        problem = f"{key}: {path!r} does not exist" if path.count("/") > 1 else _hub_problem(config, key, path)
        problems += [problem] if problem is not None else []
    return problems


def _hub_problem(config: Config, key: str, name: str) -> str | None:
    """Of `model.pretrained`, a part or `ema.path`; those in `model.text_encoders` are checked when they are loaded."""
    from sd_training.hub import hub_problem  # its client takes a third of a second to import

    revision = f"{key.rpartition('.')[0]}.revision"
    if key not in options():
        return None
    return hub_problem(name, value_of(config, revision) if revision in options() else None, key)


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
    path = config.experiment.eval_caption_file
    if path is None:
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
    factor = _downscale_factor(config)
    if factor is not None:
        return size_problems(factor, sizes)
    key = "model.pretrained" if config.model.pretrained else "model.vae.pretrained"
    path = value_of(config, key)
    if path is None or not _is_unreadable(config, key, path):
        return []
    remark = "; the model's own factor is not known before it can be read"
    return [f"{problem}{remark}" for problem in size_problems(_USUAL_FACTOR, sizes)]


def _is_unreadable(config: Config, key: str, path: str) -> bool:
    """Whether the model is reported as missing, so that its autoencoder will not be read in this start."""
    if os.path.isdir(path):
        return bool(model_folder_problem(config, key, path))
    is_path = path.startswith(_PATH) or path.count("/") > 1
    return is_path or os.path.exists(path) or _hub_problem(config, key, path) is not None


def _downscale_factor(config: Config) -> int | None:
    """Of the autoencoder, as its settings say; None where they are not in a local folder or in the options."""
    model = config.model
    path = model.pretrained or model.vae.pretrained
    if path is None:
        levels: Any = model.vae.params.get("block_out_channels")
    else:
        subfolder = model.vae.subfolder if model.pretrained is None else None
        files = [f"{subfolder}/config.json"] if subfolder else ["vae/config.json", "config.json"]
        levels = next((found for file in files if (found := _levels_in(_stored(config, path, file))) is not None), None)
    return 2 ** (len(levels) - 1) if isinstance(levels, list) and levels else None


def _stored(config: Config, path: str, file: str) -> Path | None:
    """A file of the model in a local folder or in the cache of the hub."""
    if os.path.exists(path) or path.startswith(_PATH) or path.count("/") > 1:
        return Path(path, file)
    from sd_training.hub import cached_file

    return cached_file(path, file, config.model.revision if config.model.pretrained else config.model.vae.revision)


def _levels_in(file: Path | None) -> Any:
    """`block_out_channels` of a part's settings; files that cannot be read are named when the part is made."""
    if file is None:
        return None
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return settings.get("block_out_channels") if isinstance(settings, dict) else None


def chosen_mode(config: WandbConfig) -> str:
    """`wandb.mode`, or, where that is auto, the environment variable `WANDB_MODE` under today's name of its value."""
    if config.mode != "auto":
        return config.mode
    mode = os.environ.get("WANDB_MODE") or "auto"
    return {"run": "online", "dryrun": "offline"}.get(mode, mode)


def wandb_problems(config: WandbConfig) -> list[str]:
    """Why W&B cannot be used although a mode or a key asks for it. With neither it is disabled."""
    mode = chosen_mode(config)
    option = f"wandb.mode: {mode}" if config.mode == mode else f"WANDB_MODE={mode} in the environment"
    match mode:
        case "online" if reason := missing_login(config):
            return [f"{option}, but {reason}"]
        case "offline" if find_spec("wandb") is None:
            return [f"{option}, but {NOT_INSTALLED}"]
        case "auto" if _given_key(config) and find_spec("wandb") and (reason := missing_login(config)):
            return [f"wandb.api_key: {reason}" if config.api_key else reason]
        case "auto" | "online" | "offline" | "disabled":
            return []
    return [f"WANDB_MODE: {mode!r} is none of online, offline and disabled; unset it, or choose wandb.mode"]


def missing_login(config: WandbConfig) -> str | None:
    """Why W&B cannot be reached with the options' key, the environment's, or what `wandb login` stored; null if it can.

    W&B checks the form of the key; no server is contacted.
    """
    if find_spec("wandb") is None:
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
    """Whether any of the files exists that W&B reads; without them it need not be imported."""
    if os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = Path("~").expanduser()
    netrc = os.environ.get("NETRC")
    settings = Path(os.environ.get("WANDB_CONFIG_DIR", home / ".config" / "wandb"))
    project = Path(os.environ.get("WANDB_DIR", "."))
    files = [Path(netrc).expanduser()] if netrc else [home / ".netrc", home / "_netrc"]
    files += [folder / "settings" for folder in (settings, project / "wandb", project / ".wandb")]
    return any(file.exists() for file in files)
