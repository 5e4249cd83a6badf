"""The loader of a run: micro-batches of one rank, from any optimizer step on; the limits on bad samples; and the loader
processes: how they start, which signals they handle, and how a dead one is replaced.

They are forked from a small server process, never from the training process. A child of the training process would keep
a copy of its memory alive: weights, optimizer and EMA are written in place at the next step, so every page of them
would exist twice (measured: resuming a UNet of 860 million parameters on a CPU took 10 GiB more, and was killed). It
would also inherit the locks of the threads that CUDA, NCCL and remote storage run, in any state.

SLURM and a terminal send their signals to every process of a run. The server, and the loader processes after it, are
started with these blocked: they must continue until the training process has saved.
"""

import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from sd_training.config.plan import BatchPlan
from sd_training.data.encoded import EXIT_STATUS_S, EncoderProcesses
from sd_training.data.order.order import RunOrder
from sd_training.data.samples.sample import BLOCKS, PREFETCHED, SampleRequest, TrainingSamples, WorkerResult
from sd_training.data.sources.base import Problems, SkippedSample, printable
from sd_training.errors import BadSamplesError, ConfigError, DataError
from sd_training.log import get_logger, redacted_values
from sd_training.signals import FOR_THE_TRAINING_PROCESS
from sd_training.types import PixelBatch

log = get_logger(__name__)

BAD_SAMPLES_FILE = "bad_samples.jsonl"
WINDOW = 100_000
"""Samples read over which the share of bad ones is taken."""


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
    reuse_batch: bool = False
    """Whether every micro-batch is the first one of the run, the same tensors each time: `dataset.reuse_batch`."""
    encoded: EncoderProcesses | None = None
    """Delivers the micro-batches, instead of loader processes of this process."""
    _deaths: list[int] = field(default_factory=list, init=False)
    """Optimizer steps at which a loader process has died."""

    def __len__(self) -> int:
        return self.plan.num_steps * self.plan.accumulation

    def __iter__(self) -> Iterator[PixelBatch]:
        start = self.first_step() * self.plan.accumulation
        for result in self._repeated(start) if self.reuse_batch else self.results(start):
            self.bad_samples.count(self.plan.micro_batch, result.skipped)
            if result.error is not None:
                raise result.error
            assert result.batch is not None, "a result has a batch or an error"
            yield result.batch

    def requests_from(self, micro_batch: int) -> Iterator[list[SampleRequest]]:
        """The requests to the loader processes, a list per micro-batch of this rank, to the end of the run."""
        return (self.request(number, self.rank) for number in range(micro_batch, len(self)))

    def request(self, micro_batch: int, rank: int) -> list[SampleRequest]:
        """The samples of one micro-batch of a rank."""
        step, micro_index = divmod(micro_batch, self.plan.accumulation)
        bucket, samples, datasets = self.order.at(step)
        # A rank reads neighbouring slots, those of its shard streams, with any accumulation.
        slot = (rank * self.plan.accumulation + micro_index) * self.plan.micro_batch
        position = step * self.plan.global_batch + slot
        own = slice(slot, slot + self.plan.micro_batch)
        picked = zip(datasets[own].tolist(), samples[own].tolist(), strict=True)
        return [SampleRequest(place, *chosen, bucket) for place, chosen in enumerate(picked, start=position)]

    def step_of(self, number: int) -> int:
        """The optimizer step of a micro-batch."""
        return number // self.plan.accumulation

    def _repeated(self, next_micro_batch: int) -> Iterator[WorkerResult]:
        """The first micro-batch of the run at every place. What was skipped for it counts once."""
        first = next(self.results(0))  # its loader processes end with the iterator
        for number in range(next_micro_batch, len(self)):
            yield first if number == next_micro_batch else replace(first, skipped=[])

    def results(self, next_micro_batch: int) -> Iterator[WorkerResult]:
        """To the end of the run. Loader processes that die are replaced by new ones, which begin with the next expected
        micro-batch. Or from encoder processes, whose loader processes are replaced there."""
        end = len(self)
        if self.encoded is not None:
            yield from self.encoded.results(next_micro_batch, end)
            return
        while next_micro_batch < end:
            iterator = iter(self._torch_loader(next_micro_batch))
            # A block that is still mapped when it comes again is not mapped anew.
            mapped = deque[PixelBatch | None](maxlen=self.workers * BLOCKS)
            try:
                while next_micro_batch < end:
                    result = next(iterator)
                    if self.workers and result.written is None:
                        result = result.copied(is_pinned=False)
                    mapped.append(result.written)
                    next_micro_batch += 1
                    yield result
            except (RuntimeError, OSError, EOFError) as error:  # also of a connection to a process that has ended
                # torch's iterator over loader processes keeps them here; one without has none
                workers = vars(iterator).get("_workers", [])
                self.check_death(workers, self.step_of(next_micro_batch), error)
            del iterator  # its loader processes end before new ones are made

    def check_death(self, workers: Sequence[BaseProcess], step: int, error: Exception) -> None:
        """Returns where a loader process has died and the loader may be built again. What it reads is a function of the
        position, so nothing is lost with it.

        Args:
            workers: loader processes of a loader that raised `error`.
            step: optimizer step that waits for data.

        Raises:
            Exception: `error` itself, when all of them live.
            DataError: too many died.
        """
        wait([worker.sentinel for worker in workers], EXIT_STATUS_S if workers else 0)
        code = next((worker.exitcode for worker in workers if not worker.is_alive()), None)
        if code is None:
            raise error
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        if code == 255:  # multiprocessing's status of a process whose server has ended
            how = "was lost with the server it was forked from"
        self._deaths = [*(before for before in self._deaths if before > step - WINDOW_STEPS), step]
        if len(self._deaths) > MAX_DEATHS:
            raise DataError(
                f"loader processes died {len(self._deaths)} times within {WINDOW_STEPS:,} optimizer steps, the last "
                f"{how} at step {step:,}; SIGKILL often means that the machine ran out of memory: lower system.workers "
                "or system.batch_size"
            )
        log.error(f"a loader process {how} at optimizer step {step:,}; the loader starts again there, nothing is lost")

    def _torch_loader(self, first_micro_batch: int) -> "DataLoader[WorkerResult]":
        return DataLoader(
            self.dataset,
            batch_size=None,
            sampler=self.requests_from(first_micro_batch),
            pin_memory=torch.cuda.is_available(),
            **worker_options(self.workers),
            generator=torch.Generator(),  # else torch's global generator is moved; nothing here draws from either
        )


