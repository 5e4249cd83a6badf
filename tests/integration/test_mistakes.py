"""Mistakes that only a started run meets: one sentence with the option, status 2, no traceback, nothing lost."""

import shutil
from pathlib import Path

import pytest

from sd_training.build.dry_run import describe
from sd_training.build.plan import make_plan
from sd_training.build.run import build_run
from sd_training.config.load import load_config
from sd_training.errors import ConfigError
from tests import makers
from tests.integration.commands import ROOT, forked
from tests.integration.training import options


def started(argv: list[str], *more: str) -> tuple[int, str]:
    """Status and output of `python -m train`."""
    done = forked("-m", "train", *argv, "trainer.accelerator=cpu", *more, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["experiment.log_dir=/proc/nowhere"], "experiment.log_dir: /proc/nowhere/run cannot be made"),
        (["wandb.mode=online"], "wandb.mode: online, but there is no key; set WANDB_API_KEY, run `wandb login`"),
        (["sampling.num_inference_steps=5000"], "sampling.num_inference_steps: 5000, but the noise schedule has 1000"),
        (["model.pretrained=pyproject.toml"], "model.pretrained: 'pyproject.toml'"),
    ],
)
def test_one_sentence_and_status_2(
    more: list[str], said: str, pipeline_dir: Path, shards_dir: Path, tmp_path: Path
) -> None:
    status, printed = started(options(tmp_path / "run", pipeline_dir, shards_dir), *more)
    assert (status, "Traceback" in printed) == (2, False), printed
    assert said in printed


def test_all_of_a_run_is_where_a_variable_leads(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNS_HERE", str(tmp_path / "scratch"))
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, experiment__num_examples_to_see=16)
    status, printed = started(argv, "experiment.log_dir=$RUNS_HERE/all", "wandb.mode=offline")
    assert status == 0, printed
    names = {path.name for path in (tmp_path / "scratch" / "all" / "run").iterdir()}
    expected = ("checkpoints", "config.yaml", "current_pipeline", "metrics.csv", "run.json", "tensorboard", "wandb")
    assert names >= set(expected)
    assert any((tmp_path / "scratch" / "all" / "run" / "tensorboard").iterdir())
    assert [path for folder in (ROOT, tmp_path) for path in folder.iterdir() if "$" in path.name] == []
    # The options win over WANDB_MODE=disabled of the tests, and of all that W&B would print there is one line.
    (offline,) = (tmp_path / "scratch" / "all" / "run" / "wandb").glob("offline-run-*")
    assert [line[20:] for line in printed.splitlines() if "wandb" in line] == [
        f"W&B: offline; upload with `wandb sync {offline}`"
    ]


def test_a_dry_run_needs_no_writable_folder(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    argv = options(tmp_path / "run", pipeline_dir, shards_dir)
    status, printed = started(argv, "experiment.log_dir=/proc/nowhere", "--dry-run")
    assert status == 0, printed
    assert "run folder    /proc/nowhere/run" in printed


def test_captions_without_a_row_do_not_cost_the_save(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "captions.csv").write_text("uid,caption\n")
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, experiment__num_examples_to_see=16)
    status, printed = started(argv, f"experiment.eval_caption_file={tmp_path / 'captions.csv'}")
    assert status == 0, printed
    assert "has no caption to draw" in printed
    assert (tmp_path / "run" / "checkpoints" / "step=2").is_dir()


def test_a_key_on_the_command_line_is_written_nowhere(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    secret = "0123456789abcdef0123456789abcdef01234567"
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, experiment__num_examples_to_see=16)
    status, printed = started(argv, f"wandb={{api_key: '{secret}', mode: offline}}")
    assert status == 0, printed
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any("wandb" in str(path) for path in files)
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert secret not in printed


def test_mistakes_of_parts_and_data_are_one_report(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    """What is found when parts are made and data is read, by the dry run and by the start of a run."""
    shutil.copytree(pipeline_dir, tmp_path / "broken")
    (tmp_path / "broken" / "text_encoder" / "config.json").write_text("[]")
    (tmp_path / "broken" / "tokenizer").rename(tmp_path / "broken" / "elsewhere")
    bare = [{key: value for key, value in sample.items() if key != "txt"} for sample in makers.caption_samples(4)]
    makers.write_shard(tmp_path / "bare" / "0.tar", bare)
    argv = options(tmp_path / "run", tmp_path / "broken", shards_dir, validation__path=tmp_path / "bare")
    config = load_config([*argv, "dataset.params.filters.original_width='>=9999'"])
    for start in (describe, build_run):
        with pytest.raises(ConfigError) as error:
            start(make_plan(config))
        named = [line.partition(": ")[0] for line in error.value.problems if line[:6] in ("model.", "datase", "valida")]
        parts = ["model.text_encoder.pretrained", "model.tokenizer.pretrained"]
        assert named == [*parts, "dataset.params.path", "validation.path"], error.value.problems
