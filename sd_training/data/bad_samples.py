"""Remembers every sample that was skipped, and stops the run when there are too many."""

import fcntl
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sd_training.config.batch_plan import counted
from sd_training.data.problems import Problems, SkippedSample, printable
from sd_training.errors import BadSamplesError
from sd_training.rank_log import get_logger
from sd_training.redaction import redacted_values

log = get_logger(__name__)

FILE_NAME = "bad_samples.jsonl"
WINDOW = 100_000
"""Samples read over which the share of bad ones is taken."""
MIN_BAD_OF_SHARD = 10
"""Fewer bad samples say nothing about a shard: a tiny one would end the run with its second bad sample."""


class BadSampleLog:
    """Names each skipped sample once in `run_dir/bad_samples.jsonl`, and knows when it is too much.

    Every process of a run counts what it reads itself. A sample counts once, however often it is visited: a small data
    set with one bad sample is not a bad data set after a hundred epochs. Several processes append to the file, each
    line in one write, and none repeats what another one, or an earlier start of the run, has named.

    Args:
        run_dir: None keeps the counts only.
        max_bad_fraction: allowed share of bad samples in the last 100,000 read.
        max_bad_in_row: the run stops when at so many visits in a row the sample whose turn it was could not be used.
        max_bad_shard_fraction: allowed share of bad samples in one shard.
        shard_sizes: location of a shard → samples of it that take part.
    """

    def __init__(
        self,
        run_dir: Path | None,
        *,
        max_bad_fraction: float,
        max_bad_in_row: int,
        max_bad_shard_fraction: float,
        shard_sizes: Callable[[str], int],
    ) -> None:
        self.path = None if run_dir is None else run_dir / FILE_NAME
        self.max_bad_fraction, self.max_bad_in_row = max_bad_fraction, max_bad_in_row
        self.allowed = int(max_bad_fraction * WINDOW + 1e-6)  # 0.00007 * 100,000 is 6.999999999999999
        self.max_bad_shard_fraction, self.shard_sizes = max_bad_shard_fraction, shard_sizes
        self.problems = Problems()
        self.num_read = 0
        self._counted = set[tuple[str, str]]()
        self._recent = deque[int]()  # for each bad sample of the window, how many samples had been read
        self._of_shard = Counter[str]()
        self._in_row = 0
        self._named = set[tuple[str, str]]()
        self._num_bytes_known = 0  # of the file: what `_named` holds
        self._can_write = True

    def report(self, problems: Problems, where: str) -> None:
        """Says what was found when the shards were indexed, and names it."""
        if problems.total():
            log.warning(f"problems in {where}: {problems.text()}")
        for problem in problems.named():
            self.name(problem)

    def name(self, problem: SkippedSample) -> None:
        """Writes the problem down, unless its sample has been named before."""
        if self.path is None or not self._can_write:
            return
        entry: dict[str, Any] = redacted_values(problem._asdict())
        sample = (entry["shard"], entry["key"])  # as they are read back
        if sample in self._named:
            return
        self._named.add(sample)
        try:
            self._append(self.path, sample, json.dumps({**entry, "time": round(time.time(), 3)}))
        except OSError as error:  # a full disk is no reason to lose the run that this file only describes
            self._can_write = False
            log.warning("%s cannot be written, bad samples are only counted from now on: %s", self.path, error)

    def count(self, were_good: Sequence[bool], skipped: Sequence[SkippedSample]) -> None:
        """Takes note of one micro-batch.

        Args:
            were_good: for each visit, in order, whether the sample whose turn it was could be used.
            skipped: what could not; several of a visit when a replacement was bad, too.

        Raises:
            BadSamplesError: too many samples read by this process were bad.
        """
        self.num_read += sum(were_good) + len(skipped)
        longest = 0
        for was_good in were_good:
            self._in_row = 0 if was_good else self._in_row + 1
            longest = max(longest, self._in_row)
        for problem in skipped:
            self._count_one(problem)
        while self._recent and self._recent[0] <= self.num_read - WINDOW:
            self._recent.popleft()
        if skipped:
            self._check(skipped, longest)

    def _count_one(self, problem: SkippedSample) -> None:
        if not self._counted:
            where = self._named_in("it and all later ones are")
            named = (printable(part) for part in (problem.shard, problem.key, problem.reason))
            log.warning("a sample was skipped: %s %s: %s%s", *named, where)
        if (problem.shard, problem.key) in self._counted:
            return
        self._counted.add((problem.shard, problem.key))
        self.problems.add(problem)
        self._of_shard[problem.shard] += 1
        self._recent.append(self.num_read)
        self.name(problem)

    def _check(self, skipped: Sequence[SkippedSample], in_row: int) -> None:
        if len(self._recent) > self.allowed:
            self._stop(
                f"{len(self._recent):,} of the last {min(self.num_read, WINDOW):,} samples could not be used; "
                f"dataset.params.max_bad_fraction={self.max_bad_fraction:g} allows "
                f"{self.allowed:,} of {WINDOW:,}"
            )
        if in_row >= self.max_bad_in_row:
            self._stop(
                f"{counted(in_row, 'sample')} in a row could not be used "
                f"(dataset.params.max_bad_in_row={self.max_bad_in_row})"
            )
        for shard in {problem.shard for problem in skipped}:
            bad, size = self._of_shard[shard], self.shard_sizes(shard)
            if bad >= MIN_BAD_OF_SHARD and bad > self.max_bad_shard_fraction * size:
                self._stop(
                    f"{bad:,} of the {size:,} samples of {shard} could not be used "
                    f"(dataset.params.max_bad_shard_fraction={self.max_bad_shard_fraction:g})"
                )

    def _stop(self, what: str) -> None:
        raise BadSamplesError(f"{what}: {self.problems.text()}{self._named_in('all are')}")

    def _named_in(self, which: str) -> str:
        return f"; {which} named in {self.path}" if self.path and self._can_write else ""

    def _append(self, path: Path, sample: tuple[str, str], line: str) -> None:
        """Adds the line, unless another process has named the sample since this one looked."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor)
            start, size = self._num_bytes_known, os.fstat(descriptor).st_size
            start = start if start <= size else 0  # somebody began a new file
            new = os.pread(descriptor, size - start, start)
            complete = new[: new.rfind(b"\n") + 1]
            named = set(_names(complete))
            self._named |= named
            self._num_bytes_known = start + len(complete)
            if sample not in named:
                separator = b"\n" if len(complete) < len(new) else b""  # a line cut by a crash: not to be glued to it
                written = os.write(descriptor, separator + line.encode() + b"\n")
                self._num_bytes_known = start + len(new) + written
        finally:
            os.close(descriptor)  # which also unlocks


def _lock(descriptor: int) -> None:
    """Waits a second at most: file systems without locks, and holders that hang, cost a repeated line, not the run."""
    for _ in range(20):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            return


def _names(lines: bytes) -> Iterator[tuple[str, str]]:
    for line in lines.decode("utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            yield str(entry["shard"]), str(entry["key"])
        except (ValueError, KeyError, TypeError):  # a line cut off by a crash
            continue
