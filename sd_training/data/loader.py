"""The loader of a run: micro-batches of one rank, from any optimizer step on.

Loader processes are forked from a small server process, never from the training process.

A child of the training process would keep a copy of its memory alive: weights, optimizer and EMA are written in place
at the next step, so every page of them would exist twice (measured: resuming a UNet of 860 million parameters on a CPU
took 10 GiB more, and was killed). It would also inherit the locks of the threads that CUDA, NCCL and remote storage
run, in whatever state they are.

SLURM and a terminal send their signals to every process of a run. The server, and the loader processes after it, are
started with these blocked: they must go on until the training process has saved.

Loader processes that end before their work is done: killed for memory, or with the server they are forked from.

What a loader process reads is a function of the position, so nothing is lost with one: the micro-batches that were
under way are asked for again.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Sampler

from sd_training.config.plan import BatchPlan
from sd_training.data.order.order import RunOrder, slots
from sd_training.data.samples.bad_samples import BadSampleLog
from sd_training.data.samples.sample import SampleRequest, TrainingSamples, WorkerResult, collate
from sd_training.errors import ConfigError, DataError, OutageError
from sd_training.incidents import write_incident
from sd_training.log import get_logger, global_rank
from sd_training.signals import FOR_THE_TRAINING_PROCESS
from sd_training.types import PixelBatch

_ROOT = Path(__file__).resolve().parents[2]

_PRELOADED = ["sd_training.data.worker_imports"]
"""Imported once by the server, so that its children start at once."""

_LOOK_EVERY_S = 1.0


def worker_context() -> BaseContext:
    """How loader processes are started; starts the server unless it runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with _importable(), _signals_blocked(FOR_THE_TRAINING_PROCESS - {signal.SIGINT, signal.SIGTERM}):
        resource_tracker.ensure_running()  # blocks SIGINT and SIGTERM for itself, and unblocks them afterwards
        with _signals_blocked(FOR_THE_TRAINING_PROCESS):
            _start()
    return context


@contextmanager
def _importable() -> Iterator[None]:
    """The server looks for what it preloads in its own path only, which knows nothing of ours."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextmanager
def _signals_blocked(numbers: set[signal.Signals]) -> Iterator[None]:
    """A process started inside never gets these signals; this one gets them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_only(pid: int) -> None:
    """In a loader process: ends it when the process `pid` says so by SIGTERM, or is gone; nobody else's SIGTERM does.

    torch ends a loader process that hangs by SIGTERM, and notices a lost parent by the parent's id, which is the
    server's here. The sender of a signal is only known to who waits for it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_TRAINING_PROCESS)

    def wait() -> None:
        while _is_alive(pid):
            received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_EVERY_S)
            if received is not None and received.si_pid == pid:
                break
        os._exit(0)

    threading.Thread(target=wait, daemon=True, name="sigterm").start()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _start() -> None:
    """The server listens on a socket in the folder for temporary files.

    Raises:
        ConfigError: that folder's name leaves no room in the 108 characters that Linux has for a socket's.
    """
    try:
        forkserver.ensure_running()
    except OSError as error:
        if "too long" not in str(error):
            raise
        folder = tempfile.gettempdir()
        raise ConfigError(
            f"TMPDIR: {folder} is too long for a socket in it; use a folder of at most 60 characters"
        ) from error


log = get_logger(__name__)

MAX_DEATHS = 3
"""Within `WINDOW_STEPS`; more is no accident."""
WINDOW_STEPS = 1000
_SETTLES_S = 2.0
"""The end of a process is known a moment after its connections have closed."""


class WorkerDeaths:
    """Counts them, and says when it is too much.

    Args:
        run_dir: its `incidents/` gets a file for each; None writes nothing.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self.run_dir = run_dir
        self._steps = deque[int]()

    def explain(self, workers: Sequence[BaseProcess], step: int, error: Exception) -> None:
        """Returns where a loader process has died and the loader may be built again.

        Args:
            workers: loader processes of a loader that raised `error`.
            step: optimizer step that waits for data.

        Raises:
            Exception: `error` itself, when all of them live.
            DataError: too many died.
        """
        how = _how_they_ended(workers)
        if not how:
            raise error
        while self._steps and self._steps[0] <= step - WINDOW_STEPS:
            self._steps.popleft()
        self._steps.append(step)
        if self.run_dir is not None:
            write_incident(self.run_dir, f"loader-rank{global_rank()}", step, how=how)
        if len(self._steps) > MAX_DEATHS:
            raise DataError(
                f"loader processes died {len(self._steps)} times within {WINDOW_STEPS:,} optimizer steps, the last "
                f"{how} at step {step:,}; SIGKILL often means that the machine ran out of memory: lower system.workers "
                "or system.batch_size"
            )
        log.error(f"a loader process {how} at optimizer step {step:,}; the loader starts again there, nothing is lost")


def _how_they_ended(workers: Sequence[BaseProcess]) -> str:
    """Of the first one that has; empty where all live."""
    end_s = time.monotonic() + _SETTLES_S
    while workers:
        for worker in workers:
            if not worker.is_alive():
                return _reason(worker.exitcode)
        if time.monotonic() > end_s:
            break
        time.sleep(0.05)
    return ""


