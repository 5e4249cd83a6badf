"""What `checkpoint/save.py` relies on in Lightning, whose version the requirements pin."""

import inspect
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.loops.loop import _Loop
from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector


def test_the_version_that_was_read() -> None:
    assert pl.__version__ == "2.6.6", "read Trainer._run and _CheckpointConnector again, then change this line"


def test_on_fit_start_comes_between_the_setup_of_the_strategy_and_the_loops() -> None:
    source = inspect.getsource(pl.Trainer._run)
    steps = ["self.strategy.setup(self)", '"on_fit_start"', "restore_training_state()", "self._run_stage()"]
    assert sorted(steps, key=source.index) == steps


def test_without_a_path_lightning_restores_nothing() -> None:
    for restore in ("restore_training_state", "restore_model", "restore_datamodule", "restore_callbacks"):
        assert "if not self._loaded_checkpoint:\n            return" in inspect.getsource(
            getattr(_CheckpointConnector, restore)
        )


def test_what_a_checkpoint_holds_is_what_lightning_would_store() -> None:
    """A further entry in a later version would be missing here."""
    source = inspect.getsource(_CheckpointConnector.dump_checkpoint)
    known = ["trainer.current_epoch", "trainer.global_step", "_get_loops_state_dict", "_call_callbacks_state_dict"]
    known += ["lr_scheduler_configs", "prec_plugin_state_dict", "datamodule_state_dict", "on_save_checkpoint"]
    assert all(entry in source for entry in known)
    assert source.count("checkpoint[") == 9


def test_a_loop_continues_from_its_state() -> None:
    loop = _Loop(pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=Path.cwd()))
    assert not loop.restarting
    loop.load_state_dict(loop.state_dict())
    assert loop.restarting
