"""`incidents/` in the run folder: one JSON file per event of a run that a person should look at.

Keys of samples are hostile text, and numbers may be infinite; here everything becomes short, printable JSON.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sd_training.callbacks.run_record import package_versions
from sd_training.checkpoint.atomic_io import replace_text
from sd_training.data.problems import printable
from sd_training.log import get_logger
from sd_training.redaction import HIDDEN, is_secret, redacted

log = get_logger(__name__)

FOLDER = "incidents"
MAX_FILES = 1000
"""Of a run; a run with more has one and the same trouble."""
MAX_ITEMS = 1024
"""Of a list or table."""
MAX_TEXT = 300
"""Characters of a text."""


class Incidents:
    """Writes the files; one process of a run calls it. The same event again, after a resume, gives the same file.

    Args:
        folder: the run's `incidents/`.
        facts: gives further entries that every file of the run has; asked when one is written.
    """

    def __init__(self, folder: Path, facts: Callable[[], Mapping[str, Any]] = dict) -> None:
        self.folder, self.facts = folder, facts
        self._num_files: int | None = None
        self._can_write = True

    def path(self, step: int, kind: str) -> Path:
        """Where an incident is described.

        Args:
            step: optimizer steps completed before the one that is meant.
            kind: `skipped`, `spike`, `rollback` or `replicas`.
        """
        return self.folder / f"step={step}.{kind}.json"

    def write(self, step: int, kind: str, facts: Mapping[str, Any]) -> None:
        """Describes an incident. A full disk is no reason to lose the run that is described."""
        entry = {"kind": kind, "optimizer_step": step, "time_unix_s": int(time.time()), **facts, **self.facts()}
        path = self.path(step, kind)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._has_room(path):
                text = json.dumps(plain(entry | {"versions": package_versions()}), indent=1, allow_nan=False)
                replace_text(path, text + "\n")
        except OSError as error:
            if self._can_write:
                log.warning(f"{path} cannot be written, incidents are only logged from now on: {error}")
            self._can_write = False

    def _has_room(self, path: Path) -> bool:
        if self._num_files is None:
            self._num_files = sum(1 for _ in self.folder.glob("step=*.json"))
        if path.exists():
            return True
        self._num_files += 1
        if self._num_files == MAX_FILES + 1:
            log.warning(f"{self.folder} holds {MAX_FILES:,} incidents; further ones are only logged")
        return self._num_files <= MAX_FILES


def plain(value: Any) -> Any:
    """`value` as short JSON that any terminal shows, without secrets: what JSON has no word for becomes text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        pairs = list(value.items())[:MAX_ITEMS]
        return {_shown(key): HIDDEN if is_secret(key, item) else plain(item) for key, item in pairs}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value[:MAX_ITEMS]]
    return _shown(value)


def _shown(value: Any) -> str:
    return printable(redacted(str(value)), MAX_TEXT)