class BadSampleLog:
    """Names each skipped sample in `run_dir/bad_samples.jsonl`, and ends the run when there are too many.

    Every process of a run counts what it reads itself. A sample counts once, however often it is read: a small data set
    with one bad sample is not a bad data set after a hundred epochs. What the file named at the start is not named
    again; two processes may both name a sample.

    Args:
        run_dir: None keeps the counts only.
        max_fraction: of the last `WINDOW` samples that this process read.
    """

    def __init__(self, run_dir: Path | None, max_fraction: float) -> None:
        self.path = run_dir / BAD_SAMPLES_FILE if run_dir is not None else None
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
            log.warning(f"problems in {where}: {problems.text()}{problems.remedy()}")
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
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _end_last_line(self.path)
                self._named = read_bad_samples(self.path)
            if sample not in self._named:
                self._named.add(sample)
                with self.path.open("ab", buffering=0) as file:  # one write, because other processes append too
                    file.write(json.dumps({**entry, "time": round(time.time(), 3)}).encode() + b"\n")
        except OSError as error:  # a full disk is no reason to lose the run that this file only describes
            log.warning("%s cannot be written, bad samples are only counted from now on: %s", self.path, error)
            self.path = None


def read_bad_samples(path: Path) -> set[tuple[str, str]]:
    """Shard and key of the samples that a `bad_samples.jsonl` names; none where there is no such file."""
    named = set[tuple[str, str]]()
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        with suppress(ValueError, KeyError, TypeError):  # of a line that was cut off
            entry = json.loads(line)
            named.add((str(entry["shard"]), str(entry["key"])))
    return named


def _end_last_line(path: Path) -> None:
    """A last line that a crash cut off gets its end: what follows is whole."""
    if path.exists() and not (b"\n" + path.read_bytes()).endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


MAX_DEATHS = 3
"""Within `WINDOW_STEPS`; more end the run."""
WINDOW_STEPS = 1000
_ROOT = Path(__file__).resolve().parents[2]
_PRELOADED = [
    "sd_training.data.loader",
    "sd_training.data.sources.arrow",
    "sd_training.data.sources.tar",
    "transformers.models.clip.tokenization_clip",
]
"""Imported once by the server, so that its children start at once."""
_CHECK_EVERY_S = 1.0


def worker_context() -> BaseContext:
    """How loader processes are started; starts the server unless it runs.

    Raises:
        ConfigError: the server's socket cannot be made in the folder for temporary files, such as one whose path leaves
            no room in the 108 characters that Linux has for the name of a socket.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    path = os.environ.get("PYTHONPATH", "")
    with signals_blocked(FOR_THE_TRAINING_PROCESS - {signal.SIGINT, signal.SIGTERM}):
        resource_tracker.ensure_running()  # blocks SIGINT and SIGTERM for itself, and unblocks them afterwards
        with signals_blocked(FOR_THE_TRAINING_PROCESS):
            # The server imports what it preloads from PYTHONPATH only, not from this process' `sys.path`.
            os.environ["PYTHONPATH"] = import_path()
            try:
                forkserver.ensure_running()
            except OSError as error:
                raise ConfigError(
                    f"TMPDIR: no socket can be made in {tempfile.gettempdir()}: {error}; use a local folder whose path "
                    "has at most 60 characters"
                ) from error
            finally:
                os.environ["PYTHONPATH"] = path
    return context


def import_path() -> str:
    """PYTHONPATH of a process that has to find this project."""
    return os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))


@contextmanager
def signals_blocked(numbers: set[signal.Signals]) -> Iterator[None]:
    """A process started inside never gets these signals; this one gets them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def worker_options(workers: int) -> dict[str, Any]:
    """How a DataLoader of torch starts so many loader processes, or reads in this process."""
    if not workers:
        return {"num_workers": 0}
    started = partial(start_worker, dict(os.environ), os.getpid())
    processes = {"num_workers": workers, "prefetch_factor": PREFETCHED, "multiprocessing_context": worker_context()}
    return {**processes, "worker_init_fn": started}


def start_worker(environment: dict[str, str], parent: int, _: int) -> None:
    """Runs first in a loader process: one thread, the training process' environment, and no signals but SIGTERM from
    the training process `parent`.

    torch ends a loader process that hangs by SIGTERM, and notices a lost parent by the parent's id, which is the
    server's here. The sender of a signal is only known to a thread that waits for it. The server may have an older
    environment, without the keys of remote storage.
    """
    os.environ.update(environment)
    torch.set_num_threads(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_TRAINING_PROCESS)

    def end_with_parent() -> None:
        received = None
        with suppress(ProcessLookupError):
            while received is None or received.si_pid != parent:
                os.kill(parent, 0)  # checks whether it is alive
                received = signal.sigtimedwait({signal.SIGTERM}, _CHECK_EVERY_S)
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True, name="sigterm").start()
