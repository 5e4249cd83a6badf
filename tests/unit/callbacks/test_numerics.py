"""Wrong numbers: a non-finite step is skipped and described, a run that makes no progress goes back and then ends, and
replicas that differ are found. Runs of several processes are in tests/integration/test_numerics.py."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from sd_training.build.run import Run
from sd_training.callbacks import numerics
from sd_training.callbacks.ema import Ema
from sd_training.callbacks.numerics import NumericGuard, Rollback, bit_digest, newest_before
from sd_training.config.schema import OptimizerConfig
from sd_training.errors import NumericError
from sd_training.optim import Optimization
from sd_training.training import TrainedModule
from tests.checkpoints import write_sealed
from tests.integration.training import CrashAfter, Interrupted, checkpoint_tensors, options, train

SHORT = {"experiment__num_examples_to_see": 160, "numerics__max_skipped_in_a_row": 3}
GOING_BACK = {**SHORT, "logging__every": 4, "experiment__save_every": 5}
BAD = {7, 8, 9}


class Poison(pl.Callback):
    """Puts a NaN into the gradient of chosen optimizer steps."""

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step in self.steps:
            next(pl_module.network.parameters()).grad.view(-1)[0] = float("nan")


class PoisonBatch(Poison):
    """Puts a NaN into the noise of the third sample of chosen optimizer steps."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in self.steps:
            batch.noise[2, 0, 0, 0] = float("nan")

    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


class InfiniteLoss(Poison):
    """Makes the loss of the third sample of chosen optimizer steps infinite; its gradient stays what it is."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        plain = type(pl_module).sample_losses

        def sample_losses(batch: Any) -> Any:
            losses, *others = plain(pl_module, batch)
            added = torch.zeros_like(losses)
            added[2] = float("inf") if trainer.global_step in self.steps else 0.0
            return losses + added, *others

        pl_module.sample_losses = sample_losses

    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


class Watch(pl.Callback):
    """Weights and average after each optimizer step, and one of Adam's counters."""

    def __init__(self) -> None:
        self.weights: dict[int, torch.Tensor] = {}
        self.averages: dict[int, torch.Tensor] = {}
        self.counters: dict[int, int] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        parameters = [p.detach().flatten() for p in pl_module.network.parameters()]
        self.weights[trainer.global_step] = torch.cat(parameters)
        (ema,) = [callback for callback in trainer.callbacks if isinstance(callback, Ema)]  # type: ignore[attr-defined]
        self.averages[trainer.global_step] = torch.cat([shard.flatten() for shard in ema.shards.values()])
        state = trainer.optimizers[0].state[next(pl_module.network.parameters())]
        self.counters[trainer.global_step] = int(state.get("step", 0))


def incidents(run_dir: Path) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in (run_dir / "incidents").glob("*.json")}


