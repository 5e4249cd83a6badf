"""Visited samples → PixelBatch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sd_training.data.dataset import FailedVisit, VisitedSample
from sd_training.data.problems import SkippedSample
from sd_training.types import PixelBatch


@dataclass
class Delivery:
    """What a loader process hands over for one micro-batch."""

    batch: PixelBatch | None
    """None after a failure."""
    skipped: list[SkippedSample]
    failure: str | None = None
    """Why the run cannot go on; the main process raises it as a DataError."""

    def pin_memory(self) -> "Delivery":
        """Called by torch's DataLoader in its pinning thread."""
        return Delivery(self.batch and self.batch.pin_memory(), self.skipped, self.failure)


def collate(visits: Sequence[VisitedSample | FailedVisit]) -> Delivery:
    """Stacks the samples in the order of their positions."""
    skipped = [problem for visit in visits for problem in visit.skipped]
    samples = [visit for visit in visits if isinstance(visit, VisitedSample)]
    failures = [visit.message for visit in visits if isinstance(visit, FailedVisit)]
    if failures:
        return Delivery(None, skipped, failures[0])
    batch = PixelBatch(
        pixels=torch.from_numpy(np.stack([s.pixels for s in samples])),
        tokens=torch.from_numpy(np.stack([s.tokens for s in samples])),
        posterior_noise=torch.from_numpy(np.stack([s.posterior_noise for s in samples])),
        noise=torch.from_numpy(np.stack([s.noise for s in samples])),
        timestep_draw=torch.from_numpy(np.array([s.timestep_draw for s in samples], dtype=np.float32)),
        positions=torch.tensor([s.position for s in samples], dtype=torch.int64),
        sample_ids=torch.tensor([s.sample_id for s in samples], dtype=torch.int64),
    )
    return Delivery(batch, skipped)
