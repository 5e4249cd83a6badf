"""The loader of a run: micro-batches of one rank, from any optimizer step on."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.data import DataLoader, Sampler

from sd_training.config.batch_plan import BatchPlan
from sd_training.data.bad_samples import BadSampleLog
from sd_training.data.collate import Delivery, collate
from sd_training.data.dataset import TrainingSamples, Visit
from sd_training.data.order import slots
from sd_training.data.run_order import RunOrder
from sd_training.data.worker_deaths import WorkerDeaths
from sd_training.data.worker_server import obey_only, worker_context
from sd_training.errors import DataError, OutageError
from sd_training.rank_log import get_logger
from sd_training.types import PixelBatch

log = get_logger(__name__)

PREFETCHED = 2
"""Micro-batches each loader process reads ahead."""


class VisitSampler(Sampler[list[Visit]]):
    """Lists of visits, one list per micro-batch of this rank, from optimizer step `first_step` to the last; of that
    step without the first `num_done` micro-batches."""

    def __init__(self, order: RunOrder, plan: BatchPlan, rank: int, first_step: int, num_done: int = 0) -> None:
        self.order, self.plan, self.rank, self.first_step, self.num_done = order, plan, rank, first_step, num_done

    def __len__(self) -> int:
        return max(0, (self.plan.num_steps - self.first_step) * self.plan.accumulation - self.num_done)

    def __iter__(self) -> Iterator[list[Visit]]:
        for step in range(self.first_step, self.plan.num_steps):
            chosen, first = self.order.at(step), step * self.order.positions_per_step
            factor = len(chosen.samples) // self.plan.global_batch
            for micro_index in range(self.num_done if step == self.first_step else 0, self.plan.accumulation):
                mine = slots(micro_index, self.rank, self.plan, factor)
                pairs = zip(mine, chosen.samples[mine.start : mine.stop].tolist(), strict=True)
                count = len(chosen.samples)
                yield [Visit(first + s, chosen.dataset, sample, chosen.bucket, s, count) for s, sample in pairs]


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

    def visits(self, first_step: int, num_done: int = 0) -> VisitSampler:
        """What the loader processes are asked for, micro-batch by micro-batch."""
        return VisitSampler(self.order, self.plan, self.rank, first_step, num_done)

    def _all_deliveries(self, next_micro_batch: int) -> Iterator[Delivery]:
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

    def _deliveries(self, first_micro_batch: int) -> "DataLoader[Delivery]":
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
