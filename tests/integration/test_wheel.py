"""`pip install .` gives commands that train in a folder without the sources."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

from scripts import make_digits
from tests import makers
from tests.integration.commands import ROOT
from tests.integration.training import losses


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git tracks, as in a clone."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(folder / "source")], check=True)
    (path,) = folder.glob("*.whl")
    return path


def test_it_holds_all_that_a_run_needs(wheel: Path) -> None:
    names = {name.partition(".data/data/")[2] or name for name in ZipFile(wheel).namelist()}
    wanted = [path.relative_to(ROOT) for folder in ("sd_training", "scripts") for path in (ROOT / folder).rglob("*.py")]
    wanted += [path.relative_to(ROOT) for path in (ROOT / "sd_training" / "evaluation" / "page").iterdir()]
    wanted += ["share/sd_training" / path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")]
    assert sorted(map(str, wanted)) and {str(path) for path in wanted} <= names
    assert not any(name.startswith("tests") for name in names)


def test_installed_it_trains_the_unet_of_the_quickstart(wheel: Path, tmp_path: Path) -> None:
    """In an environment that has the required packages, and in a folder with data alone."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "required.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", str(wheel)], check=True)
    assert {path.name for path in (environment / "bin").glob("sd-*")} == {"sd-evaluate", "sd-generate", "sd-train"}

    folder = tmp_path / "folder"
    make_digits.write_shards(folder / "data", make_digits.digit_samples(make_digits.real_digits(64)))
    make_digits.write_text_parts(folder / "text")
    makers.tiny_vae().save_pretrained(folder / "vae")
    words = ["config=configs/quickstart_unet.yaml", "experiment.log_dir=.", "experiment.num_examples_to_see=160"]
    words += ["system.batch_size=8", "experiment.save_every=20", "sampling.every=0", "logging.batch_every=0"]
    words += ["dataset.params.path=data", "dataset.params.index_dir=index", "model.vae.pretrained=vae"]
    words += ["model.text_encoder.pretrained=text", "model.tokenizer.pretrained=text", "trainer.accelerator=cpu"]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(environment / "bin" / "sd-train"), *words, "logging.every=1"]
    done = subprocess.run(command, cwd=folder, env=inherited, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(losses(folder / "digits")) == 20 and (folder / "digits" / "report.html").is_file()
