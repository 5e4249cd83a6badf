"""Visited samples → PixelBatch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    were_good: list[bool]
    """Of each visit: whether the sample whose turn it was could be used."""
    num_truncated: int = 0
    """Captions that had more tokens than the text encoder takes."""
    failure: str | None = None
    """Why the run cannot go on; the main process raises it as a DataError."""
    is_outage: bool = False
    """As an OutageError."""

    def pin_memory(self) -> "Delivery":
        """Called by torch's DataLoader in its pinning thread."""
        return replace(self, batch=self.batch and self.batch.pin_memory())


def collate(visits: Sequence[VisitedSample | FailedVisit]) -> Delivery:
    """Stacks the samples in the order of their positions."""
    were_good = [not visit.skipped for visit in visits]
    skipped = [problem for visit in visits for problem in visit.skipped]
    samples = [visit for visit in visits if isinstance(visit, VisitedSample)]
    failures = [visit for visit in visits if isinstance(visit, FailedVisit)]
    if failures:
        return Delivery(None, skipped, were_good, failure=failures[0].message, is_outage=failures[0].is_outage)
    encoders = list(samples[0].texts)
    batch = PixelBatch(
        pixels=torch.from_numpy(np.stack([s.pixels for s in samples])),
        tokens={name: torch.from_numpy(np.stack([s.texts[name].tokens for s in samples])) for name in encoders},
        token_masks={name: torch.from_numpy(np.stack([s.texts[name].mask for s in samples])) for name in encoders},
        dropped={name: torch.tensor([s.dropped[name] for s in samples]) for name in samples[0].dropped},
        posterior_noise=torch.from_numpy(np.stack([s.posterior_noise for s in samples])),
        noise=torch.from_numpy(np.stack([s.noise for s in samples])),
        timestep_draw=torch.from_numpy(np.array([s.timestep_draw for s in samples], dtype=np.float32)),
        offset_noise=torch.from_numpy(np.stack([s.offset_noise for s in samples])),
        input_noise=torch.from_numpy(np.stack([s.input_noise for s in samples])),
        mask=torch.from_numpy(np.stack([s.mask for s in samples])),
        original_size=torch.tensor([s.original_size for s in samples], dtype=torch.int64),
        crop_top_left=torch.tensor([s.crop_top_left for s in samples], dtype=torch.int64),
        target_size=torch.tensor([s.pixels.shape[1:] for s in samples], dtype=torch.int64),
        positions=torch.tensor([s.position for s in samples], dtype=torch.int64),
        sample_ids=torch.tensor([s.sample_id for s in samples], dtype=torch.int64),
    )
    return Delivery(batch, skipped, were_good, sum(_is_cut(s) for s in samples))


def _is_cut(sample: VisitedSample) -> bool:
    return any(text.num_cut > 0 for text in sample.texts.values())
