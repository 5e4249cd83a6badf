"""Remembers every sample that was skipped, and stops the run when there are too many."""

import json
import os
from pathlib import Path

from sd_training.data.problems import Problems, SkippedSample
from sd_training.errors import DataError
from sd_training.rank_log import get_logger

log = get_logger(__name__)

FILE_NAME = "bad_samples.jsonl"
MIN_READ = 1_000
"""The share of bad samples says nothing before so many were read."""


class BadSampleLog:
    """Counts skipped samples and names each once in `run_dir/bad_samples.jsonl`.

    Several processes append to the file; a line is one write. Lines of earlier starts of the run are not repeated.

    Args:
        run_dir: None keeps the counts only.
        max_bad_fraction: allowed share of bad samples among those read.
    """

    def __init__(self, run_dir: Path | None, max_bad_fraction: float) -> None:
        self.path = None if run_dir is None else run_dir / FILE_NAME
        self.max_bad_fraction = max_bad_fraction
        self.problems = Problems()
        self.num_read = 0
        self._named: set[tuple[str, str]] | None = None

    def name(self, problem: SkippedSample) -> None:
        """Writes the problem down, unless its sample has been named before."""
        if self._named is None:
            self._named = self._earlier_names()
        if (problem.shard, problem.key) in self._named:
            return
        self._named.add((problem.shard, problem.key))
        if self.path is not None:
            line = json.dumps({"shard": problem.shard, "key": problem.key, "reason": problem.reason}) + "\n"
            self._append(self.path, line.encode())

    def count(self, num_delivered: int, skipped: list[SkippedSample]) -> None:
        """Takes note of one micro-batch.

        Raises:
            DataError: more than `max_bad_fraction` of the samples read by this process were bad.
        """
        self.num_read += num_delivered + len(skipped)
        for problem in skipped:
            if not self.problems.total():
                where = f"; it and all later ones are named in {self.path}" if self.path else ""
                log.warning("a sample was skipped: %s %s: %s%s", *problem, where)
            self.problems.add(problem)
            self.name(problem)
        bad = self.problems.total()
        if self.num_read >= MIN_READ and bad > self.max_bad_fraction * self.num_read:
            where = f"; all are named in {self.path}" if self.path else ""
            raise DataError(
                f"{bad:,} of {self.num_read:,} samples could not be used, more than dataset.params.max_bad_fraction "
                f"({self.max_bad_fraction:g}): {self.problems.text()}{where}"
            )

    def _earlier_names(self) -> set[tuple[str, str]]:
        if self.path is None or not self.path.exists():
            return set()
        names = set()
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
                names.add((entry["shard"], entry["key"]))
            except (ValueError, KeyError, TypeError):  # a line cut off by a crash
                continue
        return names

    def _append(self, path: Path, line: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
