"""The record of a run: a block of lines at each start; in the run folder `config.yaml` (resolved, without secrets) and
`run.json`."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from sd_training.checkpoint.folder import replace_text
from sd_training.config.changes import CONFIG, RECORD, read_starts
from sd_training.log import get_logger, redacted

log = get_logger(__name__)

_PACKAGES = (
    "torch", "pytorch-lightning", "diffusers", "transformers", "xformers", "webdataset", "omegaconf", "wandb",
    "deepspeed", "pydantic", "pyarrow", "pillow", "numpy", "safetensors", "tokenizers",
)  # fmt: skip
"""Those that can change a run's numbers."""


@dataclass(eq=False)
class RunRecord(pl.Callback):
    """Writes the record when training starts; each start of a resumed run adds an entry. A full disk costs the record
    and not the run: saves decide whether a run that cannot write continues."""

    run_dir: Path
    resolved_config: str
    """YAML without secrets."""
    run_metadata: Callable[[], dict[str, Any]]
    """Further entries for `run.json`, e.g. world size and data fingerprint; called once data is open."""
    banner: Callable[[int], str]
    """The block of lines for a start after so many optimizer steps; called once data is open."""

    def state_dict(self) -> dict[str, str]:
        """The configuration goes with every checkpoint: a run that comes back from a mirror has no `config.yaml`."""
        return {CONFIG: self.resolved_config}

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Rank 0 writes."""
        if not trainer.is_global_zero:
            return
        log.info(self.banner(trainer.global_step))
        versions = {"python": platform.python_version()}
        for name in _PACKAGES:
            with suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
        starts, config = read_starts(self.run_dir / RECORD), self.resolved_config.splitlines()
        last = next((start["config"] for start in reversed(starts) if "config" in start), None)
        entry = {
            "started_unix_s": int(time.time()),
            "first_optimizer_step": trainer.global_step,
            "command": [redacted(word) for word in sys.argv],
            "versions": versions,
            "git_revision": _git_revision(Path(__file__).parent),
            **self.run_metadata(),
            **({} if config == last else {"config": config}),
        }
        for name, text in (
            (CONFIG, self.resolved_config),
            (RECORD, json.dumps({"starts": [*starts, entry]}, indent=2) + "\n"),
        ):
            try:
                replace_text(self.run_dir / name, text)
            except OSError as error:
                path = self.run_dir / name
                log.error(f"{path} cannot be written ({error.strerror}); what an earlier start wrote there stays")


def _git_revision(folder: Path) -> str | None:
    """Commit of the code, `-dirty` when files differ from it; null outside a git checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
