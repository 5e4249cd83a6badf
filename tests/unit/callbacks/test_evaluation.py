"""The process beside a run: one that cannot be started costs its measurements alone."""

from pathlib import Path

import pytest
import pytorch_lightning as pl

from sd_training.callbacks.evaluation import LOG, Evaluation
from sd_training.training import Ledger


def test_one_that_cannot_be_started(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / LOG).mkdir()  # where its output should go
    callback = Evaluation(tmp_path, "cpu", log_every=1)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    module = pl.LightningModule()
    module.ledger = Ledger()
    callback.on_train_start(trainer, module)
    callback.on_train_end(trainer, module)
    (message,) = [message for message in caplog.messages if message.startswith("evaluation")]
    assert "the process cannot be started, and the run goes on without it: " in message and LOG in message
