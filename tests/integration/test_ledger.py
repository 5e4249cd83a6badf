"""Where the time of a run goes: the sections of its ledger, its speed, its profile, and the norms of its gradients."""

import csv
import json
import math
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import pytorch_lightning as pl
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from sd_training.build.flops import PictureFlops
from sd_training.build.models import build_model
from sd_training.build.plan import make_plan
from sd_training.callbacks.metrics import COLUMNS, Metrics
from sd_training.config.load import load_config
from sd_training.data.samples.sample import TrainingSamples
from sd_training.training import SECTIONS
from tests import makers
from tests.integration.training import CrashAfter, Interrupted, metrics, options, prepare, train

STEPS, EVERY, BATCH, DELAY_S, PEAK_TFLOPS = 200, 10, 4, 0.004, 0.25
DUE = 100
"""Optimizer steps between saves, validations and previews."""
PLAIN_STEP = 155
"""An optimizer step after which nothing is due."""
CALLS = {
    **{"Preemption": 3, "Ema": 3, "NumericGuard": 4, "GradientNorms": 3, "Metrics": 2, "Validation": 2, "Pictures": 2},
    **{"Save": 2, "Profile": 2, "Runtime": 4},
}
"""Calls of hooks of the package's callbacks in such a step."""


class Clock(pl.Callback):
    """The wall clock at the end of every optimizer step, before `Metrics`."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.at[trainer.global_step] = time.perf_counter()


class HookCalls(pl.Callback):
    """Counts calls of the callbacks' hooks in one optimizer step."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        sys.setprofile(self._note if trainer.global_step == PLAIN_STEP - 1 else None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name.startswith("on_") and "sd_training/callbacks/" in code.co_filename:
            self.calls[type(frame.f_locals["self"]).__name__] += 1


class Ledgered(NamedTuple):
    """What a run left."""

    folder: Path
    rows: list[dict[str, float]]
    clock: Clock
    hooks: HookCalls
    picture_flops: float


