"""Where metrics and pictures go beside `metrics.csv`."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger
from torch.utils.tensorboard.summary import hparams

from sd_training.build.plan import Plan
from sd_training.build.preflight import chosen_mode, missing_login
from sd_training.callbacks.background_logger import TAKING_LEAVE_S, BackgroundLogger, leave_together
from sd_training.checkpoint.atomic_io import replace_text
from sd_training.config.changes import to_plain
from sd_training.log import get_logger, is_main_process
from sd_training.redaction import redacted

log = get_logger(__name__)


class TensorBoard(TensorBoardLogger):
    """A full disk costs rows, not the run. The thread that writes ends with its first error, and every later call
    repeats it, so that the next row begins with a new file. Its folder is used as it is: Lightning's expands variables
    and `~` once more."""

    @property
    def log_dir(self) -> str:
        """Folder of the files."""
        return str(Path(self.save_dir) / str(self.version))

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """As Lightning's."""
        self._guarded(lambda: super(TensorBoard, self).log_metrics(dict(metrics), step))

    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, metrics: dict[str, Any] | None = None, step: int | None = None
    ) -> None:
        """As Lightning's, without its invented metric: the table of runs shows the last loss."""

        def write() -> None:
            self.hparams.update(vars(params) if isinstance(params, Namespace) else params)
            for summary in hparams(self.hparams, metrics or {"loss": 0.0}):
                self.experiment._get_file_writer().add_summary(summary, step)

        self._guarded(write)

    def save(self) -> None:
        """As Lightning's."""
        self._guarded(super().save)

    def finalize(self, status: str) -> None:
        """As Lightning's."""
        self._guarded(lambda: super(TensorBoard, self).finalize(status))

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # Lightning hides the cause behind a ValueError
            log.error(f"TensorBoard's files could not be written: {error.__cause__ or error}")
            self._experiment = None


class _PrivateWandb(WandbLogger):
    """W&B writes the command line into its files, so it gets to see one without secrets. By the time it is asked for,
    further processes, which need the real one, have been started."""

    @property
    def experiment(self) -> Any:
        """As the base class's."""
        if self._experiment is None:
            sys.argv = [redacted(word) for word in sys.argv]
        return super().experiment


def build_loggers(plan: Plan) -> list[Logger]:
    """TensorBoard always; W&B when a key or a mode asks for it. Both in threads of their own."""
    wandb = plan.config.wandb
    tensorboard = BackgroundLogger(
        "TensorBoard",
        lambda: _tensorboard(plan),
        _picture_for_tensorboard,
    )
    mode = chosen_mode(wandb)
    if mode == "auto":
        reason = missing_login(wandb)
        mode = "online" if reason is None else "disabled"
        if reason is not None:
            log.info(f"W&B is off: {reason}")
    if mode == "disabled":
        return [tensorboard]
    identifier = _wandb_id(plan.run_dir)
    server = BackgroundLogger("W&B", lambda: _wandb(plan, identifier, mode), _picture_for_wandb, _finish_wandb)
    leave_together([tensorboard, server])
    return [tensorboard, server]


def _tensorboard(plan: Plan) -> Logger:
    """With the options as hyper-parameters, which W&B gets when its run begins."""
    logger = TensorBoard(plan.run_dir, name="", version="tensorboard")
    logger.log_hyperparams(_flat(to_plain(plan.config)))
    return logger


def _flat(options: Mapping[str, Any], group: str = "") -> dict[str, bool | int | float | str]:
    """Options by dotted name; TensorBoard's hyper-parameters are scalars, so lists become texts and nulls are left."""
    flat: dict[str, bool | int | float | str] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{group}{name}.")
        elif value is not None:
            flat[group + name] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat


def _wandb(plan: Plan, identifier: str, mode: str) -> Logger:
    """The run is begun at once, so that a server that refuses it is told of at the start."""
    from wandb import Settings, setup, termsetup  # W&B is optional, and takes a second to import

    # W&B prints its errors only; `setup` alone does not apply this where the search for a login has read settings.
    termsetup(setup(Settings(show_info=False, show_warnings=False)).settings, None)
    # A key of the configuration is told to W&B alone: the environment would tell every process started from here.
    settings: dict[str, Any] = {"finish_timeout": TAKING_LEAVE_S * 0.8}
    if plan.config.wandb.api_key is not None:
        settings["api_key"] = plan.config.wandb.api_key
    experiment = plan.config.experiment
    logger = _PrivateWandb(
        name=experiment.name,
        project=experiment.project,
        entity=plan.config.wandb.entity,
        save_dir=plan.run_dir,
        mode=mode,  # not Lightning's `offline`, which gives way to WANDB_MODE and changes it
        id=identifier,
        resume="allow",
        config=to_plain(plan.config),
        settings=Settings(**settings),
    )
    run = logger.experiment
    where = run.url if mode == "online" else f"offline; upload with `wandb sync {run.settings.sync_dir}`"
    log.info(f"W&B: {where}")
    return logger


def _finish_wandb(logger: Logger) -> None:
    """Here, not when Python ends, where nothing would limit it."""
    assert isinstance(logger, WandbLogger)
    logger.experiment.finish()


def _picture_for_tensorboard(logger: Logger, tag: str, picture: Image.Image, step: int) -> None:
    assert isinstance(logger, TensorBoardLogger)
    logger.experiment.add_image(tag, np.asarray(picture), step, dataformats="HWC")


def _picture_for_wandb(logger: Logger, tag: str, picture: Image.Image, step: int) -> None:
    assert isinstance(logger, WandbLogger)
    logger.log_image(tag, [picture], step=step)


def _wandb_id(run_dir: Path) -> str:
    """The run's W&B id, kept in its folder so that a resumed run continues the same curves."""
    path = run_dir / "wandb_id"
    if path.exists() and (known := path.read_text(encoding="utf-8").strip()):
        return known
    identifier = os.urandom(8).hex()
    try:
        if is_main_process():
            replace_text(path, identifier + "\n")
    except OSError as error:
        log.warning(f"{path} cannot be written ({error.strerror}); the next start begins new curves at W&B")
    return identifier
