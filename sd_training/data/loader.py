"""The loader of a run: micro-batches of one rank, from any optimizer step on, and the limits on bad samples."""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from sd_training.config.plan import BatchPlan
from sd_training.data.order.order import RunOrder
from sd_training.data.problems import Problems, SkippedSample, printable
from sd_training.data.samples.sample import SampleRequest, TrainingSamples, WorkerResult, collate
from sd_training.data.workers import WorkerDeaths, start_worker, worker_context
from sd_training.errors import BadSamplesError
from sd_training.log import get_logger, redacted_values
from sd_training.types import PixelBatch

log = get_logger(__name__)

BAD_SAMPLES_FILE = "bad_samples.jsonl"
WINDOW = 100_000
"""Samples read over which the share of bad ones is taken."""
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
            self.bad_samples.count(self.plan.micro_batch, result.skipped)
            if result.error is not None:
                raise result.error
            assert result.batch is not None, "a result has a batch or an error"
            yield result.batch

    def requests(self, first_step: int, num_done: int = 0) -> Iterator[list[SampleRequest]]:
        """What the loader processes are asked for, a list per micro-batch of this rank, from step `first_step`
        to the last; of that step without the first `num_done` micro-batches."""
        size = self.plan.micro_batch
        for step in range(first_step, self.plan.num_steps):
            bucket, samples, dataset = self.order.at(step)
            for micro_index in range(num_done if step == first_step else 0, self.plan.accumulation):
                # A rank reads neighbouring slots, those of its shard streams, whatever its accumulation is.
                slot = (self.rank * self.plan.accumulation + micro_index) * size
                position = step * self.plan.global_batch + slot
                own = enumerate(samples[slot : slot + size].tolist(), start=position)
                yield [SampleRequest(position, dataset, sample, bucket) for position, sample in own]

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

    Every process of a run counts what it reads itself. A sample counts once, however often it is read: a small data set
    with one bad sample is not a bad data set after a hundred epochs. What the file named at the start is not named
    again; two processes may both name a sample.

    Args:
        run_dir: None keeps the counts only.
        max_fraction: `dataset.params.max_bad_fraction`.
    """

    def __init__(self, run_dir: Path | None, max_fraction: float) -> None:
        self.path = None if run_dir is None else run_dir / BAD_SAMPLES_FILE
        self.max_fraction = max_fraction
        self.allowed = int(max_fraction * WINDOW + 1e-6)  # 0.00007 * 100,000 is 6.999999999999999
        self.problems = Problems()
        self.num_read = 0
        self._counted = set[tuple[str, str]]()
        self._recent = deque[int]()  # for each bad sample of the window, how many samples had been read
        self._named: set[tuple[str, str]] | None = None

    def report(self, problems: Problems, where: str) -> None:
        """Logs what was found when the shards were indexed, and names it in the file."""
        if problems.total():
            log.warning(f"problems in {where}: {problems.text()}")
        for problem in problems.named():
            self.name(problem)

    def count(self, num_good: int, skipped: Sequence[SkippedSample]) -> None:
        """Counts one micro-batch.

        Raises:
            BadSamplesError: too many samples read by this process were bad.
        """
        self.num_read += num_good + len(skipped)
        for problem in skipped:
            if not self._counted:
                shard, key, reason = (printable(part) for part in problem[:3])
                where = f"; it and all later ones are named in {self.path}" if self.path else ""
                log.warning(f"a sample was skipped: {shard} {key}: {reason}{where}")
            if (problem.shard, problem.key) not in self._counted:
                self._counted.add((problem.shard, problem.key))
                self.problems.add(problem)
                self._recent.append(self.num_read)
                self.name(problem)
        while self._recent and self._recent[0] <= self.num_read - WINDOW:
            self._recent.popleft()
        if len(self._recent) > self.allowed:
            where = f"; all are named in {self.path}" if self.path else ""
            raise BadSamplesError(
                f"{len(self._recent):,} of the last {min(self.num_read, WINDOW):,} samples could not be used; "
                f"dataset.params.max_bad_fraction={self.max_fraction:g} allows {self.allowed:,} of {WINDOW:,}: "
                f"{self.problems.text()}{where}"
            )

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
    """The samples that the file names."""
    named = set[tuple[str, str]]()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError, KeyError, TypeError):  # of a line that a crash cut off
            entry = json.loads(line)
            named.add((str(entry["shard"]), str(entry["key"])))
    return named
