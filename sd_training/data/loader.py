"""The loader of a run: micro-batches of one rank, from any optimizer step on, and the limits on bad samples."""

import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from sd_training.config.data_schema import DatasetParams
from sd_training.config.plan import BatchPlan, counted
from sd_training.data.order.order import RunOrder, slots
from sd_training.data.problems import Problems, SkippedSample, printable
from sd_training.data.samples.sample import SampleRequest, TrainingSamples, WorkerResult, collate
from sd_training.data.workers import WorkerDeaths, start_worker, worker_context
from sd_training.errors import BadSamplesError
from sd_training.log import get_logger
from sd_training.redaction import redacted_values
from sd_training.types import PixelBatch

log = get_logger(__name__)

BAD_SAMPLES_FILE = "bad_samples.jsonl"
WINDOW = 100_000
"""Samples read over which the share of bad ones is taken."""
MIN_BAD_OF_SHARD = 10
"""Fewer bad samples say nothing about a shard: a tiny one would end the run with its second bad sample."""
_PREFETCHED = 2
"""Micro-batches each loader process reads ahead."""


@dataclass
class TrainingLoader:
    """Iterates over the PixelBatches of one rank.

    `len()` is always the number of micro-batches of the whole run, while iteration starts at the optimizer step that
    `first_step` gives when it begins: a resumed run continues its count.
    """

    dataset: TrainingSamples
    order: RunOrder
    plan: BatchPlan
    rank: int
    workers: int
    """Loader processes; 0 reads in this process."""
    first_step: Callable[[], int]
    bad_samples: "BadSampleLog"
    deaths: WorkerDeaths

    def __len__(self) -> int:
        return self.plan.num_steps * self.plan.accumulation

    def __iter__(self) -> Iterator[PixelBatch]:
        for result in self._results(self.first_step() * self.plan.accumulation):
            self.bad_samples.count(result.were_good, result.skipped)
            if result.error is not None:
                raise result.error
            assert result.batch is not None, "a result has a batch or an error"
            yield result.batch

    def requests(self, first_step: int, num_done: int = 0) -> Iterator[list[SampleRequest]]:
        """What the loader processes are asked for, a list per micro-batch of this rank, from step `first_step`
        to the last; of that step without the first `num_done` micro-batches."""
        for step in range(first_step, self.plan.num_steps):
            bucket, samples, dataset = self.order.at(step)
            first, count = step * self.order.positions_per_step, len(samples)
            factor = count // self.plan.global_batch
            for micro_index in range(num_done if step == first_step else 0, self.plan.accumulation):
                own = slots(micro_index, self.rank, self.plan, factor)
                pairs = zip(own, samples[own.start : own.stop].tolist(), strict=True)
                yield [SampleRequest(first + slot, dataset, sample, bucket, slot, count) for slot, sample in pairs]

    def _results(self, next_micro_batch: int) -> Iterator[WorkerResult]:
        """To the end of the run. Loader processes that die are replaced by new ones, which begin with the micro-batch
        that is waited for."""
        end = len(self)
        while next_micro_batch < end:
            iterator = iter(self._torch_loader(next_micro_batch))
            try:
                while next_micro_batch < end:
                    result = next(iterator)
                    next_micro_batch += 1
                    yield result
            except (RuntimeError, OSError, EOFError) as error:  # of a connection to a process that is gone, as well
                # torch's iterator over loader processes keeps them here; one without has none
                workers = vars(iterator).get("_workers", [])
                self.deaths.explain(workers, next_micro_batch // self.plan.accumulation, error)
            del iterator  # its loader processes end before new ones are made

    def _torch_loader(self, first_micro_batch: int) -> "DataLoader[WorkerResult]":
        first_step, num_done = divmod(first_micro_batch, self.plan.accumulation)
        return DataLoader(
            self.dataset,  # type: ignore[arg-type]  # collate makes a result of the examples
            batch_sampler=self.requests(first_step, num_done),
            num_workers=self.workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            prefetch_factor=_PREFETCHED if self.workers else None,
            worker_init_fn=partial(start_worker, dict(os.environ), os.getpid()) if self.workers else None,
            multiprocessing_context=worker_context() if self.workers else None,
            generator=torch.Generator(),  # else torch's global generator is moved; nothing here draws from either
        )


class BadSampleLog:
    """Names each skipped sample in `run_dir/bad_samples.jsonl`, and ends the run when there are too many.

    Every process of a run counts what it reads itself and names a sample once. A sample counts once, however often it
    is read: a small data set with one bad sample is not a bad data set after a hundred epochs. What the file named at
    the start is not named again; two processes may both name a sample.

    Args:
        run_dir: None keeps the counts only.
        limits: `max_bad_fraction`, `max_bad_in_row` and `max_bad_shard_fraction`.
        shard_sizes: location of a shard → selected samples of it.
    """

    def __init__(self, run_dir: Path | None, limits: DatasetParams, shard_sizes: Callable[[str], int]) -> None:
        self.path = None if run_dir is None else run_dir / BAD_SAMPLES_FILE
        self.limits, self.shard_sizes = limits, cache(shard_sizes)  # a count of the whole index
        self.allowed = int(limits.max_bad_fraction * WINDOW + 1e-6)  # 0.00007 * 100,000 is 6.999999999999999
        self.problems = Problems()
        self.num_read = 0
        self._counted = set[tuple[str, str]]()
        self._recent = deque[int]()  # for each bad sample of the window, how many samples had been read
        self._of_shard = Counter[str]()
        self._in_row = 0
        self._named: set[tuple[str, str]] | None = None

    def report(self, problems: Problems, where: str) -> None:
        """Logs what was found when the shards were indexed, and names it in the file."""
        if problems.total():
            log.warning(f"problems in {where}: {problems.text()}")
        for problem in problems.named():
            self.name(problem)

    def count(self, were_good: Sequence[bool], skipped: Sequence[SkippedSample]) -> None:
        """Counts one micro-batch.

        Args:
            were_good: for each request, in order, whether the requested sample itself could be used.
            skipped: bad samples; several of a request when a replacement was bad, too.

        Raises:
            BadSamplesError: too many samples read by this process were bad.
        """
        self.num_read += sum(were_good) + len(skipped)
        longest = 0
        for was_good in were_good:
            self._in_row = 0 if was_good else self._in_row + 1
            longest = max(longest, self._in_row)
        for problem in skipped:
            if not self._counted:
                named = (printable(part) for part in (problem.shard, problem.key, problem.reason))
                where = self._where("it and all later ones are")
                log.warning("a sample was skipped: %s %s: %s%s", *named, where)
            if (problem.shard, problem.key) not in self._counted:
                self._counted.add((problem.shard, problem.key))
                self.problems.add(problem)
                self._of_shard[problem.shard] += 1
                self._recent.append(self.num_read)
                self.name(problem)
        while self._recent and self._recent[0] <= self.num_read - WINDOW:
            self._recent.popleft()
        if skipped and (broken := self._broken_limit({problem.shard for problem in skipped}, longest)):
            raise BadSamplesError(f"{broken}: {self.problems.text()}{self._where('all are')}")

    def _broken_limit(self, shards: set[str], in_row: int) -> str | None:
        if len(self._recent) > self.allowed:
            option = f"dataset.params.max_bad_fraction={self.limits.max_bad_fraction:g}"
            read = f"{len(self._recent):,} of the last {min(self.num_read, WINDOW):,} samples"
            return f"{read} could not be used; {option} allows {self.allowed:,} of {WINDOW:,}"
        if in_row >= self.limits.max_bad_in_row:
            option = f"dataset.params.max_bad_in_row={self.limits.max_bad_in_row}"
            return f"{counted(in_row, 'sample')} in a row could not be used ({option})"
        for shard in shards:
            bad = self._of_shard[shard]
            if bad >= MIN_BAD_OF_SHARD and bad > self.limits.max_bad_shard_fraction * (size := self.shard_sizes(shard)):
                option = f"dataset.params.max_bad_shard_fraction={self.limits.max_bad_shard_fraction:g}"
                return f"{bad:,} of the {counted(size, 'sample')} of {shard} could not be used ({option})"
        return None

    def _where(self, which: str) -> str:
        return f"; {which} named in {self.path}" if self.path else ""

    def name(self, problem: SkippedSample) -> None:
        """Writes the problem to the file, unless its sample has been named before."""
        if self.path is None:
            return
        entry: dict[str, Any] = redacted_values(problem._asdict())
        sample = (entry["shard"], entry["key"])  # as they are read back
        try:
            if self._named is None:
                self._named = _named_in(self.path)
            if sample not in self._named:
                self._named.add(sample)
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("ab", buffering=0) as file:  # one write, because other processes append too
                    file.write(json.dumps({**entry, "time": round(time.time(), 3)}).encode() + b"\n")
        except OSError as error:  # a full disk is no reason to lose the run that this file only describes
            log.warning("%s cannot be written, bad samples are only counted from now on: %s", self.path, error)
            self.path = None


def _named_in(path: Path) -> set[tuple[str, str]]:
    """The samples that the file names; the line that a crash cut off is ended."""
    named = set[tuple[str, str]]()
    if not path.exists():
        return named
    text = path.read_bytes()
    if text and not text.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    for line in text.decode("utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError):  # of the line that was cut off
            entry = json.loads(line)
            named.add((str(entry["shard"]), str(entry["key"])))
    return named
