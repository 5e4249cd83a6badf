"""Loggers that fail: one warning, and what came before it is kept."""

import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from sd_training.build.run import LogWriter, RunLogger, _wandb_id
from tests.file_size_limit import file_size_limit


class FakeRun:
    """A run of W&B."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.steps: list[int | None] = []
        self.fail_at, self.is_finished = fail_at, False

    def log(self, _: Any, step: int | None) -> None:
        if step == self.fail_at:
            raise OSError("No space left on device\nand more")
        self.steps.append(step)

    def finish(self) -> None:
        self.is_finished = True

    def begin(self) -> LogWriter:
        return LogWriter(self.log, lambda *_: None, self.finish)


def test_rows_come_in_order_until_the_end() -> None:
    run = FakeRun()
    logger = RunLogger("W&B", run.begin)
    for step in range(3):
        logger.log_metrics({"loss": 1.0}, step)
    logger.log_hyperparams({"a": 1})
    logger.finalize("success")
    assert run.steps == [0, 1, 2] and run.is_finished
    logger.log_metrics({"loss": 1.0}, 3)  # nothing comes after the end
    assert len(run.steps) == 3


def test_the_first_failure_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = FakeRun(fail_at=1)
    logger = RunLogger("W&B", run.begin)
    for step in range(5):
        logger.log_metrics({}, step)
    logger.finalize("success")
    assert run.steps == [0] and not run.is_finished
    (message,) = caplog.messages
    assert "W&B failed and is off from now on (OSError: No space left on device); metrics.csv" in message


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'wandb'"), SystemExit(1)])
def test_a_run_that_cannot_begin(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def begin() -> Any:
        raise error

    logger = RunLogger("W&B", begin)
    logger.log_metrics({}, 1)
    logger.finalize("success")
    assert len(caplog.messages) == 1 and type(error).__name__ in caplog.messages[0]


def test_one_that_was_never_used_never_begins() -> None:
    RunLogger("W&B", lambda: pytest.fail("begun")).finalize("success")


def test_a_full_disk_ends_tensorboard_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = SummaryWriter(str(tmp_path))
    add = lambda row, step: [writer.add_scalar(name, value, step) for name, value in row.items()]  # noqa: E731
    logger = RunLogger("TensorBoard", lambda: LogWriter(add, lambda *_: None, writer.close))
    logger.save()
    logger.log_metrics({"loss": 1.0}, 0)
    logger.log_picture("previews", Image.new("RGB", (8, 8)), 0, "")
    with file_size_limit(0):
        for step in range(1, 100):
            logger.log_metrics({"loss": 1.0}, step)
            time.sleep(0.01)  # a thread writes
        logger.finalize("success")
    logger.log_metrics({"loss": 1.0}, 100)
    assert len(caplog.messages) == 1 and "TensorBoard failed and is off from now on (" in caplog.text


def test_all_starts_of_a_run_have_the_same_wandb_id(tmp_path: Path) -> None:
    (tmp_path / "wandb_id").write_text("\n")  # an empty file is none
    first = _wandb_id(tmp_path)
    assert len(first) == 16 and _wandb_id(tmp_path) == first


def test_a_full_disk_costs_the_wandb_id_not_the_run(tmp_path: Path) -> None:
    with file_size_limit(0):
        assert len(_wandb_id(tmp_path)) == 16
    assert list(tmp_path.iterdir()) == []