def test_a_poisoned_step_is_skipped_and_described(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    run_dir, watch = tmp_path / "run", Watch()
    changes = {"system__batch_size": 4, "system__gradient_accumulation": 2, "logging__every": 3}
    run = train(options(run_dir, pipeline_dir, shards_dir, **changes), PoisonBatch({3}), watch)
    assert run.trainer.global_step == 8
    assert torch.equal(watch.weights[4], watch.weights[3]) and not torch.equal(watch.weights[5], watch.weights[4])
    assert (watch.counters[4], watch.counters[8]) == (3, 7)
    assert all(torch.isfinite(t).all() for t in checkpoint_tensors(run_dir, 8).values() if t.is_floating_point())
    assert list(incidents(run_dir)) == ["step=3.skipped.json"]
    told = incidents(run_dir)["step=3.skipped.json"]
    assert told["optimizer_step"] == 3 and {sample["position"] for sample in told["samples"]} == {*range(24, 32)}
    assert told["ranks_with_non_finite_loss"] == [0] and told["losses_by_rank"] == {"0": ["nan", "nan"]}
    assert (told["seed"], told["batch_plan"]["accumulation"]) == (0, 2)
    first, second, *others = told["samples"]
    assert {first["position"], second["position"]} == {26, 30}  # the third of each micro-batch
    assert first["loss"] == "nan" and all(isinstance(sample["loss"], float) for sample in others)
    names = [run.data.name_of(sample["sample_id"]) for sample in told["samples"]]
    assert names == [(sample["shard"], sample["key"]) for sample in told["samples"]]
    assert all(0 <= sample["timestep"] < 1000 for sample in told["samples"])


def test_an_infinite_loss_with_a_finite_gradient_is_skipped(
    tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    run_dir, watch = tmp_path / "run", Watch()
    train(options(run_dir, pipeline_dir, shards_dir, logging__every=3), InfiniteLoss({3}), watch)
    assert torch.equal(watch.weights[4], watch.weights[3]) and not torch.equal(watch.weights[5], watch.weights[4])
    assert (watch.counters[4], watch.counters[8]) == (3, 7)
    told = incidents(run_dir)
    assert list(told) == ["step=3.skipped.json"]
    assert told["step=3.skipped.json"]["losses_by_rank"] == {"0": ["inf"]}


def minimised(loss: torch.Tensor) -> torch.Tensor:
    module: Any = TrainedModule(torch.nn.Linear(1, 1), Optimization(OptimizerConfig(), 0.1, lambda _: 1.0))
    batch: Any = SimpleNamespace(posterior_noise=torch.zeros(1, 4, 4, 4), positions=None, sample_ids=None)
    module.sample_losses = lambda batch: (loss[None], None, {})
    result: torch.Tensor = module.training_step(batch, 0)
    return result


@pytest.mark.parametrize("loss", [0.0, -3.5e-8, 1.7e38, 0.1])
def test_a_finite_loss_and_its_gradient_keep_every_bit(loss: float) -> None:
    weight = torch.tensor(loss, requires_grad=True)
    spread = minimised(weight)
    spread.backward()
    assert torch.equal(spread.detach(), weight.detach()) and weight.grad == 1.0


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_the_gradient_of_a_loss_that_is_not_finite_is_none_either(loss: float) -> None:
    weight = torch.tensor(loss, requires_grad=True)
    minimised(weight).backward()
    assert weight.grad is not None and weight.grad.isnan()


@pytest.fixture(scope="module")
def gone_back(
    tmp_path_factory: pytest.TempPathFactory, pipeline_dir: Path, shards_dir: Path
) -> tuple[Path, Run, Watch]:
    """A run of 20 steps that goes back once."""
    run_dir, watch = tmp_path_factory.mktemp("gone_back") / "run", Watch()
    return run_dir, train(options(run_dir, pipeline_dir, shards_dir, **GOING_BACK), Poison(BAD), watch), watch


def test_many_skipped_steps_in_a_row_lead_back(gone_back: tuple[Path, Run, Watch]) -> None:
    run_dir, run, watch = gone_back
    (guard,) = [c for c in run.trainer.callbacks if isinstance(c, NumericGuard)]  # type: ignore[attr-defined]
    assert [tuple(done) for done in guard.rollbacks] == [(12, 5)]
    assert torch.equal(watch.weights[10], watch.weights[7]) and not torch.equal(watch.weights[7], watch.weights[5])
    # The last of the callbacks sees the weights that were gone back to.
    assert torch.equal(watch.weights[12], watch.weights[5]) and watch.counters[12] == 5
    assert torch.equal(watch.averages[12], watch.averages[5])
    assert not torch.equal(watch.averages[11], watch.averages[5])
    assert run.trainer.global_step == 20
    told = incidents(run_dir)
    assert set(told) == {*(f"step={step}.skipped.json" for step in BAD), "step=9.rollback.json"}
    assert (told["step=9.rollback.json"]["at"], told["step=9.rollback.json"]["to"]) == (12, 5)


@pytest.mark.parametrize(("crash_after", "is_asynchronous"), [(11, False), (13, False), (13, True)])
def test_an_interrupted_run_goes_back_alike(
    crash_after: int,
    is_asynchronous: bool,
    tmp_path: Path,
    gone_back: tuple[Path, Run, Watch],
    pipeline_dir: Path,
    shards_dir: Path,
) -> None:
    run_dir = tmp_path / "run"
    argv = options(run_dir, pipeline_dir, shards_dir, checkpoint__asynchronous=is_asynchronous, **GOING_BACK)
    with pytest.raises(Interrupted):
        train(argv, Poison(BAD), CrashAfter(crash_after))
    assert (run_dir / "checkpoints" / "step=12").is_dir() == (crash_after > 12)  # saved when it had gone back
    train(argv, Poison(BAD))
    whole, cut = checkpoint_tensors(gone_back[0], 20), checkpoint_tensors(run_dir, 20)
    assert set(whole) == set(cut) and all(torch.equal(whole[name], cut[name]) for name in whole)
    assert incidents(run_dir).keys() == incidents(gone_back[0]).keys()


def test_the_end_of_a_run_goes_back_as_well(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    """Between two logged steps nothing is read; a run whose last steps were skipped must not end as if it were fine."""
    run_dir = tmp_path / "run"
    changes = {**GOING_BACK, "logging__every": 50, "experiment__num_examples_to_see": 8 * 13}
    run = train(options(run_dir, pipeline_dir, shards_dir, **changes), Poison(BAD))
    (guard,) = [c for c in run.trainer.callbacks if isinstance(c, NumericGuard)]  # type: ignore[attr-defined]
    assert [done.at for done in guard.rollbacks] == [13] and "step=9.rollback.json" in incidents(run_dir)


def test_a_run_that_goes_back_too_often_ends(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    changes = {"numerics__max_rollbacks": 1, "experiment__save_every": 3, **SHORT}
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, **changes)
    with pytest.raises(NumericError, match=r"max_rollbacks=1 .*step=12\.skipped\.json") as raised:
        train(argv, Poison({4, 5, 6, 10, 11, 12}))
    assert raised.value.exit_status == 86


def test_a_run_without_an_older_checkpoint_ends(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, **SHORT)
    with pytest.raises(NumericError, match="no checkpoint from before the first"):
        train(argv, Poison(set(range(20))))


DONE = Rollback(at=40, to=10)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (10, 20, 30, 40, 50):
        write_sealed(tmp_path, step, lambda folder: folder.joinpath("file").write_text("content"), {})
    return tmp_path


@pytest.mark.parametrize(
    ("before", "done", "expected"),
    [
        (45, [], 40),
        (40, [], 30),  # a checkpoint after 40 steps has the weights that step 40 found wrong
        (10, [], None),
        (41, [DONE], 40),
        (40, [DONE], 10),  # 20 and 30 were left behind
        (60, [DONE], 50),
    ],
)
def test_the_newest_that_is_older(root: Path, before: int, done: list[Rollback], expected: int | None) -> None:
    assert newest_before(root, before, done) == expected


def test_a_damaged_one_is_not_taken(root: Path) -> None:
    (root / "step=30" / "file").write_text("damaged")
    assert newest_before(root, 40, []) == 20


INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_flipped_bit_changes_it(dtype: torch.dtype) -> None:
    tensors = [torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype), torch.zeros(4, dtype=dtype)]
    before = int(bit_digest(tensors))
    integers = INTEGERS[dtype]
    for tensor in tensors:
        bits = tensor.view(-1).view(integers)
        for place in range(len(bits)):
            for number in range(8 * tensor.element_size()):
                is_sign = number == 8 * tensor.element_size() - 1
                flip = torch.iinfo(integers).min if is_sign else 1 << number
                bits[place] ^= flip
                assert int(bit_digest(tensors)) != before
                bits[place] ^= flip
    assert int(bit_digest(tensors)) == before


def test_places_count_over_chunks_and_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.randn(100)
    whole = int(bit_digest([numbers]))
    monkeypatch.setattr(numerics, "_CHUNK", 7)
    assert int(bit_digest([numbers])) == whole == int(bit_digest([numbers[:30], numbers[30:]]))
    swapped = numbers.clone()
    swapped[[3, 50]] = swapped[[50, 3]]
    assert int(bit_digest([swapped])) != whole
    assert int(bit_digest([-torch.zeros(1)])) != int(bit_digest([torch.zeros(1)]))


def test_layout_in_memory_does_not_count() -> None:
    image = torch.randn(2, 3, 4, 4)
    assert int(bit_digest([image])) == int(bit_digest([image.to(memory_format=torch.channels_last)]))
    assert int(bit_digest([])) == 0
