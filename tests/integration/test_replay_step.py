"""A step that went wrong can be run again: the same samples and losses, and where it went wrong."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import replay_step
from sd_training.config.changes import resolved_yaml
from sd_training.config.load import load_config
from sd_training.config.plan import BatchPlan
from sd_training.errors import NumericError, UserError
from tests import family_makers, makers
from tests.integration.training import options, train
from tests.unit.callbacks.test_numerics import Poison


def test_options_are_those_of_the_start_of_the_incident(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    rates, starts = (0.001, 0.002), [{"started_unix_s": 200}]
    for number, rate in ((1, rates[0]), (3, rates[1])):
        argv = options(tmp_path, pipeline_dir, shards_dir, optimizer__params__learning_rate=rate)
        text = resolved_yaml(load_config(argv))
        starts.insert(number - 1, {"started_unix_s": 100 * number, "config": text.splitlines()})
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "run.json").write_text(json.dumps({"starts": starts}))
    for time_s, rate in ((150.0, rates[0]), (250.0, rates[0]), (350.0, rates[1])):
        incident = replay_step.Incident(tmp_path, 4, BatchPlan(8, 1, 1, 64), {}, time_s)
        assert replay_step.plan_of(incident, "cpu").config.optimizer.params.learning_rate == rate


@pytest.fixture(scope="module")
def exploded(tmp_path_factory: pytest.TempPathFactory, pipeline_dir: Path, shards_dir: Path) -> Path:
    """A run of two accumulated micro-batches whose weights grow until nothing is finite."""
    run_dir = tmp_path_factory.mktemp("exploded") / "run"
    changes = {
        "optimizer__params__learning_rate": 1e15,
        "lr_scheduler__params__warmup_length": 0,
        "system__batch_size": 4,
        "system__gradient_accumulation": 2,
        "experiment__save_every": 1,
        "checkpoint__keep": 20,
        "numerics__max_skipped_in_a_row": 2,
        "numerics__max_rollbacks": 0,
    }
    with pytest.raises(NumericError):
        train(options(run_dir, pipeline_dir, shards_dir, **changes))
    return run_dir


@pytest.fixture
def replayed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs the script on an incident, with further words; gives what it prints."""

    def run(path: Path, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["replay_step.py", str(path), "--device", "cpu", *words])
        capsys.readouterr()
        replay_step.main()
        return capsys.readouterr().out

    return run


def test_the_step_is_run_again(exploded: Path, replayed: Callable[..., str]) -> None:
    path = min((exploded / "incidents").glob("*.skipped.json"))
    told = json.loads(path.read_text())
    before = sorted(exploded.rglob("*"))
    printed = replayed(path)
    assert sorted(exploded.rglob("*")) == before
    assert f"checkpoints/step={told['optimizer_step']}\n" in printed
    assert ", 0 finite in one only" in printed
    assert re.search(
        r"rank 0, micro-batch 1: first output that is not finite: unet\.\S+ \(Linear\), from inputs", printed
    )
    for sample in told["samples"]:
        (line,) = [line for line in printed.splitlines() if line.endswith(f"{sample['shard']} {sample['key']}")]
        assert line.split()[3:6] == [str(sample[key]) for key in ("position", "rank", "micro_batch")]
    assert re.search(r"(nan|inf)  \S*blocks?\.\d", printed)


def test_finite_losses_are_those_of_the_run(tmp_path: Path, shards_dir: Path, replayed: Callable[..., str]) -> None:
    pipeline = makers.save_tiny_pipeline(tmp_path / "pipeline")
    changes = {"system__batch_size": 4, "system__gradient_accumulation": 2, "experiment__save_every": 4}
    train(options(tmp_path / "run", pipeline, shards_dir, **changes), Poison({4}))
    printed = replayed(tmp_path / "run" / "incidents" / "step=4.skipped.json")
    found = re.search(r"differences up to (\S+), 0 finite in one only", printed)
    assert found is not None and float(found[1]) < 1e-5
    # The gradient was poisoned from outside; the step itself is sound.
    assert "no value of the step is infinite" in printed
    norms = re.findall(r"^ +(\S+)  \S*blocks\.\d", printed, re.MULTILINE)
    assert len(norms) > 5 and all(0 < float(norm) < 100 for norm in norms)


def test_what_config_yaml_does_not_hold_is_given_again(
    tmp_path: Path, pipeline_dir: Path, shards_dir: Path, replayed: Callable[..., str]
) -> None:
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, experiment__save_every=4)
    path = f"dataset.params.path=['pipe:cat {sorted(shards_dir.glob('*.tar'))[0]}']"
    permit = "dataset.params.allow_pipe=true"
    argv = [path if word.startswith("dataset.params.path=") else word for word in argv]
    train([*argv, permit], Poison({4}))
    incident = tmp_path / "run" / "incidents" / "step=4.skipped.json"
    with pytest.raises(UserError, match=r"dataset\.params\.allow_pipe=true"):
        replayed(incident)
    printed = replayed(incident, permit, path)
    assert re.search(r"differences up to \S+, 0 finite in one only", printed)


@pytest.mark.parametrize("content", ["{", "[]", '{"to": 1}', '{"to": null, "at": 3}', "[" * 100_000])
def test_a_damaged_rollback_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "incidents").mkdir()
    path = tmp_path / "incidents" / "step=3.rollback.json"
    path.write_text(content)
    incident = replay_step.Incident(tmp_path, 4, BatchPlan(8, 1, 1, 64), {})
    with pytest.raises(UserError, match=r"step=3\.rollback\.json: is damaged .*; move it away"):
        replay_step.checkpoint_before(incident)


def test_weights_of_another_model_are_a_sentence(exploded: Path, tmp_path: Path, replayed: Callable[..., str]) -> None:
    path = min((exploded / "incidents").glob("*.skipped.json"))
    other = f"model.pretrained={family_makers.save_pipeline('sdxl', tmp_path / 'other')}"
    with pytest.raises(UserError, match="its weights do not fit the model of these options"):
        replayed(path, other)


def test_an_older_checkpoint_is_said_to_be_older(exploded: Path, replayed: Callable[..., str]) -> None:
    path = max((exploded / "incidents").glob("*.skipped.json"))
    step = json.loads(path.read_text())["optimizer_step"]
    (exploded / "checkpoints" / f"step={step}").rename(exploded / "away")
    try:
        printed = replayed(path)
    finally:
        (exploded / "away").rename(exploded / "checkpoints" / f"step={step}")
    assert f"step={step - 1}, 1 optimizer steps older than the step's own" in printed
    assert "against the record" not in printed


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"optimizer_step": 1}', '{"optimizer_step": 1, "batch_plan": {"a": 1}}']
)
def test_a_file_that_is_no_incident_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "incidents").mkdir()
    path = tmp_path / "incidents" / "step=1.skipped.json"
    path.write_text(content)
    with pytest.raises(UserError, match="is no file of a run's incidents"):
        replay_step.read_incident(path)