@pytest.fixture(scope="module")
def run(shards_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Ledgered:
    """With validation, previews, saves, an average and a slow loader. In steps that are long beside a clock's tick."""
    home = tmp_path_factory.mktemp("ledger")
    pipeline = makers.save_tiny_pipeline(home / "pipeline")
    held_out = makers.caption_shards(home / "held out", shards=1, per_shard=8)
    changes = {
        "experiment__num_examples_to_see": BATCH * STEPS,
        "system__batch_size": BATCH,
        "experiment__save_every": DUE,
        "optimizer__max_grad_norm": 0.01,
        "sampling__every": DUE,
        "sampling__prompts": "[a]",
        "sampling__num_inference_steps": 1,
        "validation__path": held_out,
        "validation__every": DUE,
        "validation__num_levels": 1,
        "logging__every": EVERY,
        "logging__gradient_norms": True,
        "logging__profile_steps": "[3,4]",
        "logging__peak_tflops": PEAK_TFLOPS,
    }
    read = TrainingSamples.__getitem__

    def read_slowly(*arguments: Any) -> Any:
        time.sleep(DELAY_S)
        return read(*arguments)

    argv, clock = options(home / "run", pipeline, shards_dir, **changes), Clock()
    hooks = HookCalls()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingSamples, "__getitem__", read_slowly)
        built = prepare(argv)
        callbacks: list[Any] = built.trainer.callbacks  # type: ignore[attr-defined]
        callbacks.insert([type(callback) for callback in callbacks].index(Metrics), clock)
        callbacks.append(hooks)
        built.trainer.fit(built.module, datamodule=built.data)
    rows = [{name: float(text or "nan") for name, text in row.items()} for row in metrics(home / "run")]
    trained = build_model(make_plan(load_config(argv)))
    counted = PictureFlops(trained)(16 // trained.latent_grid.downscale, 16 // trained.latent_grid.downscale)
    assert counted is not None
    return Ledgered(home / "run", rows, clock, hooks, counted)


def test_the_sections_sum_to_the_wall_time_within_a_percent(run: Ledgered) -> None:
    assert [row["optimizer_step"] for row in run.rows] == [*range(EVERY, STEPS + 1, EVERY)]
    # From the first row to the last one: a pause of this process between two clocks costs a window more than a percent.
    wall_s = run.clock.at[STEPS] - run.clock.at[EVERY]
    sums = {name: EVERY * sum(row[name] for row in run.rows[1:]) for name in run.rows[0] if name.endswith("_s")}
    total_s = sum(sums[f"{section}_s"] for section in SECTIONS)
    assert total_s == pytest.approx(wall_s, rel=0.01)
    apart_s = sums["validation_s"] + sums["drawing_s"] + sums["saving_s"]
    assert sums["step_s"] + apart_s == pytest.approx(wall_s, rel=0.01)


def test_time_is_booked_where_it_was_spent(run: Ledgered) -> None:
    first, *others = run.rows
    for row in run.rows:
        assert row["data_wait_s"] >= DELAY_S  # once per micro-batch
        assert min(row["forward_s"], row["backward_s"], row["optimizer_s"], row["encode_s"], row["average_s"]) > 0
    assert sum(row["backward_s"] for row in others) > sum(row["optimizer_s"] for row in others)
    for section in ("validation", "drawing", "saving"):
        # What is done after a logged step belongs to the next window.
        due = [row[f"{section}_s"] for row in others if row["optimizer_step"] == DUE + EVERY]
        idle = [row[f"{section}_s"] for row in others if row["optimizer_step"] != DUE + EVERY]
        assert min(due) > 10 * statistics.median(idle), section
    assert min(first["validation_s"], first["drawing_s"]) > first["saving_s"]  # before the first step


def test_speed_follows_from_the_duration_of_a_step(run: Ledgered) -> None:
    for row in run.rows:
        assert row["images_per_s"] == row["images_per_s_per_device"] == pytest.approx(BATCH / row["step_s"], rel=1e-6)
        assert row["tflops_per_s"] == pytest.approx(BATCH * run.picture_flops / row["step_s"] / 1e12, rel=1e-6)
        assert row["mfu"] == pytest.approx(row["tflops_per_s"] / PEAK_TFLOPS, rel=1e-6)


def test_all_loggers_get_the_same_numbers(run: Ledgered) -> None:
    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    tags = EventAccumulator(str(run.folder / "tensorboard")).Reload().Tags()["scalars"]
    for line, row in zip(map(json.loads, lines), run.rows, strict=True):
        assert next(iter(line)) == "optimizer_step"
        known = {name: value for name, value in row.items() if not math.isnan(value)}
        assert {name: value for name, value in line.items() if name in COLUMNS} == known
        assert line.keys() - {"optimizer_step"} <= {*tags}
    assert {f"{section}_s" for section in SECTIONS} | {"step_s", "mfu"} <= {*tags}


def test_norms_of_layer_groups_are_the_parts_of_the_whole_norm_before_clipping(run: Ledgered) -> None:
    for line in map(json.loads, (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        norms = {name: norm for name, norm in line.items() if name.startswith("grad_norm/")}
        assert {"grad_norm/denoiser.conv_in", "grad_norm/denoiser.down_blocks.0"} <= norms.keys()
        assert not any(name.endswith((".weight", ".bias")) for name in norms)
        # The sum of n squares in fp32: n = 10^6 / 2^24, pairwise far less.
        assert math.sqrt(sum(norm**2 for norm in norms.values())) == pytest.approx(line["grad_norm"], rel=1e-4)
        assert line["grad_norm"] > 0.01  # it is clipped


def test_a_profile_is_a_trace_and_a_table(run: Ledgered) -> None:
    trace, table = (run.folder / "profile" / f"steps_3-4.{suffix}" for suffix in ("json", "txt"))
    events = [event.get("name") for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]]
    backward = [name for name in events if name == "autograd::engine::evaluate_function: ConvolutionBackward0"]
    convolutions = len(backward)
    assert convolutions > 0 and convolutions % 2 == 0  # of two steps
    text = table.read_text(encoding="utf-8")
    assert "Self CPU" in text and "aten::convolution_backward" in text
    assert sorted(path.name for path in trace.parent.iterdir()) == ["steps_3-4.json", "steps_3-4.txt"]


def test_the_hooks_of_a_step_are_counted(run: Ledgered) -> None:
    assert dict(run.hooks.calls) == CALLS


def test_a_run_of_before_goes_on(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    """Its `metrics.csv` has fewer columns, and it has no `metrics.jsonl`."""
    argv, folder = options(tmp_path / "run", pipeline_dir, shards_dir), tmp_path / "run"
    with pytest.raises(Interrupted):
        train(argv, CrashAfter(5))
    written = metrics(folder)
    old = COLUMNS[: COLUMNS.index("device_memory_gib") + 1]
    with (folder / "metrics.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, old, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(written)
    (folder / "metrics.jsonl").unlink()
    train(argv)
    rows = metrics(folder)
    assert [int(row["optimizer_step"]) for row in rows] == [*range(1, 9)]
    assert [bool(row["step_s"]) for row in rows] == [False] * 4 + [True] * 4
    assert [row["loss"] for row in rows[:4]] == [row["loss"] for row in written[:4]]
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["optimizer_step"] for line in lines] == [5, 6, 7, 8]
