"""The loader of a run: micro-batches of one rank, from any optimizer step on."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Sampler

from sd_training.config.batch_plan import BatchPlan
from sd_training.data.bad_samples import BadSampleLog
from sd_training.data.collate import Delivery, collate
from sd_training.data.dataset import TrainingSamples, Visit
from sd_training.data.order import EpochOrder, slots
from sd_training.errors import DataError
from sd_training.types import PixelBatch

PREFETCHED = 2
"""Micro-batches each loader process reads ahead."""


class VisitSampler(Sampler[list[Visit]]):
    """Lists of visits, one list per micro-batch of this rank, from optimizer step `first_step` to the last."""

    def __init__(self, dataset: TrainingSamples, plan: BatchPlan, rank: int, first_step: int) -> None:
        self.survivors, self.plan, self.rank, self.first_step = dataset.survivors, plan, rank, first_step
        self.order = EpochOrder(dataset.draws.seed, len(dataset.survivors))

    def __len__(self) -> int:
        return max(0, self.plan.num_steps - self.first_step) * self.plan.accumulation

    def __iter__(self) -> Iterator[list[Visit]]:
        for step in range(self.first_step, self.plan.num_steps):
            for micro_index in range(self.plan.accumulation):
                positions = slots(step, micro_index, self.rank, self.plan.processes, self.plan)
                yield [Visit(p, int(self.survivors[self.order.sample_at(p)])) for p in positions]


@dataclass
class TrainingLoader:
    """Iterates over the PixelBatches of one rank.

    `len()` is always the number of micro-batches of the whole run, while iteration starts at the optimizer step that
    `first_step` gives when it begins: a resumed run counts on where it was.
    """

    dataset: TrainingSamples
    plan: BatchPlan
    rank: int
    workers: int
    """Loader processes; 0 reads in this process."""
    first_step: Callable[[], int]
    bad_samples: BadSampleLog

    def __len__(self) -> int:
        return self.plan.num_steps * self.plan.accumulation

    def __iter__(self) -> Iterator[PixelBatch]:
        for delivery in self._deliveries(self.first_step()):
            self.bad_samples.count(0 if delivery.batch is None else self.plan.micro_batch, delivery.skipped)
            if delivery.batch is None:
                raise DataError(delivery.failure)
            yield delivery.batch

    def _deliveries(self, first_step: int) -> "DataLoader[Delivery]":
        return DataLoader(
            self.dataset,  # type: ignore[arg-type]  # a delivery is what collate makes of the samples
            batch_sampler=VisitSampler(self.dataset, self.plan, self.rank, first_step),
            num_workers=self.workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            prefetch_factor=PREFETCHED if self.workers else None,
            worker_init_fn=_start_worker if self.workers else None,
            generator=torch.Generator(),  # else torch's global generator is moved; nothing here draws from either
        )


def _start_worker(_: int) -> None:
    """One thread, and no signal handlers of the training process: Ctrl-C and preemption are its business."""
    torch.set_num_threads(1)
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