def _reason(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    if exit_code == 255:  # what multiprocessing says of a process whose server is gone
        return "was lost with the server it was forked from"
    return f"ended with status {exit_code}"


log = get_logger(__name__)

PREFETCHED = 2
"""Micro-batches each loader process reads ahead."""


class RequestSampler(Sampler[list[SampleRequest]]):
    """Lists of visits, one list per micro-batch of this rank, from optimizer step `first_step` to the last; of that
    step without the first `num_done` micro-batches."""

    def __init__(self, order: RunOrder, plan: BatchPlan, rank: int, first_step: int, num_done: int = 0) -> None:
        self.order, self.plan, self.rank, self.first_step, self.num_done = order, plan, rank, first_step, num_done

    def __len__(self) -> int:
        return max(0, (self.plan.num_steps - self.first_step) * self.plan.accumulation - self.num_done)

    def __iter__(self) -> Iterator[list[SampleRequest]]:
        for step in range(self.first_step, self.plan.num_steps):
            chosen, first = self.order.at(step), step * self.order.positions_per_step
            factor = len(chosen.samples) // self.plan.global_batch
            for micro_index in range(self.num_done if step == self.first_step else 0, self.plan.accumulation):
                mine = slots(micro_index, self.rank, self.plan, factor)
                pairs = zip(mine, chosen.samples[mine.start : mine.stop].tolist(), strict=True)
                count = len(chosen.samples)
                yield [SampleRequest(first + s, chosen.dataset, sample, chosen.bucket, s, count) for s, sample in pairs]


@dataclass
class TrainingLoader:
    """Iterates over the PixelBatches of one rank.

    `len()` is always the number of micro-batches of the whole run, while iteration starts at the optimizer step that
    `first_step` gives when it begins: a resumed run counts on where it was.
    """

    dataset: TrainingSamples
    order: RunOrder
    plan: BatchPlan
    rank: int
    workers: int
    """Loader processes; 0 reads in this process."""
    first_step: Callable[[], int]
    bad_samples: BadSampleLog
    deaths: WorkerDeaths
    num_truncated: int = 0
    """Captions so far that had more tokens than the text encoder takes."""

    def __len__(self) -> int:
        return self.plan.num_steps * self.plan.accumulation

    def __iter__(self) -> Iterator[PixelBatch]:
        num_visits = 0
        for delivery in self._all_deliveries(self.first_step() * self.plan.accumulation):
            num_visits += len(delivery.were_good)
            self.bad_samples.count(delivery.were_good, delivery.skipped)
            self.num_truncated += delivery.num_truncated
            if delivery.batch is None:
                raise (OutageError if delivery.is_outage else DataError)(delivery.failure)
            yield delivery.batch
        if self.num_truncated:
            share = self.num_truncated / num_visits
            limits = " and ".join(str(tokenizer.length) for tokenizer in self.dataset.tokenizers.values())
            rule = f"longer than the {limits} tokens of the text encoder"
            log.info(f"{self.num_truncated:,} captions ({share:.1%}) were {rule} and were cut")

    def visits(self, first_step: int, num_done: int = 0) -> RequestSampler:
        """What the loader processes are asked for, micro-batch by micro-batch."""
        return RequestSampler(self.order, self.plan, self.rank, first_step, num_done)

    def _all_deliveries(self, next_micro_batch: int) -> Iterator[WorkerResult]:
        """To the end of the run. Loader processes that die are replaced by new ones, which begin with the micro-batch
        that is waited for."""
        end = len(self)
        while next_micro_batch < end:
            iterator = iter(self._deliveries(next_micro_batch))
            try:
                while next_micro_batch < end:
                    delivery = next(iterator)
                    next_micro_batch += 1
                    yield delivery
            except (RuntimeError, OSError, EOFError) as error:  # of a connection to a process that is gone, as well
                workers = getattr(iterator, "_workers", [])
                self.deaths.explain(workers, next_micro_batch // self.plan.accumulation, error)
            del iterator  # its loader processes end before new ones are made

    def _deliveries(self, first_micro_batch: int) -> "DataLoader[WorkerResult]":
        first_step, num_done = divmod(first_micro_batch, self.plan.accumulation)
        return DataLoader(
            self.dataset,  # type: ignore[arg-type]  # a delivery is what collate makes of the samples
            batch_sampler=self.visits(first_step, num_done),
            num_workers=self.workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            prefetch_factor=PREFETCHED if self.workers else None,
            worker_init_fn=partial(_start_worker, dict(os.environ), os.getpid()) if self.workers else None,
            multiprocessing_context=worker_context() if self.workers else None,
            generator=torch.Generator(),  # else torch's global generator is moved; nothing here draws from either
        )


def _start_worker(environment: dict[str, str], parent: int, _: int) -> None:
    """One thread, and no signals but those of the training process: Ctrl-C and preemption are its business.

    The server that this process was forked from may have an older environment, without the keys of remote storage.
    """
    os.environ.update(environment)
    torch.set_num_threads(1)
    obey_only(parent)
