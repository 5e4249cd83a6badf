"""Static gates: no code of the project can run what a file, an archive, a model repository or a user's text contains.

Everything is read with `ast`; each rule is also shown snippets that break it. docs/security.md says why each is there.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.test_layers import FILES, IDS, ROOT

CONVERTER = "scripts/convert_checkpoint.py"
"""The one place where a foreign pickle is opened: with `weights_only=True`, in a process without rights."""
WITHOUT_RIGHTS = {
    CONVERTER: "legacy checkpoints of others",
}
"""Files that may call torch.load, always with `weights_only=True`, and what they read."""
IMPORTERS = {
    "sd_training/optim.py": "module names of its own table of optional packages",
}
"""Files that import modules whose names are no literals, and where the names come from."""

UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "asyncio.create_subprocess_shell",
    "os.posix_spawn",
    "os.posix_spawnp",
    "pty.spawn",
    "shutil.unpack_archive",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "tempfile.mktemp",
    "runpy.run_path",
    "code.interact",
    "pandas.read_pickle",
    "torch.hub.load",
    "torch.jit.load",
    "torch.package.PackageImporter",
    "torch.serialization.add_safe_globals",
    "torch.serialization.safe_globals",
    "DataFrame.query",
}
STARTERS = re.compile(r"os\.(?:exec|spawn)[lv]p?e?")
TORCH_LOAD = {"torch.load", "torch.serialization.load"}
NUMPY_LOAD = {"numpy.load", "numpy.lib.npyio.load"}
STAR = {"os", "builtins", "torch", "numpy", "yaml", "subprocess", "shutil", "runpy"}
"""No `from … import *` of these: it says no names."""
USUAL_NAMES = {"np": "numpy", "pd": "pandas"}
"""Short names of modules, also where a snippet does not import them."""
YAML_LOADERS = {"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
OFF_UNLESS_FALSE = ("shell", "allow_pickle", "trust_remote_code")
COMMANDS = {"/bin/sh", "sh", "bash", "/bin/bash"}
SHELL_BY_PERMISSION = "sd_training/data/storage/files.py"
"""Runs `pipe:` entries, which `dataset.params.allow_pipe=true` on the command line allows."""

SCRIPT_BY_PERMISSION = ("scripts/bench_peers.py", "runpy.run_path")
"""Runs the training script that its command line names, as `python` would."""


def problems(source: str, path: str = "sd_training/data/index/store.py") -> list[str]:
    """What a file of the project may not do, with the line."""
    found = []
    tree = ast.parse(source)
    meant = _meanings(tree)
    for node in ast.walk(tree):
        names: Iterator[str] = iter(())
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = _imports(node)
        elif isinstance(node, ast.Call):
            names = (name for name in _calls(node, path, meant) if (path, name) != SCRIPT_BY_PERMISSION)
        elif isinstance(node, ast.Constant) and node.value in COMMANDS and path != SHELL_BY_PERMISSION:
            names = iter([f"the shell {node.value!r}"])
        found += [f"line {getattr(node, 'lineno', 0)}: {name}" for name in names]
    return found


def _meanings(tree: ast.AST) -> dict[str, str]:
    """Name in this file → what it is a name for, as `import … as` and `from … import` say."""
    meant = dict(USUAL_NAMES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            meant |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            meant |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return meant


def _full_name(called: str, meant: Mapping[str, str]) -> str:
    """`t.load` as `torch.load`, `builtins.eval` as `eval`."""
    first, dot, rest = called.partition(".")
    return f"{meant.get(first, first)}{dot}{rest}".removeprefix("builtins.")


def _is_forbidden(name: str) -> bool:
    """Whether nothing may call this, whatever it is given."""
    holder, _, method = name.rpartition(".")
    is_yaml = holder in ("yaml", "ruamel.yaml") and method in YAML_LOADERS
    return name in FORBIDDEN_CALLS or method == "read_pickle" or is_yaml or STARTERS.fullmatch(name) is not None


def _imports(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    yield from (f"import {name}" for name in names if name.split(".")[0] in UNPICKLING)
    if isinstance(node, ast.ImportFrom):  # `from os import system` could be handed on without a call
        full = [f"{node.module}.{alias.name}".removeprefix("builtins.") for alias in node.names]
        yield from (f"import of {name}" for name in full if _is_forbidden(name) or name in TORCH_LOAD | NUMPY_LOAD)
        yield from (f"import of {name}" for name in full if name.rpartition(".")[2] in OBJECT_COLLECTIVES)
        yield from (f"import of {name}" for name in full if name.endswith(".*") and name.split(".")[0] in STAR)


def _calls(call: ast.Call, path: str, meant: Mapping[str, str]) -> Iterator[str]:
    called = _full_name(ast.unparse(call.func), meant)
    holder, _, method = called.rpartition(".")
    given = _given(call)
    if _is_forbidden(called):
        yield called
    if called in TORCH_LOAD and not (path in WITHOUT_RIGHTS and given.get("weights_only") == "True"):
        yield f"torch.load outside of {CONVERTER}, or without weights_only=True"
    if called in NUMPY_LOAD and given.get("allow_pickle") != "False":
        yield "np.load without allow_pickle=False"
    if method in ("extractall", "extract") and holder:
        yield f"{method} of an archive"
    if (
        method in ("import_module", "run_module")
        and path not in IMPORTERS
        and not all(isinstance(a, ast.Constant) for a in call.args)
    ):
        yield "import of a module whose name is no literal"
    yield from (f"{name}={given[name]}" for name in OFF_UNLESS_FALSE if given.get(name, "False") != "False")
    yield from _settings(called, given)
    yield from _messages(call)


def _given(call: ast.Call) -> dict[str | None, str]:
    """Keyword → value, also of `**{'keyword': value}`."""
    given: dict[str | None, str] = {}
    for keyword in call.keywords:
        if keyword.arg is None and isinstance(keyword.value, ast.Dict):
            pairs = zip(keyword.value.keys, keyword.value.values, strict=True)
            given |= {key.value: ast.unparse(value) for key, value in pairs if isinstance(key, ast.Constant)}
        else:
            given[keyword.arg] = ast.unparse(keyword.value)
    return given


def _settings(called: str, given: Mapping[str | None, str]) -> Iterator[str]:
    """Loaders of model repositories take safetensors, and are told so where they could take something else."""
    if called.endswith(".from_pretrained") and given.get("use_safetensors", "True") != "True":
        yield "from_pretrained without use_safetensors=True"
    if given.get("weights_only", "True") not in ("True", "None", "weights_only"):
        yield f"weights_only={given['weights_only']}"
    if "custom_pipeline" in given:
        yield "custom_pipeline"


def _messages(call: ast.Call) -> Iterator[str]:
    """Collectives that pickle: torch's object collectives, and `Strategy.broadcast`, which is one of them."""
    called = ast.unparse(call.func)
    holder, _, method = called.rpartition(".")
    is_strategy = method == "broadcast" and holder.split(".")[-1] in ("self", "strategy")
    if method in OBJECT_COLLECTIVES or is_strategy:
        yield f"{called} pickles"


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_nothing_unsafe(path: Path) -> None:
    assert problems(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import os, cloudpickle as c",
        "import joblib",
        "def f():\n    import marshal",
        "from os import system",
        "importlib.import_module(name)",
        "from torch import load",
        "from numpy import load",
        "eval(text)",
        "exec(text)",
        "compile(text, 'x', 'exec')",
        "__import__(name)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "yaml.full_load(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=True)",
        "torch.hub.load(repo, name)",
        "pd.read_pickle(path)",
        "frame.read_pickle(path)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=flag)",
        "subprocess.run(['bash', '-c', text])",
        "subprocess.getoutput(text)",
        "archive.extractall(folder)",
        "archive.extract(member)",
        "tarfile.open(path).extractall()",
        "np.load(path, allow_pickle=True)",
        "np.load(path)",
        "numpy.load(path, mmap_mode='r')",
        "os.system(text)",
        "os.popen(text)",
        "tempfile.mktemp()",
        "cls.from_pretrained(x, trust_remote_code=True)",
        "cls.from_pretrained(x, trust_remote_code=flag)",
        "cls.from_pretrained(x, use_safetensors=False)",
        "cls.from_pretrained(x, custom_pipeline='y')",
        "trainer.fit(m, weights_only=False)",
        "distributed.all_gather_object(found, mine)",
        "dist.broadcast_object_list(found)",
        "from torch.distributed import all_gather_object",
        "self.broadcast(value)",
        "trainer.strategy.broadcast(value)",
        "import torch as t; t.load(p)",
        "import torch as t\ndef f():\n    return t.load(p, weights_only=True)",
        "torch.serialization.load(p)",
        "from torch import serialization as s; s.load(p)",
        "import torch.hub as h; h.load(repo, name)",
        "torch.serialization.add_safe_globals([x])",
        "from torch.serialization import add_safe_globals",
        "from yaml import unsafe_load",
        "import yaml as y; y.load(text, Loader=l)",
        "import numpy as n; n.load(p, allow_pickle=True)",
        "import pandas as frames; frames.read_pickle(p)",
        "builtins.eval(text)",
        "from builtins import exec",
        "from builtins import eval as e; e(text)",
        "from os import *",
        "import os as o; o.system(text)",
        "shutil.unpack_archive(p)",
        "from shutil import unpack_archive",
        "os.execve(p, [], {})",
        "os.execvpe(p, [], {})",
        "os.spawnvpe(mode, p, [], {})",
        "os.posix_spawn(p, [], {})",
        "asyncio.create_subprocess_shell(text)",
        "from asyncio import create_subprocess_shell as c; c(text)",
        "run(words, **{'shell': True})",
        "runpy.run_module(name)",
        "from importlib import import_module as i; i(name)",
    ],
)
def test_what_a_gate_is_for_is_found(source: str) -> None:
    assert problems(source)


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "re.compile(text)",
        "torch.compile(module)",
        "yaml.safe_load(text)",
        "run(words)",
        "np.load(path, allow_pickle=False)",
        "distributed.broadcast(tensor, src=0)",
        "cls.from_pretrained(x, trust_remote_code=False, use_safetensors=True)",
        "subprocess.run(['git', 'describe'])",
        "importlib.import_module('transformers.optimization')",
        "from json import load; load(file)",
        "from re import compile; compile(text)",
        "import torch as t; t.compile(module)",
        "from yaml import safe_load; safe_load(text)",
        "import numpy as n; n.load(p, allow_pickle=False)",
        "run(words, **{'shell': False}, **more)",
        "from .serialization import load; load(p)",
    ],
)
def test_what_is_allowed_passes(source: str) -> None:
    assert problems(source) == []


def test_the_converter_may_open_a_pickle_without_rights_only() -> None:
    assert problems("torch.load(path, weights_only=True)", CONVERTER) == []
    assert problems("torch.load(path, weights_only=flag)", CONVERTER)
    assert problems("torch.load(path)", CONVERTER)


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    """pytest does not look into folders of some names unless it is told to: `build` is one."""
    skipped = pytestconfig.getini("norecursedirs")
    parts = {part for path in (ROOT / "tests").rglob("test_*.py") for part in path.relative_to(ROOT).parts[:-1]}
    assert [part for part in parts if any(fnmatch(part, pattern) for pattern in skipped)] == []
