"""A real Trainer with this project's strategy saves and resumes through sealed folders, bit for bit; tensor files."""

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

from sd_training.checkpoint.folder import NO_LOCK, newest_verified, sealed_checkpoints
from sd_training.checkpoint.save import (
    _local_share,
    load_checkpoint,
    open_checkpoint,
    restore_training_state,
    save_checkpoint,
    write_state,
    write_tensors,
)
from sd_training.errors import CheckpointError
from sd_training.parallel.strategies import CpuGroup, SingleProcessStrategy
from tests.checkpoints import write_sealed
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
        return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98), fused=self.fused)


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


class Resume(pl.Callback):
    """From the newest checkpoint below `root`."""

    def __init__(self, root: Path | None) -> None:
        self.root = root

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.root is not None:
            stored = open_checkpoint(newest_verified(self.root) or self.root)
            load_checkpoint(stored, trainer)
            restore_training_state(trainer, stored.state)


def save(trainer: pl.Trainer, folder: Path) -> None:
    save_checkpoint(folder, trainer, {}, {}, NO_LOCK)()


def train(steps: int, fused: bool = True, resume: Path | None = None, precision: Any = "32-true") -> pl.Trainer:
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        strategy=SingleProcessStrategy(device=torch.device("cpu")),
        precision=precision,
        callbacks=[Counter(), Resume(resume)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(TinyModule(fused), DataLoader(torch.zeros(5, 1), batch_size=1))
    return trainer


def contents(trainer: pl.Trainer) -> dict[str, Any]:
    """Everything that training depends on."""
    callback = trainer.callbacks[0]  # type: ignore[attr-defined]
    return {
        "weights": dict(trainer.model.state_dict()),
        "optimizer": trainer.optimizers[0].state_dict(),
        "callback": callback.rest,
        "step": trainer.global_step,
    }


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_resumed_training_equals_uninterrupted_training(tmp_path: Path, fused: bool, precision: str) -> None:
    whole = train(7, fused, precision=precision)
    save(train(3, fused, precision=precision), tmp_path / "step=3")
    resumed = train(7, fused, resume=tmp_path, precision=precision)
    assert_same(contents(resumed)["weights"], contents(whole)["weights"])
    for key in ("optimizer", "callback", "step"):
        assert_same(contents(resumed)[key], contents(whole)[key], key)


def test_files_are_what_their_names_say(tmp_path: Path) -> None:
    trainer = train(2)
    save(trainer, tmp_path / "step=2")
    folder = tmp_path / "step=2"
    names = ["MANIFEST.json", "optimizer.safetensors", "state.json", "state.safetensors", "weights.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names
    stored = {name: tensor.clone() for name, tensor in load_file(folder / "weights.safetensors").items()}
    own = {n: tensor.contiguous() for n, tensor in trainer.model.state_dict().items() if not n.startswith("frozen.")}
    assert stored.keys() == own.keys()  # frozen weights are what they were at the start
    assert_same({name: stored[name] for name in own}, own)
    assert "conv.weight/exp_avg" in load_file(folder / "optimizer.safetensors")
    assert all(not stat.S_IMODE(path.stat().st_mode) & 0o002 for path in folder.iterdir())


def test_a_full_disk_is_an_os_error_and_training_can_go_on(tmp_path: Path) -> None:
    trainer = train(1)
    save(trainer, tmp_path / "step=1")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(OSError, match=r"step=2.*GiB are free") as error:
            save(trainer, tmp_path / "step=2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step=1"]


def test_something_unstorable_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    trainer = train(1)
    trainer.callbacks[0].rest = {"where": tmp_path}  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"callbacks/Counter/where is a pathlib"):
        save(trainer, tmp_path / "step=1")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    save(train(1), tmp_path / "step=1")
    with (tmp_path / "step=1" / "weights.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\7")
    with pytest.raises(CheckpointError, match=r"weights\.safetensors has changed"):
        train(2, resume=tmp_path)


def test_weights_of_another_network_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(train(1), tmp_path / "step=1")
    before = TinyModule.__init__

    def wider(self: TinyModule, fused: bool) -> None:
        before(self, fused)
        self.small = nn.Parameter(torch.randn(6).bfloat16())

    monkeypatch.setattr(TinyModule, "__init__", wider)
    with pytest.raises(CheckpointError, match=r"small is \(5,\), now \(6,\)"):
        train(2, resume=tmp_path)


def test_a_path_that_is_no_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step=N"):
        save(train(1), tmp_path / "last.ckpt")
    assert sealed_checkpoints(tmp_path) == []


def round_trip(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any] | None = None) -> dict[str, Tensor]:
    def fill(partial: Path) -> None:
        write_tensors(partial, "weights", tensors, 0, 1)
        write_state(partial, state or {})

    return dict(open_checkpoint(write_sealed(folder, 1, fill, {})).parts["weights"])


