"""Samples that a run is measured on: never trained on, always the same ones with the same noise."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from sd_training.config.data_schema import DatasetConfig
from sd_training.config.plan import counted
from sd_training.config.schema import ValidationConfig
from sd_training.data.dataset import OpenDataset, open_dataset
from sd_training.data.loader import BadSampleLog
from sd_training.data.order.buckets import training_sizes
from sd_training.data.problems import printable
from sd_training.data.samples.captions import Tokenizer
from sd_training.data.samples.sample import DrawSettings, Dropout, SampleRequest, TrainingSamples, collate
from sd_training.data.sources.choose import SHARD_NOUNS
from sd_training.data.storage.locations import shown
from sd_training.errors import ConfigError, DataError
from sd_training.log import get_logger
from sd_training.types import PixelBatch

log = get_logger(__name__)

_SEED = 2**40
"""Of the noise; not the run's, so that runs with other seeds are measured alike."""


@dataclass(frozen=True)
class _Opened:
    samples: TrainingSamples
    batches: list[list[SampleRequest]]
    """Each of one bucket; they depend on nothing but the data and the options."""


class HeldOutData:
    """Delivers PixelBatches by their number.

    Args:
        dataset: `dataset` of the config; type and processing are the first data set's.
        config: where the samples are, and how many.
        batch_size: samples per forward pass.
        tokenizers: text encoder → tokenizer.
        draws: as in training; regularisation is disabled.
        bad_samples: names what cannot be used.
        captions_needed: whether samples without a caption are left out.
    """

    def __init__(
        self,
        dataset: DatasetConfig,
        config: ValidationConfig,
        batch_size: int,
        tokenizers: Mapping[str, Tokenizer],
        draws: DrawSettings,
        bad_samples: BadSampleLog,
        *,
        captions_needed: bool = True,
    ) -> None:
        assert config.path is not None, "without a path there is nothing to measure on"
        self.kind = dataset.type
        self.params = dataset.params.replace(path=config.path, crop="center", flip_prob=0.0)
        self.config, self.batch_size = config, batch_size
        self.tokenizers, self.captions_needed = dict(tokenizers), captions_needed
        self.draws = replace(draws, seed=_SEED, dropout=Dropout(), has_input_noise=False, is_stratified=False)
        self.bad_samples = bad_samples
        self._opened: _Opened | None = None
        self._warned: set[tuple[str, str]] = set()

    def open(self) -> _Opened:
        """Index and choice of the samples, made once.

        Raises:
            ConfigError, DataError: the data cannot be used.
        """
        if self._opened is None:
            table, params = training_sizes(self.params), self.params
            try:
                dataset = open_dataset(self.kind, params, params, table, 1, captions_needed=self.captions_needed)
            except (ConfigError, DataError) as error:
                raise type(error)(str(error).replace("dataset.params.path", "validation.path")) from error
            samples = TrainingSamples([dataset], table, params, self.tokenizers, self.draws, global_batch=1)
            self._opened = _Opened(samples, _batches(dataset, self.config.num_samples, self.batch_size))
        return self._opened

    def sentence(self) -> str:
        """What is measured when."""
        config, opened = self.config, self.open()
        count, total = sum(map(len, opened.batches)), len(opened.samples.datasets[0].selected)
        return (
            f"validation: {count:,} of {total:,} held-out samples at {config.num_levels} noise levels, every "
            f"{config.every:,} optimizer steps"
        )

    def report(self, trained: Sequence[OpenDataset]) -> None:
        """Logs what is measured when, what is wrong with the shards, and which of them are trained on as well."""
        log.info(self.sentence())
        (own,) = self.open().samples.datasets
        self.bad_samples.report(own.selection.problems, "the held-out data")
        locations = {shard.location for dataset in trained for shard in dataset.index.shards}
        shared = [shown(shard.location) for shard in own.index.shards if shard.location in locations]
        if shared:
            shards = counted(len(shared), SHARD_NOUNS.get(self.kind, "shard"))
            log.warning(f"validation.path: trained on as well: {shards}, such as {shared[0]}")

    def __len__(self) -> int:
        """Batches."""
        return len(self.open().batches)

    def batches(self, numbers: Sequence[int]) -> Iterator[PixelBatch]:
        """The batches of these numbers; while one is used, a thread reads the next.

        Raises:
            DataError: one cannot be read.
        """
        with ThreadPoolExecutor(1, "held-out data") as reader:
            pending = deque(reader.submit(self._read, number) for number in numbers[:2])
            for number in numbers[2:]:
                yield pending.popleft().result()
                pending.append(reader.submit(self._read, number))
            yield from (batch.result() for batch in pending)

    def _read(self, number: int) -> PixelBatch:
        opened = self.open()
        result = collate([opened.samples[request] for request in opened.batches[number]])
        for skipped in result.skipped:
            if (skipped.shard, skipped.key) not in self._warned:  # all of them are named in the file
                self._warned.add((skipped.shard, skipped.key))
                self.bad_samples.name(skipped)
                shard, key, reason = (printable(part) for part in skipped[:3])
                log.warning(f"validation.path: {shard} {key} cannot be used, another sample replaces it: {reason}")
        if result.error is not None:
            raise type(result.error)(f"validation.path: {result.error}")
        assert result.batch is not None, "a result has a batch or an error"
        return result.batch


def _batches(dataset: OpenDataset, num_samples: int, batch_size: int) -> list[list[SampleRequest]]:
    """Samples at equal distances, bucket by bucket."""
    total = len(dataset.selected)
    count = min(num_samples, total)
    chosen = np.arange(count) * total // count
    buckets, batches = dataset.bucket_of[chosen], []
    for bucket in np.unique(buckets).tolist():
        positions = np.flatnonzero(buckets == bucket)
        samples = dataset.selected[chosen[positions]].tolist()
        requests = [SampleRequest(p, 0, s, bucket) for p, s in zip(positions.tolist(), samples, strict=True)]
        batches += [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)]
    return batches
