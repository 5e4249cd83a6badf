"""A process that is killed between the last checkpoint and its export."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sd_training.callbacks import saves
from tests.integration.training import Interrupted, options, train


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
    whole, killed = (options(tmp_path / run, pipeline_dir, shards_dir, **changes) for run in ("whole", "killed"))
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
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, experiment__num_examples_to_see=32)
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
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, experiment__num_examples_to_see=48)
    with killed_at(monkeypatch, "rotate", call=3):
        train(argv)
    kept = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == ["step=2", "step=4", "step=6"]
    train(argv)
    assert sorted(path.name for path in kept.iterdir()) == ["step=4", "step=6"]
