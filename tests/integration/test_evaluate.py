"""scripts/evaluate.py on a run and beside it: averaged and raw weights, pictures used again, and what it refuses."""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from math import isclose
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import Dinov2Config, Dinov2Model

from scripts import evaluate
from sd_training.build.plan import make_plan
from sd_training.build.run import build_run
from sd_training.checkpoint.folder import MANIFEST_NAME
from sd_training.config.load import load_config
from sd_training.config.schema import ModelConfig
from sd_training.errors import ConfigError, DataError
from sd_training.evaluation.measure import read_rows, write_rows
from sd_training.evaluation.pictures import weights_of_run
from sd_training.evaluation.report import PAGE
from sd_training.export.pipeline import exported_step
from sd_training.log import RunLog
from tests.faults.fork_server import shared_server
from tests.faults.tiny_run import ONE_MACHINE, TORCHRUN
from tests.integration.training import ROOT, AtStep, checkpoint_tensors, options, train


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dinov2")
    shape: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "patch_size": 112}
    Dinov2Model(Dinov2Config(image_size=224, **shape)).save_pretrained(folder)
    return folder


def test_average_and_raw_weights_of_a_run(
    pipeline_dir: Path, shards_dir: Path, dinov2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    changes = {"experiment__num_examples_to_see": 16, "experiment__save_every": 2, "ema__decay": 0.5}
    drawing = {"sampling__num_inference_steps": 1, "sampling__guidance_scale": 1, "evaluation__num_images": 4}
    train(options(run_dir, pipeline_dir, shards_dir, **changes, **drawing))
    average, raw = weights_of_run(run_dir, None, ModelConfig(use_ema=True))
    assert [(w.step, w.name) for w in (average, raw)] == [(2, "average"), (2, "trained")]
    stored = checkpoint_tensors(run_dir, 2)
    exported = load_file(run_dir / "current_pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    for weights, differs in ((average, False), (raw, True)):
        unet = weights.load().unet.state_dict()
        assert differs == any(not torch.equal(exported[name], tensor) for name, tensor in unet.items())
    assert all(torch.equal(tensor, stored[f"weights:network.{name}"]) for name, tensor in unet.items())

    words = [
        str(run_dir),
        f"evaluation.path={shards_dir}",
        f"evaluation.dinov2={dinov2}",
        "evaluation.inception=no.pth",
    ]
    evaluate.main([*words, "--dry-run"])
    assert "average weights: 4 pictures, 4 to be drawn" in capsys.readouterr().out
    assert not list(run_dir.rglob("evaluation/step_2/*")) and not (run_dir / "evaluation.csv").exists()
    (run_dir / PAGE).write_text("as when the run ended")
    evaluate.main(words)
    assert "fd_dinov2" in (run_dir / PAGE).read_text()
    rows = {(row["weights"], row["metric"]): row for row in read_rows(run_dir / "evaluation.csv")}
    assert len(rows) == 14 and {row["step"] for row in rows.values()} == {"2"}
    values = [float(rows[name, "fd_dinov2"]["value"]) for name in ("average", "trained")]
    assert values[0] != values[1] and "no.pth cannot be loaded" in rows["average", "fid"]["reason"]
    assert list((run_dir / "tensorboard" / "evaluation").glob("events*"))
    pictures = sorted(run_dir.glob("evaluation/step_2/*/*.png"))
    assert len(pictures) == 8 and pictures[0].read_bytes() != pictures[4].read_bytes()

    pictures[0].unlink()
    before, text = [p.stat().st_mtime_ns for p in pictures[1:]], (run_dir / "evaluation.csv").read_text()
    evaluate.main(words)
    assert [path.stat().st_mtime_ns for path in pictures[1:]] == before and pictures[0].is_file()
    assert (run_dir / "evaluation.csv").read_text() == text
    with pytest.raises(DataError, match=r"no pipeline of step 1; the newest is of step 2, the only one that is kept"):
        evaluate.main([*words, "--step", "1"])

    command, log = [*ONE_MACHINE, "--nproc_per_node", "2", str(ROOT / "scripts/evaluate.py"), *words], tmp_path / "log"
    command += ["--out", str(tmp_path / "two"), "--device", "cpu"]
    assert shared_server().start(TORCHRUN, command, log, os.environ).wait(600) == 0, log.read_text()
    assert read_rows(tmp_path / "two" / "evaluation.csv") == list(rows.values())
    of_two = sorted(tmp_path.glob("two/evaluation/step_2/*/*.png"))
    assert [path.read_bytes() for path in of_two] == [path.read_bytes() for path in pictures]

    (tmp_path / "prompts.txt").write_text("a red square\n\na blue one\n")
    changes = [f"evaluation.prompts={tmp_path / 'prompts.txt'}", f"evaluation.dinov2={dinov2}"]
    config = [f"config={run_dir / 'config.yaml'}", "--out", str(tmp_path / "out")]
    evaluate.main([str(run_dir / "current_pipeline"), *config, *changes, f"evaluation.path={shards_dir}"])
    (row, *_) = read_rows(tmp_path / "out" / "evaluation.csv")
    assert (row["step"], row["weights"], row["images"], row["reason"]) == ("2", "trained", "4", "")


def test_a_watcher_adds_the_weights_that_one_before_has_not_measured(tmp_path: Path, pipeline_dir: Path) -> None:
    """It was killed between the averaged and the raw ones."""
    shutil.copytree(pipeline_dir, tmp_path / "current_pipeline")
    (tmp_path / "exported_step").write_text("7\n")
    (tmp_path / "checkpoints" / "step=7").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step=7" / MANIFEST_NAME).write_text("{}")
    (tmp_path / "evaluation").mkdir()
    args = argparse.Namespace(target=tmp_path, out=tmp_path, beside=-1)  # of a run that has ended
    config = load_config([*options(tmp_path, pipeline_dir, Path("x")), "evaluation.dinov2=y"])
    assert list(evaluate.newest_exports(args, config)) == [7]
    row = {"step": "7", "value": "1"}
    for metric, missing in {"fd_dinov2": [7], "fd_dinov2_infinity": []}.items():
        write_rows(tmp_path / "evaluation.csv", [{**row, "weights": "average", "metric": metric}])
        assert list(evaluate.newest_exports(args, config)) == [7]
        write_rows(tmp_path / "evaluation.csv", [{**row, "weights": "trained", "metric": metric}])
        assert list(evaluate.newest_exports(args, config)) == missing
    write_rows(tmp_path / "evaluation.csv", [{"step": "7", "weights": "trained", "metric": metric, "reason": "no"}])
    assert list(evaluate.newest_exports(args, config)) == [7]
    (tmp_path / "evaluation" / "watch.lock").unlink()
    (tmp_path / "evaluation" / "watch.lock").mkdir()
    with pytest.raises(ConfigError, match=r"watch\.lock: cannot be opened \(Is a directory\)"):
        list(evaluate.newest_exports(args, config))


def test_raw_weights_with_trained_text_encoders(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    changes = {"experiment__num_examples_to_see": 16, "experiment__save_every": 2, "ema__decay": 0.5}
    train(options(tmp_path / "run", pipeline_dir, shards_dir, **changes, model__train_text_encoder=True))
    average, raw = weights_of_run(tmp_path / "run", 2, ModelConfig(use_ema=True))
    stored, exported, pipeline = checkpoint_tensors(tmp_path / "run", 2), average.load(), raw.load()
    for prefix, part in (("denoiser", "unet"), ("text_encoder", "text_encoder")):
        own, of_export = (getattr(each, part).state_dict() for each in (pipeline, exported))
        assert any(not torch.equal(own[name], of_export[name]) for name in own)
        trained = {name: stored.get(f"weights:network.{prefix}.{name}") for name in own}
        assert all(tensor is None or torch.equal(own[name], tensor) for name, tensor in trained.items())
        assert sum(tensor is not None for tensor in trained.values()) > 5


def test_a_command_that_measures_nothing_fails(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    words = options(tmp_path / "run", pipeline_dir, shards_dir, evaluation__path=shards_dir, evaluation__inception="no")
    words += ["evaluation.num_images=2", "sampling.num_inference_steps=1", "sampling.guidance_scale=1"]
    (tmp_path / "empty.yaml").write_text("{}")
    words = [str(pipeline_dir), "--out", str(tmp_path), f"config={tmp_path / 'empty.yaml'}", *words]
    with pytest.raises(DataError, match=r"nothing could be measured; inception: evaluation\.inception: no cannot be"):
        evaluate.main(words)
    assert len(read_rows(tmp_path / "evaluation.csv")) == 5


def test_what_cannot_be_evaluated(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    words = options(tmp_path / "run", pipeline_dir, shards_dir)
    for wrong, problem in (
        ([str(tmp_path / "none")], "is no folder"),
        ([str(pipeline_dir)], "is of no run"),
        ([str(pipeline_dir), "--out", str(tmp_path)], "is of no run"),
    ):
        with pytest.raises(ConfigError, match=problem):
            evaluate.main(wrong)
    (tmp_path / "empty.yaml").write_text("{}")
    words = [str(pipeline_dir), "--out", str(tmp_path), f"config={tmp_path / 'empty.yaml'}", *words]
    with pytest.raises(ConfigError, match="evaluation: names no network"):
        evaluate.main(words)
    with pytest.raises(ConfigError, match=r"evaluation\.path: there are no real pictures"):
        evaluate.main([*words, "evaluation.clip=x"])
    with pytest.raises(ConfigError, match=r"--watch: .* is the folder of no run"):
        evaluate.main([*words, "--watch"])
    with pytest.raises(ConfigError, match=r"--step: is of a run's kept pipelines"):
        evaluate.main([*words, "--step", "2"])
    with pytest.raises(DataError, match=r"evaluation\.path: .*nowhere"):
        evaluate.main([*words, "evaluation.clip=x", f"evaluation.path={tmp_path / 'nowhere'}"])
    (tmp_path / "blank.txt").write_text("\n")
    with pytest.raises(DataError, match=r"evaluation\.prompts: .*blank.txt has no prompts"):
        evaluate.main([*words, "evaluation.clip=x", f"evaluation.prompts={tmp_path / 'blank.txt'}"])


def wait_until(is_true: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    """A minute would do; the machine may be busy."""
    end_s = time.monotonic() + 600
    while not is_true():
        assert time.monotonic() < end_s and (process is None or process.poll() is None)
        time.sleep(0.1)


def watchers(run_dir: Path) -> list[int]:
    """Processes that evaluate this run, as the run has logged them."""
    pattern = re.compile(r"evaluation: process (\d+) on cpu")
    return [int(number) for number in pattern.findall((run_dir / "train.log").read_text(encoding="utf-8"))]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_kill_9_of_either_harms_the_other_not(
    pipeline_dir: Path, shards_dir: Path, dinov2: Path, tmp_path: Path
) -> None:
    """The run is killed, and its newest export is still evaluated; it goes on, its evaluation is killed, and it ends
    as it should."""
    run_dir = tmp_path / "run"
    changes = {"experiment__num_examples_to_see": 8 * 100_000, "experiment__save_every": 10, "model__use_ema": False}
    changes |= {"evaluation__path": shards_dir, "evaluation__dinov2": dinov2, "evaluation__num_images": 4}
    changes |= {"sampling__num_inference_steps": 1, "sampling__guidance_scale": 1, "evaluation__every": 10}
    command = [sys.executable, "-m", "train", *options(run_dir, pipeline_dir, shards_dir, **changes)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        wait_until((run_dir / "exported_step").exists, run)
        (watcher,) = watchers(run_dir)
        assert is_running(watcher)
        run.kill()
    newest = exported_step(run_dir)
    wait_until(lambda: not is_running(watcher))
    rows = read_rows(run_dir / "evaluation.csv")
    assert int(rows[-1]["step"]) == newest and all(row["value"] and not row["reason"] for row in rows)

    changes |= {"experiment__num_examples_to_see": 8 * (newest + 30), "wandb__mode": "offline"}
    os.environ.pop("WANDB_MODE")
    killed = []

    def kill() -> None:
        (*_, own) = watchers(run_dir)
        assert own != watcher and is_running(own)
        os.kill(own, signal.SIGKILL)
        killed.append(own)

    with RunLog().kept() as run_log:
        plan = make_plan(load_config(options(run_dir, pipeline_dir, shards_dir, **changes)))
        resumed = build_run(plan, run_log=run_log)
        resumed.trainer.callbacks.append(AtStep(newest + 15, kill))  # type: ignore[attr-defined]
        resumed.trainer.fit(resumed.module, datamodule=resumed.data)
        for logger in resumed.trainer.loggers:
            logger.finalize("success")
    assert len(killed) == 1 and exported_step(run_dir) == newest + 30 and resumed.exit_status == 0
    events = EventAccumulator(str(run_dir / "tensorboard" / "evaluation")).Reload()
    measured = [(int(row["step"]), row["metric"], float(row["value"])) for row in rows]
    assert {"fd_dinov2_trained", "fd_dinov2_infinity_trained"} <= {*events.Tags()["scalars"]}
    for step, name, value in measured:
        assert any(e.step == step and isclose(e.value, value, rel_tol=1e-6) for e in events.Scalars(f"{name}_trained"))
    assert int(read_rows(run_dir / "evaluation.csv")[-1]["step"]) == newest
    assert "evaluation: the process ended with status -9; " in (run_dir / "train.log").read_text(encoding="utf-8")
    (offline,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    wait_until(lambda: b"fd_dinov2_infinity_trained" in offline.read_bytes())
