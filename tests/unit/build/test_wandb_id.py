"""The run's W&B id: one for all starts, whatever a kill or a full disk left."""

from pathlib import Path

import pytest

from sd_training.build.loggers import _wandb_id
from tests.file_size_limit import file_size_limit
from tests.unit.checkpoint.test_seal import listening_to_the_log


def test_all_starts_have_the_same(tmp_path: Path) -> None:
    first = _wandb_id(tmp_path)
    assert len(first) == 16 and _wandb_id(tmp_path) == first


def test_an_empty_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "wandb_id").write_text("\n")
    first = _wandb_id(tmp_path)
    assert len(first) == 16 and _wandb_id(tmp_path) == first


def test_a_full_disk_costs_the_id_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with listening_to_the_log(), file_size_limit(0):
        assert len(_wandb_id(tmp_path)) == 16
    assert list(tmp_path.iterdir()) == []
    assert f"{tmp_path / 'wandb_id'} cannot be written" in caplog.text
