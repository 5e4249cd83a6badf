"""Checks of local files, hub ids and the login to Weights & Biases, made before torch is imported; their problems join
those of the config."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from sd_training.config.check import data_sets, model_path_problems, model_paths
from sd_training.config.fields import options, value_of
from sd_training.config.schema import Config, WandbConfig
from sd_training.data.order.buckets import level_channels, size_problems, training_sizes
from sd_training.data.sources.choose import path_problems
from sd_training.errors import ConfigError, DataError
from sd_training.export.draw import read_captions
from sd_training.log import is_main_process, redacted

_USUAL_FACTOR = 8
"""Downscale factor of every published autoencoder of the families."""


def local_problems(config: Config) -> list[str]:
    """Model, data, held-out data, captions and W&B that cannot be used, one sentence each, starting with the option.

    Only the first process of a run looks: the others would list the same folders.
    """
    if not is_main_process():
        return []
    problems = [problem for at in model_paths(config) for problem in _hub_problems(config, *at)]
    problems += _data_problems(config)
    for check in (_check_captions, _check_sizes, lambda config: wandb_mode(config.wandb)):
        try:
            check(config)
        except ConfigError as error:
            problems += error.problems
    return problems


def _hub_problems(config: Config, key: str, path: str) -> Iterator[str]:
    """A path that does not exist (it has more than the one slash of a hub id), or a hub id without a model; those in
    `model.text_encoders` are asked for when they are loaded. `config/check.py` looks for other than relative paths."""
    if path.startswith(("/", "./", "../", "~")):
        return
    if path.count("/") > 1 and not os.path.exists(path):
        yield f"{key}: {path!r} does not exist"
    elif key in options():
        from sd_training.hub import hub_problem  # its client takes a third of a second to import

        revision = f"{key.rpartition('.')[0]}.revision"
        if problem := hub_problem(path, value_of(config, revision) if revision in options() else None, key):
            yield problem


def _data_problems(config: Config) -> list[str]:
    dataset, option = config.dataset, "dataset.params.path"
    named = [(f"{prefix}.params.path", entry.type, entry.params) for prefix, entry in data_sets(dataset)]
    if config.validation.path:
        named.append(("validation.path", dataset.type, dataset.params.replace(path=config.validation.path)))
    access = dataset.params.remote
    return [
        problem.replace(option, key) for key, kind, params in named for problem in path_problems(kind, params, access)
    ]


def _check_captions(config: Config) -> None:
    path = config.experiment.eval_caption_file
    try:
        if path is not None:
            read_captions(Path(path))
    except DataError as error:
        raise ConfigError(f"experiment.eval_caption_file: {error}") from error


def _check_sizes(config: Config) -> None:
    """Sizes that the autoencoder cannot take: the one in a local folder, or the usual one where the model is a mistake
    itself. A model on the hub is checked when it is made."""
    sizes, factor = training_sizes(config.dataset.params).sizes, None
    named = {"model.pretrained", "model.single_file_config", "model.vae.pretrained"}
    autoencoder = [(key, path) for key, path in model_paths(config) if key in named]
    if any([*model_path_problems(config, *at), *_hub_problems(config, *at)] for at in autoencoder):
        factor = _USUAL_FACTOR
    own = config.model.vae.subfolder if config.model.pretrained is None else None
    parts = [own] if own else ["vae", "."]
    for file in (Path(path, part, "config.json") for _, path in autoencoder for part in parts):
        # What is wrong with the file is named when the model is made.
        with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            factor = factor or 2 ** (len(level_channels(json.loads(file.read_bytes()))) - 1)
    if factor is not None and (problems := size_problems(factor, sizes)):
        raise ConfigError(problems)


def wandb_mode(config: WandbConfig) -> tuple[str, str | None]:
    """online, offline or disabled, and why it is disabled where a login would have enabled it. `WANDB_MODE` of the
    environment chooses where `wandb.mode` is auto.

    Raises:
        ConfigError: a mode or a key asks for W&B, and it cannot be used.
    """
    mode, asked = str(config.mode), f"wandb.mode: {config.mode}, but "
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or mode
        asked = f"WANDB_MODE={mode} in the environment, but "
        if mode not in ("auto", "online", "offline", "disabled"):
            raise ConfigError(f"WANDB_MODE: {mode!r} is none of online, offline and disabled; unset it")
    if mode == "disabled":
        return mode, None
    is_installed, key = find_spec("wandb") is not None, config.api_key or os.environ.get("WANDB_API_KEY")
    reason = None
    if not is_installed:
        reason = "the package wandb is not installed; pip install wandb"
    elif mode != "offline":
        reason = _login_problem(config.api_key, key)
    if mode == "auto" and not (key and is_installed):
        return "online" if reason is None else "disabled", reason
    if mode == "auto":
        mode, asked = "online", "wandb.api_key: " if config.api_key else ""
    if reason is not None:
        raise ConfigError(f"{asked}{reason}")
    return mode, None


def _login_problem(option: str | None, key: str | None) -> str | None:
    """Why W&B cannot be reached with a key, or with what `wandb login` stored; null if it can. W&B checks the form of
    the key; no server is contacted.

    Args:
        option: `wandb.api_key`.
        key: this, or the environment's.
    """
    remedy = "set WANDB_API_KEY, run `wandb login`, or choose wandb.mode=offline"
    settings = os.path.join(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb"), "settings")
    files = (os.environ.get("NETRC", "~/.netrc"), "~/_netrc", settings, os.environ.get("WANDB_IDENTITY_TOKEN_FILE", ""))
    if not key and not any(os.path.exists(os.path.expanduser(file)) for file in files):
        return f"there is no key; {remedy}"
    # W&B is optional, and takes a second to import.
    from wandb.errors import Error
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    try:
        if option:
            problem = wbauth.check_api_key(option)
            return problem and f"{problem.rstrip('.')}; {remedy}"
        host = wandb_setup.singleton().settings.base_url
        found = wbauth.authenticate_session(host=host, source="sd_training", prompt=False, update_session=False)
    except (Error, ValueError) as error:  # ValueError: a variable of the environment has a value that W&B refuses
        return f"{redacted(' '.join(str(error).split())).rstrip('.')}; {remedy}"
    return None if found else f"there is no key for {host}; {remedy}"
