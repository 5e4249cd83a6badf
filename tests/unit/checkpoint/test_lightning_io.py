"""A real Trainer saves and resumes through sealed folders, bit for bit."""

import copy
import json
import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sd_training.checkpoint import seal
from sd_training.checkpoint.lightning_io import SealedCheckpointIO
from sd_training.errors import CheckpointError
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
        self.fused = fused
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("scalar", torch.tensor(0.1, dtype=torch.float64))
        self.register_buffer("nothing", torch.zeros(0, 7))
        self.tied = self.conv.weight

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


class Average(pl.Callback):
    """State of the kinds that callbacks keep: tensors, counters, floats that JSON has no word for."""

    def __init__(self) -> None:
        self.ema: dict[str, Tensor] = {}
        self.rest: dict[str, Any] = {"best": float("inf"), "seen": (), "flag": None, "rng": torch.zeros(0)}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        for name, weight in pl_module.state_dict().items():
            average = self.ema.setdefault(name, weight.detach().clone().double())
            average.lerp_(weight.double(), 0.1)
        self.rest["seen"] = (*self.rest["seen"], trainer.global_step)
        self.rest["rng"] = torch.Generator().manual_seed(trainer.global_step).get_state()

    def state_dict(self) -> dict[str, Any]:
        return {"ema": self.ema, "rest": self.rest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ema, self.rest = state_dict["ema"], state_dict["rest"]


class Recording(SealedCheckpointIO):
    """Keeps a copy of what Lightning handed over."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.given = copy.deepcopy(checkpoint)
        super().save_checkpoint(checkpoint, path, storage_options)


def trainer_for(steps: int, io: SealedCheckpointIO, precision: Any = "32-true") -> pl.Trainer:
    return pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        precision=precision,
        plugins=[io],
        callbacks=[Average()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(steps: int, fused: bool, io: SealedCheckpointIO, resume: Path | None = None, **kw: Any) -> pl.Trainer:
    trainer = trainer_for(steps, io, **kw)
    trainer.fit(TinyModule(fused), DataLoader(torch.zeros(5, 1), batch_size=1), ckpt_path=resume)
    return trainer


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_resumed_training_equals_uninterrupted_training(tmp_path: Path, fused: bool, precision: str) -> None:
    whole, first, second = Recording(), Recording(), Recording()
    train(7, fused, whole, precision=precision).save_checkpoint(tmp_path / "a" / "step=7")
    train(3, fused, first, precision=precision).save_checkpoint(tmp_path / "b" / "step=3")
    resumed = train(7, fused, second, resume=seal.newest_verified(tmp_path / "b"), precision=precision)
    resumed.save_checkpoint(tmp_path / "b" / "step=7")
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "callbacks", "global_step"):
        assert_same(second.given[part], whole.given[part], part)
    assert resumed.global_step == 7
    loop = second.given["loops"]["fit_loop"]["epoch_loop.automatic_optimization.optim_progress"]
    assert loop["optimizer"]["step"]["total"]["completed"] == 7


def test_everything_lightning_hands_over_comes_back(tmp_path: Path) -> None:
    io = Recording({"world_size": 1})
    train(3, True, io).save_checkpoint(tmp_path / "step=3")
    assert io.given["optimizer_states"][0]["state"].keys() == {0, 1, 2, 3, 4}
    assert io.given["optimizer_states"][0]["state"][0]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    assert_same(io.load_checkpoint(tmp_path / "step=3", weights_only=True), io.given)
    assert seal.read_info(tmp_path / "step=3") == {"world_size": 1}


def test_files_are_what_their_names_say(tmp_path: Path) -> None:
    io = Recording()
    train(2, True, io).save_checkpoint(tmp_path / "step=2")
    folder = tmp_path / "step=2"
    assert sorted(path.name for path in folder.iterdir()) == [
        "MANIFEST.json",
        "ema.safetensors",
        "optimizer.safetensors",
        "part-callbacks.safetensors",
        "state.json",
        "weights.safetensors",
    ]
    assert_same({k: v.clone() for k, v in load_file(folder / "weights.safetensors").items()}, sorted_copy(io))
    assert "callbacks/Average/ema/conv.weight" in load_file(folder / "ema.safetensors")
    assert all(not stat.S_IMODE(path.stat().st_mode) & 0o002 for path in folder.iterdir())


def sorted_copy(io: Recording) -> dict[str, Tensor]:
    """As a reader of safetensors alone sees the weights: in the file's order, without memory formats."""
    order = load_file_order(io.given["state_dict"])
    return {name: io.given["state_dict"][name].contiguous() for name in order}


def load_file_order(state: dict[str, Tensor]) -> list[str]:
    """safetensors sorts by descending element size, then by name."""
    return sorted(state, key=lambda name: (-state[name].element_size(), name))


def test_shared_tensors_are_stored_once_per_name(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    state = {"state_dict": {"a": base, "b": base, "head": base[:4], "tail": base[2:], "odd": base[1::2]}}
    io = SealedCheckpointIO()
    io.save_checkpoint(state, tmp_path / "step=1")
    loaded = io.load_checkpoint(tmp_path / "step=1")["state_dict"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state["state_dict"].items())
    loaded["a"].zero_()
    assert torch.equal(loaded["b"], base)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool, torch.complex64])