def test_shared_tensors_are_stored_once_per_name(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    tensors = {"a": base, "b": base, "head": base[:4], "tail": base[2:], "odd": base[1::2]}
    loaded = round_trip(tmp_path, tensors)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    loaded["a"].zero_()
    assert torch.equal(loaded["b"], base)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool, torch.complex64])
def test_tensor_types(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.tensor([0, 1, 2]).to(dtype), "b": torch.tensor(1).to(dtype), "c": torch.zeros(2, 0).to(dtype)}
    loaded = round_trip(tmp_path, tensors)
    assert_same({name: loaded[name] for name in tensors}, tensors)


def test_nan_and_negative_zero_keep_their_bits(tmp_path: Path) -> None:
    payload = torch.tensor([0x7FC12345, -(2**31), 1], dtype=torch.int32).view(torch.float32)
    assert_same(round_trip(tmp_path, {"a": payload}), {"a": payload})


def test_loaded_tensors_outlive_their_file(tmp_path: Path) -> None:
    loaded = round_trip(tmp_path, {"a": torch.ones(100_000)})["a"]
    # A tensor on the mapped file would now kill the process.
    os.truncate(tmp_path / "step=1" / "weights.safetensors", 0)
    assert loaded.sum() == 100_000


def test_the_files_of_several_writers_are_one_part(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        write_tensors(folder, "ema-sigma_rel=0.050", {"a": torch.zeros(1)}, 0, 3)
        write_tensors(folder, "ema-sigma_rel=0.050", {}, 1, 3)  # nothing fell to this one
        write_tensors(folder, "ema-sigma_rel=0.050", {"b": torch.ones(1)}, 2, 3)
        write_tensors(folder, "ema", {"b": torch.full((1,), 2.0)}, 2, 3)
        write_state(folder, {})

    folder = write_sealed(tmp_path, 1, fill, {})
    stored = open_checkpoint(folder).parts
    assert {part: {name: float(t) for name, t in tensors.items()} for part, tensors in stored.items()} == {
        "ema-sigma_rel=0.050": {"a": 0.0, "b": 1.0},
        "ema": {"b": 2.0},
    }
    assert len(list(folder.glob("*.safetensors"))) == 3


def test_tensors_inside_the_state_come_back_in_their_place(tmp_path: Path) -> None:
    state = {"loops": {"done": (1, None), "best": float("inf")}, "scale": torch.tensor(3.0)}
    round_trip(tmp_path, {"a": torch.zeros(1)}, state)
    assert_same(open_checkpoint(tmp_path / "step=1").state, state)


def test_an_unstorable_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"hyper_parameters/where is a pathlib"):
        write_state(tmp_path, {"hyper_parameters": {"where": tmp_path}})


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document | {"format": 1},
        lambda document: document | {"checkpoint": {"a": {"$tensor": "missing"}}},
        lambda document: {"format": 3},
        lambda document: [],
    ],
    ids=["format", "tensor", "keys", "list"],
)
def test_another_format_is_refused(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    def fill(folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps(change({"format": 3, "checkpoint": {}})))

    with pytest.raises(CheckpointError, match="another format"):
        open_checkpoint(write_sealed(tmp_path, 1, fill, {}))


def test_a_missing_file_of_tensors_is_named(tmp_path: Path) -> None:
    round_trip(tmp_path, {"a": torch.zeros(1)})
    (tmp_path / "step=1" / "weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"weights\.safetensors"):
        open_checkpoint(tmp_path / "step=1")


def test_the_format_before_is_refused_with_a_remedy(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps({"format": 2, "tensor_files": [], "checkpoint": {}}))

    with pytest.raises(CheckpointError, match="format 2; this version reads format 3: end the run with the version"):
        open_checkpoint(write_sealed(tmp_path, 1, fill, {}))


def test_weights_in_memory_are_not_copied_unless_they_change_meanwhile() -> None:
    weights = {"a": torch.ones(2), "b": torch.zeros(3)}

    def shared(*, is_copied: bool) -> set[bool]:
        share = _local_share(iter(weights.items()), CpuGroup(0, 1), is_copied=is_copied)
        return {share[name].data_ptr() == tensor.data_ptr() for name, tensor in weights.items()}

    assert shared(is_copied=False) == {True} and shared(is_copied=True) == {False}
