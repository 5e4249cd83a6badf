"""A real Trainer with this project's strategy saves and resumes through sealed folders, bit for bit."""

import os
import resource
import stat
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sd_training.checkpoint.folder import sealed_checkpoints
from sd_training.errors import CheckpointError
from sd_training.parallel.strategies import SingleProcessStrategy
from tests.unit.checkpoint.exact import assert_same


class TinyModule(pl.LightningModule):
    """Batches are a function of the optimizer step, so that a resumed run can be compared with an uninterrupted one."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.norm = nn.BatchNorm2d(4)
            self.small = nn.Parameter(torch.randn(5).bfloat16())
            self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.fused = fused
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("scalar", torch.tensor(0.1, dtype=torch.float64))
        self.register_buffer("nothing", torch.zeros(0, 7))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.global_step)
        pixels = torch.randn(2, 3, 6, 6, generator=generator)
        return self.norm(self.conv(pixels)).pow(3).mean() + self.small.float().square().sum()

    def configure_optimizers(self) -> Any:
        decayed, plain = [self.conv.weight, self.small], [self.conv.bias, *self.norm.parameters()]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), fused=self.fused)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Counter(pl.Callback):
    """State of the kinds that callbacks keep: counters, floats that JSON has no word for, small tensors."""

    def __init__(self) -> None:
        self.rest: dict[str, Any] = {"best": float("inf"), "seen": (), "flag": None, "rng": torch.zeros(0)}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.rest["seen"] = (*self.rest["seen"], trainer.global_step)
        self.rest["rng"] = torch.Generator().manual_seed(trainer.global_step).get_state()

    def state_dict(self) -> dict[str, Any]:
        return self.rest

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rest = state_dict


def train(steps: int, fused: bool = True, resume: Path | None = None, precision: Any = "32-true") -> pl.Trainer:
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        strategy=SingleProcessStrategy(torch.device("cpu")),
        precision=precision,
        callbacks=[Counter()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(TinyModule(fused), DataLoader(torch.zeros(5, 1), batch_size=1), ckpt_path=resume)
    return trainer


def contents(trainer: pl.Trainer) -> dict[str, Any]:
    """Everything that training depends on."""
    callback = trainer.callbacks[0]  # type: ignore[attr-defined]
    return {
        "weights": dict(trainer.model.state_dict()),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "callback": callback.rest,
        "step": trainer.global_step,
    }


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_resumed_training_equals_uninterrupted_training(tmp_path: Path, fused: bool, precision: str) -> None:
    whole = train(7, fused, precision=precision)
    train(3, fused, precision=precision).save_checkpoint(tmp_path / "step=3")
    resumed = train(7, fused, resume=tmp_path, precision=precision)
    assert_same(contents(resumed)["weights"], contents(whole)["weights"])
    for key in ("optimizer", "schedule", "callback", "step"):
        assert_same(contents(resumed)[key], contents(whole)[key], key)


def test_files_are_what_their_names_say(tmp_path: Path) -> None:
    trainer = train(2)
    trainer.save_checkpoint(tmp_path / "step=2")
    folder = tmp_path / "step=2"
    names = ["MANIFEST.json", "optimizer.safetensors", "state.json", "state.safetensors", "weights.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names
    stored = {name: tensor.clone() for name, tensor in load_file(folder / "weights.safetensors").items()}
    own = trainer.model.state_dict()
    assert_same({name: stored[name] for name in own}, {name: tensor.contiguous() for name, tensor in own.items()})
    assert "conv.weight/exp_avg" in load_file(folder / "optimizer.safetensors")
    assert all(not stat.S_IMODE(path.stat().st_mode) & 0o002 for path in folder.iterdir())


def test_a_full_disk_is_an_os_error_and_training_can_go_on(tmp_path: Path) -> None:
    trainer = train(1)
    trainer.save_checkpoint(tmp_path / "step=1")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(OSError, match=r"step=2.*GiB are free") as error:
            trainer.save_checkpoint(tmp_path / "step=2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step=1"]


def test_something_unstorable_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    trainer = train(1)
    trainer.callbacks[0].rest = {"where": tmp_path}  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"callbacks/Counter/where is a pathlib"):
        trainer.save_checkpoint(tmp_path / "step=1")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    train(1).save_checkpoint(tmp_path / "step=1")
    with (tmp_path / "step=1" / "weights.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\7")
    with pytest.raises(CheckpointError, match=r"weights\.safetensors has changed"):
        train(2, resume=tmp_path)


def test_weights_of_another_network_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(1).save_checkpoint(tmp_path / "step=1")
    before = TinyModule.__init__

    def wider(self: TinyModule, fused: bool) -> None:
        before(self, fused)
        self.small = nn.Parameter(torch.randn(6).bfloat16())

    monkeypatch.setattr(TinyModule, "__init__", wider)
    with pytest.raises(CheckpointError, match=r"small is \(5,\), now \(6,\)"):
        train(2, resume=tmp_path)


def test_a_path_that_is_no_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step=N"):
        train(1).save_checkpoint(tmp_path / "last.ckpt")
    assert sealed_checkpoints(tmp_path) == []
