"""Where metrics and pictures go beside `metrics.csv`."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, TensorBoardLogger, WandbLogger

from sd_training.build.plan import Plan
from sd_training.config.dump import to_plain
from sd_training.rank_log import get_logger, is_main_process
from sd_training.redaction import redacted

log = get_logger(__name__)


class TensorBoard(TensorBoardLogger):
    """A full disk costs rows, not the run. The thread that writes ends with its first error, and every later call
    repeats it, so that the next row begins with a new file."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """As Lightning's."""
        self._guarded(lambda: super(TensorBoard, self).log_metrics(dict(metrics), step))

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
    """TensorBoard always; W&B when a key or a mode asks for it."""
    wandb = plan.config.wandb
    loggers: list[Logger] = [TensorBoard(plan.run_dir, name="", version="tensorboard")]
    key = wandb.api_key or os.environ.get("WANDB_API_KEY")
    mode = ("online" if key else "disabled") if wandb.mode == "auto" else wandb.mode
    if mode == "disabled":
        return loggers
    experiment = plan.config.experiment
    logger = _PrivateWandb(
        name=experiment.name,
        project=experiment.project,
        entity=wandb.entity,
        save_dir=plan.run_dir,
        offline=mode == "offline",
        id=_wandb_id(plan.run_dir),
        resume="allow",
        config=to_plain(plan.config),
        **_login(wandb.api_key),
    )
    return [*loggers, logger]


def _login(api_key: str | None) -> dict[str, Any]:
    """A key of the configuration is told to W&B alone: the environment would tell every process started from here."""
    if api_key is None:
        return {}
    from wandb import Settings  # W&B is optional, and takes a second to import

    return {"settings": Settings(api_key=api_key)}


def _wandb_id(run_dir: Path) -> str:
    """The run's W&B id, kept in its folder so that a resumed run continues the same curves."""
    path = run_dir / "wandb_id"
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    identifier = os.urandom(8).hex()
    if is_main_process():
        path.write_text(identifier + "\n", encoding="utf-8")
    return identifier
