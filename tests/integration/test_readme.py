"""The README's commands are run as they stand, in a folder of their own, with tiny data and a tiny pipeline in place
of what they name. Only what needs a network, a cluster or this very test suite is left out. Those of one process are
forked; that a new interpreter finds all it imports is shown by torchrun here, and by test_scripts.py."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import makers
from tests.integration.commands import forked
from tests.integration.training import options

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("make quickstart", "make test", "download_diffusers.py", "sbatch ", "config=…")
# Overrides that make the command small; they are added, nothing of the command is changed.
SMALL = (
    "dataset.params.resolution=16 system.batch_size=4 system.gradient_accumulation=2 system.workers=0 "
    "trainer.accelerator=cpu"
)
SMALL_TRAIN = f"{SMALL} experiment.save_every=4 lr_scheduler.params.warmup_length=1 logging.progress_bar=false"


def commands() -> list[str]:
    """Every line of a code block without a language, joined where it goes on, without its comment."""
    blocks = (ROOT / "README.md").read_text(encoding="utf-8").split("```")[1::2]
    lines = "\n".join(block for block in blocks if block.startswith("\n")).replace("\\\n", " ").splitlines()
    typed = [line.partition("  #")[0].strip() for line in lines]
    return [" ".join(line.split()) for line in typed if line]


def snippet() -> str:
    """The Python block."""
    blocks = (ROOT / "README.md").read_text(encoding="utf-8").split("```")[1::2]
    (block,) = [block.removeprefix("python\n") for block in blocks if block.startswith("python\n")]
    return block


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has: the project, a folder of images, a downloaded pipeline, prompts."""
    root = tmp_path_factory.mktemp("user")
    for name in ("train.py", "scripts", "configs", "sd_training"):
        (root / name).symlink_to(ROOT / name)
    (root / "FOLDER").mkdir()
    for number in range(16):
        (root / "FOLDER" / f"{number}.jpg").write_bytes(makers.encode(makers.picture(number, 40, 32)))
        (root / "FOLDER" / f"{number}.txt").write_text("a red picture")
    makers.save_tiny_pipeline(root / "models" / "sd2")
    (root / "prompts.txt").write_text("a red picture\n")
    return root


def typed(folder: Path, command: str) -> "subprocess.CompletedProcess[str]":
    _, *words = shlex.split(command)
    return forked(*words, cwd=folder)


def test_every_command_runs_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    ran = []
    for command in commands():
        if any(part in command for part in LEFT_OUT):
            continue
        assert command.startswith("python "), command
        ran.append(command)
        done = typed(folder, f"{command} {SMALL}" if "train.py" in command else command)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        if "--dry-run" in command:
            train = f"{command.replace(' --dry-run', '')} {SMALL_TRAIN} experiment.num_examples_to_see=16"
            done = typed(folder, train)
            assert done.returncode == 0, f"{train}\n{done.stderr}"
            shutil.copytree(folder / "cache", folder / "cache_kept")  # the index is used again, not made anew
    assert len(ran) == 4
    assert (folder / "logs/finetuning/checkpoints/step=2").is_dir()
    trained = yaml.safe_load((folder / "logs/finetuning/config.yaml").read_text())
    assert (trained["optimizer"]["params"]["learning_rate"], trained["objective"]["snr_gamma"]) == (1e-5, 5.0)
    assert list((folder / "pictures").rglob("*.png")) and (folder / "card" / "README.md").is_file()


def test_torchrun_from_another_folder(folder: Path, shards_dir: Path, tmp_path: Path) -> None:
    """The README's form for other folders, where `-m train` finds no module; loader processes find the package too."""
    (line,) = [command for command in commands() if "/path/to/train.py" in command]
    argv = options(tmp_path / "run", folder / "models" / "sd2", shards_dir, experiment__num_examples_to_see=16)
    small = ["system.batch_size=4", "system.workers=1", "trainer.accelerator=cpu"]
    words = line.replace("/path/to/train.py", str(ROOT / "train.py")).replace(
        "--nproc_per_node 8", "--nproc_per_node 2"
    )
    words = words.replace("config=…", " ".join([*argv, *small])).split()
    assert words.pop(0) == "torchrun"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "current_pipeline" / "model_index.json").is_file()


def test_the_python_block_runs_on_what_the_run_left(folder: Path) -> None:
    small = snippet().replace('horse")', 'horse", height=16, width=16, num_inference_steps=2)')
    assert small != snippet()
    (folder / "snippet.py").write_text(small)
    done = forked("snippet.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "astronaut.png").stat().st_size > 100
