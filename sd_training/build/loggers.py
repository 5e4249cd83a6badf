"""Loggers beside `metrics.csv`: TensorBoard and Weights & Biases. Whatever happens to them, training continues.

Both queue what they are given: TensorBoard in a thread of its own, W&B in a process of its own. `run.log` waits for
that process, not for the server, and `run.finish` has a time limit. `wandb.init` waits for the server: one that never
answers costs up to two minutes once, then W&B is off.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pytorch_lightning.loggers import Logger
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from sd_training.build.plan import Plan
from sd_training.build.preflight import chosen_mode, missing_login
from sd_training.checkpoint.atomic_io import replace_text
from sd_training.config.changes import chosen_options, to_plain
from sd_training.config.schema import Config
from sd_training.log import get_logger, is_main_process
from sd_training.redaction import redacted

log = get_logger(__name__)

FINISH_S = 30.0
"""At the end of a run W&B has this long to send what is queued."""
END_S = 2 * FINISH_S
"""What the loggers may need after the last save: `FINISH_S`, and W&B's process until it has ended."""
_STEP = "trainer/global_step"
"""W&B's x axis, as Lightning names it."""


def build_loggers(plan: Plan) -> list[Logger]:
    """TensorBoard always; W&B when a key or a mode asks for it."""
    tensorboard = TensorBoard(plan.run_dir / "tensorboard")
    tensorboard.log_options(plan.config)
    mode = chosen_mode(plan.config.wandb)
    if mode == "auto":
        reason = missing_login(plan.config.wandb)
        mode = "online" if reason is None else "disabled"
        if reason is not None:
            log.info(f"W&B is off: {reason}")
    if mode == "disabled":
        return [tensorboard]
    identifier = _wandb_id(plan.run_dir)
    return [tensorboard, WandbLogger(lambda: _begin_wandb(plan, identifier, mode))]


class _RunLogger(Logger):
    """What Lightning asks of a logger, and nothing here depends on."""

    name, version = "", ""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Nothing: the options are logged when the run begins."""


class TensorBoard(_RunLogger):
    """Rows that a full disk refuses are lost; the run continues. TensorBoard's writer thread ends with its first error,
    and every later call repeats that error, so the next row begins a new file.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.writer: SummaryWriter | None = None

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Numbers of an optimizer step."""
        self._write(lambda writer: [writer.add_scalar(name, value, step) for name, value in metrics.items()])

    def log_options(self, config: Config) -> None:
        """The options that are not at their defaults, for the table that compares runs; it shows the last loss."""
        options = chosen_options(config)
        chosen = {
            name: value if isinstance(value, bool | int | float) else str(value) for name, value in options.items()
        }
        summaries = hparams(chosen, {"loss": 0.0})
        self._write(lambda writer: [writer._get_file_writer().add_summary(summary) for summary in summaries])

    def log_picture(self, tag: str, picture: Image.Image, step: int) -> None:
        """A picture of an optimizer step."""
        self._write(lambda writer: writer.add_image(tag, np.asarray(picture), step, dataformats="HWC"))

    def save(self) -> None:
        """Lightning calls it when training starts."""
        self._write(lambda writer: writer.flush())

    def finalize(self, status: str) -> None:
        """Writes what is queued."""
        self._write(lambda writer: writer.close())

    def _write(self, act: Callable[[Any], Any]) -> None:
        try:
            self.writer = self.writer or SummaryWriter(str(self.folder))
            act(self.writer)
        except Exception as error:
            log.error(f"TensorBoard's files could not be written: {error.__cause__ or error}")
            self.writer = None


class WandbLogger(_RunLogger):
    """Logs to a W&B run. After the first failure, which is one warning, W&B is off.

    Args:
        begin: begins the run (`wandb.init`); called when training starts. By then the processes of the run have been
            started, which need the command line as it is (see `_begin_wandb`).
    """

    def __init__(self, begin: Callable[[], Any]) -> None:
        super().__init__()
        self._begin = begin
        self._run: Any = None
        self._is_off = False

    def save(self) -> None:
        """Lightning calls it when training starts: the run begins."""
        self._do(lambda run: None)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Numbers of an optimizer step."""
        self._do(lambda run: run.log({**metrics, _STEP: step}))

    def log_picture(self, tag: str, picture: Image.Image, step: int) -> None:
        """A picture of an optimizer step."""
        from wandb import Image as WandbImage

        self._do(lambda run: run.log({tag: [WandbImage(picture)], _STEP: step}))

    def finalize(self, status: str) -> None:
        """Sends what is queued, within the time limit."""
        if self._run is not None:
            self._do(lambda run: run.finish())
            self._is_off = True

    def _do(self, act: Callable[[Any], None]) -> None:
        if self._is_off:
            return
        try:
            self._run = self._run or self._begin()
            act(self._run)
        except (Exception, SystemExit) as error:
            self._is_off = True
            reason = str(error).strip().partition("\n")[0][:300]
            log.warning(
                f"W&B failed and is off from now on ({type(error).__name__}: {reason}); metrics.csv holds every number"
            )


def _begin_wandb(plan: Plan, identifier: str, mode: str) -> Any:
    import wandb  # optional, and takes a second to import

    # W&B writes the command line into its files.
    sys.argv = [redacted(word) for word in sys.argv]
    # Only W&B's errors are printed; `setup` alone does not apply this where the search for a login has read settings.
    wandb.termsetup(wandb.setup(wandb.Settings(show_info=False, show_warnings=False)).settings, None)
    settings: dict[str, Any] = {"mode": mode, "finish_timeout": 0.8 * FINISH_S}
    # A key of the configuration goes to W&B alone: the environment would pass it to every process started from here.
    if plan.config.wandb.api_key is not None:
        settings["api_key"] = plan.config.wandb.api_key
    run = wandb.init(
        name=plan.config.experiment.name,
        project=plan.config.experiment.project,
        entity=plan.config.wandb.entity,
        dir=plan.run_dir,
        id=identifier,
        resume="allow",
        config=to_plain(plan.config),
        settings=wandb.Settings(**settings),
    )
    run.define_metric(_STEP)
    run.define_metric("*", step_metric=_STEP, step_sync=True)
    where = run.url if mode == "online" else f"offline; upload with `wandb sync {run.settings.sync_dir}`"
    log.info(f"W&B: {where}")
    return run


def _wandb_id(run_dir: Path) -> str:
    """The W&B id of the run, kept in its folder so that a resumed run continues the same curves."""
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
