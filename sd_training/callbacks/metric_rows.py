"""metrics.csv: rows that survive kills and full disks."""

import csv
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from sd_training.checkpoint.durable import replace_text
from sd_training.checkpoint.writer import UNFENCED, Fence
from sd_training.config.batch_plan import counted
from sd_training.errors import TakenOverError
from sd_training.rank_log import get_logger

log = get_logger(__name__)

_MAX_WAITING = 10_000
"""Rows kept in memory while they cannot be written; then the oldest are lost [count]."""


class MetricRows:
    """A CSV file that rows are added to. No method raises for what the disk does: training is worth more than a row.

    Args:
        path: the file.
        columns: names of the columns; the first one counts optimizer steps.
        fence: of this start of the run: rows are the owner's, too.
    """

    def __init__(self, path: Path, columns: Sequence[str], fence: Fence = UNFENCED) -> None:
        self.path = path
        self.columns = columns
        self.fence = fence
        self._waiting: list[dict[str, str]] = []

    def keep_until(self, step: int) -> None:
        """Drops rows after `step` and what a kill cut short; the file is replaced at once or not at all."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self.path, self._text(self._whole_rows(step)))
        except OSError as error:
            log.error(f"{self.path} is not tidied: {error.strerror}")

    def has(self, step: int) -> bool:
        """Whether there is a row of this step."""
        try:
            return any(int(row[self.columns[0]]) == step for row in self._whole_rows(step))
        except OSError as error:
            log.error(f"{self.path} cannot be read: {error.strerror}")
            return False

    def last_step(self) -> int:
        """Optimizer step of the last whole row; 0 where there is none."""
        try:
            return max((int(row[self.columns[0]]) for row in self._whole_rows(sys.maxsize)), default=0)
        except OSError:
            return 0

    def add(self, *rows: Mapping[str, str]) -> None:
        """Appends rows at once, and those that could not be written before them."""
        self._waiting = [*self._waiting, *map(dict, rows)][-_MAX_WAITING:]
        try:
            self.fence.check()
            self._append(self._text(self._waiting, has_header=False))
        except TakenOverError:
            return  # the next save ends this process, on all ranks
        except OSError as error:
            if len(self._waiting) == len(rows):
                log.error(f"{self.path} cannot be written ({error.strerror}); its rows wait in memory")
            return
        if len(self._waiting) > len(rows):
            log.info(f"{self.path} can be written again: {counted(len(self._waiting), 'row')} added")
        self._waiting.clear()

    def _append(self, text: str) -> None:
        """All of it or nothing: a full disk takes the first part of a row."""
        with self.path.open("ab", buffering=0) as stream:
            size = stream.seek(0, os.SEEK_END)
            try:
                data = text.encode()
                while data:
                    data = data[stream.write(data) :]
            except OSError:
                stream.truncate(size)
                raise

    def _whole_rows(self, step: int) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n") and "\0" not in line]
        rows = [row for row in csv.DictReader(whole) if None not in row and None not in row.values()]
        return [row for row in rows if row.get(self.columns[0], "").isdigit() and int(row[self.columns[0]]) <= step]

    def _text(self, rows: Sequence[Mapping[str, str]], has_header: bool = True) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, extrasaction="ignore")
        if has_header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()
