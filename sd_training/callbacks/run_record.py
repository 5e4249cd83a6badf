"""What is run: a block of lines at the start; in the run folder `config.yaml` (resolved, without secrets), `run.json`,
and `configs/` with the configuration of each start that had another one than the start before."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from sd_training.checkpoint.atomic_io import replace_text
from sd_training.log import get_logger
from sd_training.redaction import redacted

log = get_logger(__name__)

CONFIG = "config.yaml"
"""Resolved configuration of the last start that trained, in the run folder."""
RECORD = "run.json"
"""Facts about every start, in the run folder."""
_CONFIGS = "configs"
_MAX_CONFIGS = 100
"""Configurations that are kept: the first one and the newest."""
_PACKAGES = (
    "torch", "pytorch-lightning", "diffusers", "transformers", "xformers", "webdataset", "omegaconf", "wandb",
    "deepspeed", "pydantic", "pyarrow", "pillow", "numpy", "safetensors", "tokenizers",
)  # fmt: skip


def package_versions() -> dict[str, str]:
    """Installed version of every package that can change a run's numbers."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_revision(folder: Path) -> str | None:
    """Commit of the code, `-dirty` when files differ from it; null outside a git checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class RunRecord(pl.Callback):
    """Writes the record when training starts; each start of a resumed run adds an entry. A disk that is full then costs
    the record: the saves are who decides whether a run that cannot write goes on.

    Args:
        run_dir: the run folder.
        resolved_config: YAML without secrets.
        facts: gives further entries for `run.json`, e.g. world size and data fingerprint; asked once data is open.
        banner: gives the block of lines for a start after so many optimizer steps; asked once data is open.
    """

    def __init__(
        self,
        run_dir: Path,
        resolved_config: str,
        facts: Callable[[], dict[str, Any]],
        banner: Callable[[int], str],
    ) -> None:
        self.run_dir = run_dir
        self.banner = banner
        self.resolved_config = resolved_config
        self.facts = facts

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Rank 0 writes."""
        if not trainer.is_global_zero:
            return
        log.info(self.banner(trainer.global_step))
        kept_as = self._keep_config()
        entry = {
            "started_unix_s": int(time.time()),
            "first_optimizer_step": trainer.global_step,
            "config": kept_as,
            "command": [redacted(word) for word in sys.argv],
            "versions": package_versions(),
            "git_revision": git_revision(Path(__file__).parent),
            **self.facts(),
        }
        path = self.run_dir / RECORD
        starts = read_starts(path)
        _replace(path, json.dumps({"starts": [*starts, entry]}, indent=2) + "\n")

    def _keep_config(self) -> str:
        """Writes `config.yaml`, and a numbered copy where it differs from the newest of those; returns that one's
        name."""
        newest, folder = self.run_dir / CONFIG, self.run_dir / _CONFIGS
        try:
            folder.mkdir(exist_ok=True)
            kept = sorted(folder.glob("[0-9][0-9][0-9][0-9]*.yaml"), key=lambda path: int(path.stem))
            if not kept and newest.exists():  # of a version that kept the newest only
                kept = [_copied(newest.read_text(encoding="utf-8"), folder, 1)]
            if not kept or kept[-1].read_text(encoding="utf-8") != self.resolved_config:
                kept.append(_copied(self.resolved_config, folder, int(kept[-1].stem) + 1 if kept else 1))
            for path in kept[1 : 1 - _MAX_CONFIGS]:
                path.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            log.error(f"{folder} cannot be written: {error}")
            kept = []
        _replace(newest, self.resolved_config)
        return f"{_CONFIGS}/{kept[-1].name}" if kept else CONFIG


def _copied(text: str, folder: Path, number: int) -> Path:
    path = folder / f"{number:04d}.yaml"
    replace_text(path, text)
    return path


def _replace(path: Path, text: str) -> None:
    try:
        replace_text(path, text)
    except OSError as error:
        log.error(f"{path} cannot be written ({error.strerror}); what an earlier start wrote there stays")


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Entries of earlier starts; a file that a crash cut short counts as none."""
    try:
        starts = json.loads(path.read_text(encoding="utf-8"))["starts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return starts if isinstance(starts, list) else []
