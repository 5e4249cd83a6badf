"""Loggers that fail: one warning, and what came before it is kept."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sd_training.build.loggers import TensorBoard, WandbLogger, _wandb_id
from tests.file_size_limit import file_size_limit


class FakeRun:
    """As W&B's."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.fail_at, self.is_finished = fail_at, False

    def log(self, row: dict[str, Any]) -> None:
        if row["trainer/global_step"] == self.fail_at:
            raise OSError("No space left on device\nand more")
        self.rows.append(row)

    def finish(self) -> None:
        self.is_finished = True


def test_rows_come_in_order_until_the_end() -> None:
    run = FakeRun()
    logger = WandbLogger(lambda: run)
    for step in range(3):
        logger.log_metrics({"loss": 1.0}, step)
    logger.log_hyperparams({"a": 1})
    logger.finalize("success")
    assert [row["trainer/global_step"] for row in run.rows] == [0, 1, 2] and run.is_finished
    logger.log_metrics({"loss": 1.0}, 3)  # nothing comes after the end
    assert len(run.rows) == 3


def test_the_first_failure_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    run = FakeRun(fail_at=1)
    logger = WandbLogger(lambda: run)
    for step in range(5):
        logger.log_metrics({}, step)
    logger.finalize("success")
    assert [row["trainer/global_step"] for row in run.rows] == [0] and not run.is_finished
    (message,) = caplog.messages
    assert "W&B failed and is off from now on (OSError: No space left on device); metrics.csv" in message


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'wandb'"), SystemExit(1)])
def test_a_run_that_cannot_begin(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def begin() -> Any:
        raise error

    logger = WandbLogger(begin)
    logger.log_metrics({}, 1)
    logger.finalize("success")
    assert len(caplog.messages) == 1 and type(error).__name__ in caplog.messages[0]


def test_one_that_was_never_used_never_begins() -> None:
    WandbLogger(lambda: pytest.fail("begun")).finalize("success")


def test_tensorboard_loses_rows_of_a_full_disk_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = TensorBoard(tmp_path / "tensorboard")
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    with file_size_limit(0):
        for step in range(1, 4):
            logger.log_metrics({"loss": 1.0}, step)
            logger.save()
    assert "TensorBoard's files could not be written" in caplog.text
    logger.log_metrics({"loss": 1.0}, 4)
    logger.log_picture("previews", Image.new("RGB", (8, 8)), 4)
    logger.finalize("success")
    assert len(list((tmp_path / "tensorboard").glob("events*"))) >= 2


def test_all_starts_of_a_run_have_the_same_wandb_id(tmp_path: Path) -> None:
    (tmp_path / "wandb_id").write_text("\n")  # an empty file is none
    first = _wandb_id(tmp_path)
    assert len(first) == 16 and _wandb_id(tmp_path) == first


def test_a_full_disk_costs_the_wandb_id_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with file_size_limit(0):
        assert len(_wandb_id(tmp_path)) == 16
    assert list(tmp_path.iterdir()) == []
    assert f"{tmp_path / 'wandb_id'} cannot be written" in caplog.text