def test_tensor_types(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"a": torch.tensor([0, 1, 2]).to(dtype), "b": torch.tensor(1).to(dtype), "c": torch.zeros(2, 0).to(dtype)}
    io = SealedCheckpointIO()
    io.save_checkpoint(state, tmp_path / "step=1")
    assert_same(io.load_checkpoint(tmp_path / "step=1"), state)


def test_nan_and_negative_zero_keep_their_bits(tmp_path: Path) -> None:
    payload = torch.tensor([0x7FC12345, -(2**31), 1], dtype=torch.int32).view(torch.float32)
    io = SealedCheckpointIO()
    io.save_checkpoint({"a": payload}, tmp_path / "step=1")
    assert_same(io.load_checkpoint(tmp_path / "step=1"), {"a": payload})


def test_loaded_tensors_outlive_their_file(tmp_path: Path) -> None:
    io = SealedCheckpointIO()
    io.save_checkpoint({"a": torch.ones(100_000)}, tmp_path / "step=1")
    loaded = io.load_checkpoint(tmp_path / "step=1")["a"]
    os.truncate(tmp_path / "step=1" / "part-a.safetensors", 0)  # a tensor on the mapped file would now kill the process
    assert loaded.sum() == 100_000
    io.remove_checkpoint(tmp_path / "step=1")
    assert list(tmp_path.iterdir()) == []


def test_something_unstorable_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"hyper_parameters/where is a pathlib"):
        SealedCheckpointIO().save_checkpoint({"hyper_parameters": {"where": tmp_path}}, tmp_path / "step=1")
    with pytest.raises(TypeError, match="storage_options"):
        SealedCheckpointIO().save_checkpoint({}, tmp_path / "step=1", storage_options={})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_os_error_and_training_can_go_on(tmp_path: Path) -> None:
    io = SealedCheckpointIO()
    io.save_checkpoint({"state_dict": {"a": torch.zeros(4)}}, tmp_path / "step=1")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"step=2.*GiB are free") as error:
            io.save_checkpoint({"state_dict": {"a": torch.zeros(40_000)}}, tmp_path / "step=2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step=1"]


def replace_state(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        document = {"format": 1, "tensor_files": [], "checkpoint": {}}
        (folder / "state.json").write_text(json.dumps(change(document)))

    return write


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document | {"format": 2},
        lambda document: document | {"checkpoint": {"a": {"$tensor": "missing"}}},
        lambda document: {"format": 1},
        lambda document: [],
    ],
    ids=["format", "tensor", "keys", "list"],
)
def test_a_sealed_folder_of_another_format_is_refused(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    folder = seal.write_sealed(tmp_path, 1, replace_state(change), {})
    with pytest.raises(CheckpointError, match="another format"):
        SealedCheckpointIO().load_checkpoint(folder)


def test_a_damaged_or_missing_folder_is_refused(tmp_path: Path) -> None:
    io = SealedCheckpointIO()
    io.save_checkpoint({"a": torch.zeros(100)}, tmp_path / "step=1")
    with (tmp_path / "step=1" / "part-a.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\1")
    for name, reason in [("step=1", "part-a.safetensors has changed"), ("step=2", "MANIFEST.json is missing")]:
        with pytest.raises(CheckpointError, match=reason):
            io.load_checkpoint(tmp_path / name)


def test_a_path_that_is_no_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step=N"):
        SealedCheckpointIO().save_checkpoint({}, tmp_path / "last.ckpt")
