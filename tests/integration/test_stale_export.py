"""A process that is killed between the last checkpoint and its export, and a folder whose checkpoints are gone."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sd_training.build.plan import Start, find_start, make_mirror, make_plan
from sd_training.callbacks import save as saves
from sd_training.config.load import load_config
from sd_training.errors import ConfigError
from tests.integration.training import CrashAfter, Interrupted, metrics, options, prepare, train, train_in_processes


def weights(run_dir: Path) -> bytes:
    tensors = load_file(run_dir / "current_pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    return b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> Iterator[None]:
    """The run of the block ends like a killed one in a certain call of a function of `saves`; from 1 on."""
    real: Callable[..., None] = getattr(saves, name)
    done = []

    def counted(*arguments: object) -> None:
        done.append(arguments)
        if len(done) == call:
            raise Interrupted
        real(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(saves, name, counted)
        yield


def test_the_same_command_exports_what_was_left_out(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"experiment__num_examples_to_see": 32}
    whole, killed = (
        options(tmp_path / run, pipeline_dir, shards_dir, experiment__save_every=2, **changes)
        for run in ("whole", "killed")
    )
    train(whole)
    with killed_at(monkeypatch, "export_pipeline", call=2):
        train(killed)
    assert (tmp_path / "killed" / "checkpoints" / "step=4").is_dir()
    assert weights(tmp_path / "killed") != weights(tmp_path / "whole")
    train(killed)
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert (tmp_path / "killed" / "exported_step").read_text() == "4\n"


def test_an_older_checkpoint_does_not_replace_a_newer_pipeline(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = options(
        tmp_path / "run", pipeline_dir, shards_dir, experiment__save_every=2, experiment__num_examples_to_see=32
    )
    train(argv)
    newest, exports = weights(tmp_path / "run"), []
    manifest = tmp_path / "run" / "checkpoints" / "step=4" / "MANIFEST.json"
    manifest.write_text("damaged")
    export = saves.export_pipeline

    def watched(*arguments: object) -> None:
        exports.append(arguments)
        export(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(saves, "export_pipeline", watched)
    train(argv)
    assert len(exports) == 1  # that of step 4, done again
    assert weights(tmp_path / "run") == newest


def test_the_same_command_deletes_what_was_left_to_delete(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the last checkpoint and the rotation: nothing is left to train."""
    argv = options(
        tmp_path / "run", pipeline_dir, shards_dir, experiment__save_every=2, experiment__num_examples_to_see=48
    )
    with killed_at(monkeypatch, "rotate", call=3):
        train(argv)
    kept = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == ["step=2", "step=4", "step=6"]
    train(argv)
    assert sorted(path.name for path in kept.iterdir()) == ["step=4", "step=6"]


def found(argv: list[str]) -> Start:
    plan = make_plan(load_config(argv))
    return find_start(plan, make_mirror(plan))


def contents(run_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path
) -> None:
    run_dir, store = tmp_path / "run", tmp_path / "store"
    store.mkdir()
    alone = options(run_dir, pipeline_dir, shards_dir, experiment__save_every=2, experiment__num_examples_to_see=16)
    mirrored = [*alone, f"checkpoint.mirror=file://{store}"]
    assert found(mirrored).sentence() == f"a new run: {run_dir} has no checkpoint"
    train(mirrored)
    assert found(mirrored).is_done and found(alone).source == str(run_dir / "checkpoints" / "step=2")
    shutil.rmtree(run_dir / "checkpoints")
    before = contents(run_dir)
    with pytest.raises(ConfigError) as error:
        prepare(alone)
    for said in (
        str(run_dir),
        "current_pipeline",
        "last save after optimizer step 2",
    ):
        assert said in str(error.value)
    with pytest.raises(ConfigError, match=r"experiment\.requeue: false, but .* already holds a run"):
        prepare([*alone, "experiment.requeue=false"])
    assert contents(run_dir) == before
    assert found(mirrored).step == 2 and found(mirrored).source == f"file://{store}/run/checkpoints/step=2"
    train([*mirrored, "experiment.num_examples_to_see=32"])
    assert [row["optimizer_step"] for row in metrics(run_dir)] == ["1", "2", "3", "4"]
    shutil.rmtree(run_dir / "checkpoints")
    shutil.rmtree(store / "run")
    with pytest.raises(ConfigError, match=f"checkpoints and file://{store}/run/checkpoints hold no checkpoint"):
        prepare(mirrored)


def test_a_checkpoint_that_was_never_exported_counts(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, experiment__save_every=2)
    with killed_at(monkeypatch, "export_pipeline", call=1):
        train(argv)
    assert not (tmp_path / "run" / "current_pipeline").exists()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    said = train_in_processes([*argv, "system.batch_size=4"], 2, status=1)
    assert said.count("holds a run that has trained (last save after optimizer step 2") == 1
    assert "ConfigError" not in said  # no traceback of ours


def test_a_run_that_never_saved_begins_again(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    argv = options(
        tmp_path / "run", pipeline_dir, shards_dir, experiment__save_every=2, experiment__num_examples_to_see=16
    )
    with pytest.raises(Interrupted):
        train(argv, CrashAfter(1))
    assert metrics(tmp_path / "run") and (tmp_path / "run" / "config.yaml").is_file()
    start = found([*argv, "experiment.requeue=false", "model.use_ema=false"])
    assert not start.source and not start.changed
    train(argv)
    assert (tmp_path / "run" / "checkpoints" / "step=2").is_dir()
