"""Loggers that fail, block or are slow: one warning, and nobody waits for them."""

import logging
import threading
import time
from argparse import Namespace
from typing import Any

import pytest
from PIL import Image
from pytorch_lightning.loggers import Logger

from sd_training.callbacks.background_logger import MAX_WAITING, BackgroundLogger, leave_together


class Notes(Logger):
    """Keeps what it is given; `wait` and `fail_at` make it misbehave."""

    def __init__(self, wait: threading.Event | None = None, fail_at: int | None = None) -> None:
        super().__init__()
        self.rows: list[Any] = []
        self.wait, self.fail_at, self.is_closed = wait, fail_at, False

    name = "notes"
    version = ""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self.wait is not None:
            self.wait.wait(20)
        if step == self.fail_at:
            raise OSError("No space left on device\nand more")
        self.rows.append((step, metrics))

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        self.rows.append(params)

    def finalize(self, status: str) -> None:
        self.is_closed = True


def behind(notes: Notes, leave_s: float = 20.0) -> BackgroundLogger:
    def show(logger: Logger, tag: str, picture: Image.Image, step: int) -> None:
        notes.rows.append((tag, picture.size, step))

    return BackgroundLogger("notes", lambda: notes, show, leave_s=leave_s)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("sd_training"), "propagate", True)
    return caplog


def test_loggers_take_leave_together() -> None:
    """Two that are stuck keep the run as long as one, and one that is not stuck still writes everything."""
    wait = threading.Event()
    loggers = [behind(Notes(wait), leave_s=1.0) for _ in range(3)]
    brisk = Notes()
    loggers.append(behind(brisk, leave_s=1.0))
    leave_together(loggers)
    for logger in loggers:
        logger.log_metrics({"loss": 0.5}, 1)
    began_s = time.monotonic()
    for logger in loggers:
        logger.finalize("success")
    assert time.monotonic() - began_s < 2.0
    wait.set()
    assert [logger.is_left for logger in loggers] == [True, True, True, False]
    assert brisk.rows == [(1, {"loss": 0.5})] and brisk.is_closed


def test_everything_arrives_in_order(warned: pytest.LogCaptureFixture) -> None:
    notes = Notes()
    logger = behind(notes)
    logger.log_hyperparams({"a": 1})
    for step in range(3):
        logger.log_metrics({"loss": 0.5}, step)
    logger.log_picture("preview", Image.new("RGB", (4, 2)), 3)
    logger.save()
    logger.finalize("success")
    assert notes.rows == [{"a": 1}, *((step, {"loss": 0.5}) for step in range(3)), ("preview", (4, 2), 3)]
    assert notes.is_closed and not logger.is_left and not warned.messages


def test_a_failure_is_told_once(warned: pytest.LogCaptureFixture) -> None:
    notes = Notes(fail_at=1)
    logger = behind(notes)
    for step in range(5):
        logger.log_metrics({}, step)
        time.sleep(0.01)
    logger.finalize("success")
    assert notes.rows == [(0, {})] and logger.is_left
    (message,) = warned.messages
    assert "the logger notes failed and is left out from now on (OSError: No space left on device)" in message


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'wandb'"), SystemExit(1)])
def test_one_that_cannot_be_made(error: BaseException, warned: pytest.LogCaptureFixture) -> None:
    def make() -> Logger:
        raise error

    logger = BackgroundLogger("W&B", make, lambda *_: None)
    logger.log_metrics({}, 1)
    logger.finalize("success")
    assert len(warned.messages) == 1 and type(error).__name__ in warned.messages[0]


def test_nobody_waits_for_one_that_blocks(warned: pytest.LogCaptureFixture) -> None:
    wait = threading.Event()
    logger = behind(Notes(wait), leave_s=0.2)
    began_s = time.monotonic()
    for step in range(MAX_WAITING + 10):
        logger.log_metrics({}, step)
    logger.finalize("success")
    assert time.monotonic() - began_s < 5
    assert ["misses some" in message or "is left" in message for message in warned.messages] == [True, True]
    wait.set()


def test_one_that_was_never_used_is_never_made() -> None:
    BackgroundLogger("W&B", lambda: pytest.fail("made"), lambda *_: None).finalize("success")
