"""A new run begins with another run's checkpoint: what continues, what begins anew, and what is refused."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from sd_training.build.plan import find_start, make_plan
from sd_training.build.run import _wandb_id
from sd_training.config.load import load_config
from sd_training.errors import CheckpointError, ConfigError
from tests import makers
from tests.integration.training import (
    CrashAfter,
    Interrupted,
    checkpoint_tensors,
    losses,
    options,
    train,
    train_in_processes,
    train_until_killed,
)

ALL = "experiment.reset=[optimizer,ema,data,wandb]"
WORDS = Callable[..., list[str]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, pipeline_dir: Path, shards_dir: Path) -> Path:
    """A run of 4 optimizer steps with checkpoints of steps 2 and 4; not to be changed."""
    run_dir = tmp_path_factory.mktemp("source") / "run"
    changes: dict[str, Any] = {"experiment__num_examples_to_see": 32, "experiment__save_every": 2}
    train(options(run_dir, pipeline_dir, shards_dir, **changes))
    return run_dir


@pytest.fixture
def words(tmp_path: Path, pipeline_dir: Path, shards_dir: Path, source: Path) -> WORDS:
    def given(step: int | None = 2, **changes: Any) -> list[str]:
        start = source if step is None else source / "checkpoints" / f"step={step}"
        own = {"experiment__num_examples_to_see": 32, "experiment__save_every": 1, "experiment__start_from": start}
        return options(tmp_path / "new", pipeline_dir, shards_dir, **(own | changes))

    return given


class Begun(NamedTuple):
    """A run before its first optimizer step."""

    step: int
    weights: dict[str, Tensor]
    average: dict[str, Tensor]
    has_optimizer_state: bool
    positions: list[int]


class _Look(pl.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        (ema,) = (callback for callback in trainer.callbacks if type(callback).__name__ == "Ema")
        self.seen = Begun(
            trainer.global_step,
            {name: value.clone() for name, value in module.state_dict().items()},
            ema.shards,
            bool(trainer.optimizers[0].state),
            batch.positions.tolist(),
        )
        raise Interrupted


def begin(argv: list[str]) -> Begun:
    look = _Look()
    with pytest.raises(Interrupted):
        train(argv, look)
    return look.seen


def part(run_dir: Path, step: int, name: str) -> dict[str, Tensor]:
    tensors = checkpoint_tensors(run_dir, step)
    return {key.partition(":")[2]: value for key, value in tensors.items() if key.startswith(f"{name}:")}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def content(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_what_is_not_reset_continues_to_the_bit_and_so_does_a_resume(
    words: WORDS, source: Path, tmp_path: Path
) -> None:
    before = content(source)
    train_until_killed(words(), 1, step=3)
    assert [path.name for path in (tmp_path / "new" / "checkpoints").iterdir()] == ["step=3"]
    shutil.move(source, tmp_path / "away")  # its own checkpoint is what it resumes from
    try:
        train(words())
    finally:
        shutil.move(tmp_path / "away", source)
    assert equal(checkpoint_tensors(tmp_path / "new", 4), checkpoint_tensors(source, 4))
    assert losses(tmp_path / "new") == losses(source)[2:]
    assert content(source) == before


def test_a_run_folder_stands_for_its_newest_checkpoint_and_everything_can_begin_anew(
    words: WORDS, source: Path
) -> None:
    begun = begin([*words(None), ALL])
    assert (begun.step, begun.has_optimizer_state, begun.positions) == (0, False, list(range(8)))
    assert equal(begun.weights, part(source, 4, "weights"))
    assert all(torch.equal(value, begun.weights[name]) for name, value in begun.average.items())


def test_the_average_may_be_what_a_run_begins_with(words: WORDS, source: Path, tmp_path: Path) -> None:
    argv = [*words(4), ALL, "experiment.start_from_average=true"]
    begun = begin(argv)
    average = part(source, 4, "ema")
    assert average and not equal(average, part(source, 4, "weights"))
    assert equal({name: begun.weights[name] for name in average}, average)
    assert equal(begun.average, average)
    with pytest.raises(Interrupted):
        train(argv, CrashAfter(2))
    train([*argv, "experiment.num_examples_to_see=24"])
    shutil.copytree(tmp_path / "new", tmp_path / "cut")
    shutil.rmtree(tmp_path / "new")
    train([*argv, "experiment.num_examples_to_see=24"])
    assert equal(checkpoint_tensors(tmp_path / "new", 3), checkpoint_tensors(tmp_path / "cut", 3))


@pytest.mark.parametrize("reset", ["optimizer", "ema", "data"])
def test_each_part_begins_anew_by_itself(reset: str, words: WORDS, source: Path) -> None:
    more = ["optimizer.name=lion"] if reset == "optimizer" else ["ema.warmup=false"]
    begun = begin([*words(), f"experiment.reset=[{reset}]", *more])
    first = 0 if reset == "data" else 2
    assert (begun.step, begun.positions[0]) == (first, 8 * first)
    assert begun.has_optimizer_state == (reset != "optimizer")
    weights = part(source, 2, "weights")
    assert equal(begun.weights, weights)
    assert equal(begun.average, {name: weights[name] for name in begun.average}) == (reset == "ema")
    assert equal(begun.average, part(source, 2, "ema")) == (reset != "ema")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["experiment.num_examples_to_see=16"], r"experiment\.num_examples_to_see: the run has 2 optimizer steps, and"),
        (["optimizer.name=lion"], 'with other options: optimizer.name was "adamw", now "lion"'),
        (
            ["objective.prediction_type=v_prediction", ALL],
            'objective.prediction_type was "epsilon", now "v_prediction"',
        ),
        (["dataset.params.resolution=32"], "dataset.params.resolution was 16, now 32"),
        (["experiment.seed=3"], "experiment.seed was 0, now 3"),
        (["experiment.reset=[data]"], r"experiment\.reset: data without ema: .* set ema\.warmup=false"),
        (["experiment.start_from=nowhere"], r"experiment\.start_from: nowhere is neither a checkpoint \(RUN/"),
        (["experiment.start_from=null", ALL], r"experiment\.reset: is .* only read with experiment\.start_from"),
    ],
)
def test_what_cannot_begin_says_why(more: list[str], said: str, words: WORDS) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=said):
        train([*words(), *more])


def test_another_network_is_named_by_what_differs(words: WORDS, source: Path, tmp_path: Path) -> None:
    where = rf"experiment\.start_from: {source}/checkpoints/step=2: the checkpoint belongs to another network: "
    wider = {**makers.SMALLER_UNET, "block_out_channels": [16]}
    for name, settings, differs in (
        ("deeper", {**makers.SMALLER_UNET, "layers_per_block": 2}, r"\d+ names of weights differ, e\.g\. network\."),
        ("wider", wider, r"network\.\S+ is \(.*\), now \("),
    ):
        other = makers.save_tiny_pipeline(tmp_path / name, unet=settings)
        with pytest.raises(CheckpointError, match=where + differs):
            train([*words(model__pretrained=other), ALL])


def test_a_damaged_source_is_not_used_and_not_touched(words: WORDS, source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "damaged")
    file = tmp_path / "damaged" / "checkpoints" / "step=4" / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    start = f"experiment.start_from={tmp_path / 'damaged'}"
    assert find_start(make_plan(load_config([*words(), ALL, start])), None).origin.endswith("step=4")  # by sizes
    begun = begin([*words(), start, "experiment.num_examples_to_see=64"])
    assert begun.step == 2
    with pytest.raises(ConfigError, match=r"experiment\.start_from: .*step=4 cannot be used: weights.* has changed"):
        train([*words(), ALL, f"{start}/checkpoints/step=4"])
    assert sorted(path.name for path in file.parents[1].iterdir()) == ["step=2", "step=4"]


def test_a_checkpoint_without_an_average_has_none_to_begin_with(
    words: WORDS, tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    plain = tmp_path / "plain"
    changes: dict[str, Any] = {"experiment__num_examples_to_see": 8, "model__use_ema": False}
    train(options(plain, pipeline_dir, shards_dir, **changes))
    argv = [*words(), ALL, f"experiment.start_from={plain}"]
    with pytest.raises(ConfigError, match=r"experiment\.start_from_average: the checkpoint has no average"):
        train([*argv, "experiment.start_from_average=true"])
    begun = begin([*words(), f"experiment.start_from={plain}"])  # it begins at the weights
    assert equal(begun.average, {name: begun.weights[name] for name in begun.average})


def test_the_curves_of_wandb_continue_unless_they_are_reset(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("source", "by_run", "by_step", "anew")]
    for run in runs:
        run.mkdir()
    first = _wandb_id(runs[0])
    assert _wandb_id(runs[1], str(runs[0])) == first
    assert _wandb_id(runs[2], str(runs[0] / "checkpoints" / "step=2")) == first
    assert _wandb_id(runs[3]) != first and _wandb_id(runs[2]) == first


def test_two_processes_begin_alike(words: WORDS, source: Path, tmp_path: Path) -> None:
    """Also when they are killed on the way, and begin again where they were, to the bit."""
    argv = [*words(), "system.batch_size=4"]
    train_until_killed(argv, 2, step=3)
    assert [path.name for path in (tmp_path / "new" / "checkpoints").iterdir()] == ["step=3"]
    train_in_processes(argv, 2)
    train_in_processes([*argv, "experiment.name=whole"], 2)
    ours, whole, theirs = (checkpoint_tensors(run, 4) for run in (tmp_path / "new", tmp_path / "whole", source))
    assert equal(ours, whole)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.allclose(ours[name].float(), value.float(), rtol=1e-4, atol=1e-5), name
