"""The package starts without the packages that are optional: each process here cannot find some of them."""

import subprocess
import sys
from pathlib import Path

from tests.integration.training import options
from tests.test_layers import ROOT, product_files

OPTIONAL = [
    "bitsandbytes",
    "boto3",
    "datasets",
    "deepspeed",
    "lion_pytorch",
    "prodigyopt",
    "sklearn",
    "torchao",
    "torchvision",
    "wandb",
    "xformers",
]
REQUIRED = ["diffusers", "peft", "pytorch_lightning", "torch", "transformers"]

_HIDE = """
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)

HIDDEN = set(sys.argv.pop(1).split(","))
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
assert not [name for name in HIDDEN if find_spec(name)]
"""


def without(names: list[str], code: str, *words: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """A Python process that cannot find these packages."""
    command = [sys.executable, "-c", f"{_HIDE}\nsys.path.insert(0, {str(ROOT)!r})\n{code}", ",".join(names), *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)


def test_everything_can_be_imported() -> None:
    """The modules of the package and the scripts; one process, because most of the time is torch's."""
    files = [path.relative_to(ROOT).with_suffix("") for path in product_files() if path.name != "__init__.py"]
    code = "from importlib import import_module\nfor name in sys.argv[1:]: import_module(name)"
    done = without(OPTIONAL, code, *(".".join(path.parts) for path in files))
    assert done.returncode == 0, done.stderr
    assert len(files) > 100


def test_help_needs_none_of_the_required_ones_either() -> None:
    done = without([*OPTIONAL, *REQUIRED], "import sd_training, train\ntrain.command()", "--help")
    assert done.returncode == 0, done.stderr
    assert "config=" in done.stdout


def test_an_option_that_needs_one_names_it(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    words = options(tmp_path, pipeline_dir, shards_dir, distributed__strategy="deepspeed_2")
    done = without(OPTIONAL, "import train\ntrain.command()", *words, "--dry-run", cwd=tmp_path)
    assert done.returncode == 2 and "pip install deepspeed, or use fsdp" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
