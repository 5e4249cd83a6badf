"""Local files that the options name, and W&B's login, looked at before torch is imported; their problems join those of
the config."""

from dataclasses import replace
from pathlib import Path

from sd_training.build.wandb_login import NOT_INSTALLED, is_installed, missing_login
from sd_training.config.data_schema import SourceParams
from sd_training.config.schema import Config
from sd_training.data.sources import access_of, path_problems
from sd_training.errors import DataError
from sd_training.export.pictures import read_captions
from sd_training.rank_log import is_main_process


def local_problems(config: Config) -> list[str]:
    """Data, held-out data, captions and W&B that cannot be used, one sentence each, starting with the option.

    Only the first process of a run looks: the others would list the same folders.
    """
    if not is_main_process():
        return []
    return [*_data_problems(config), *_caption_problems(config), *_wandb_problems(config)]


def _wandb_problems(config: Config) -> list[str]:
    """W&B that was asked for and cannot be had; `auto` does without."""
    if config.wandb.mode == "online" and (reason := missing_login(config.wandb)):
        return [f"wandb.mode: online, but {reason}"]
    if config.wandb.mode == "offline" and not is_installed():
        return [f"wandb.mode: offline, but {NOT_INSTALLED}"]
    return []


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
