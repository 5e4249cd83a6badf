"""The data of a run as Lightning uses it: opens the data sets, makes their order and the loader, and checks on resume
that the data are still the same. And the samples that a run is measured on: never trained on, always the same ones with
the same noise."""

import hashlib
import os
import platform
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch

from sd_training.config.changes import differences
from sd_training.config.check import data_sets
from sd_training.config.data_schema import CaptionConfig, DatasetConfig, MixEntry, SourceParams
from sd_training.config.fields import shown
from sd_training.config.plan import BatchPlan, counted
from sd_training.config.schema import ValidationConfig
from sd_training.config.value_types import output_path
from sd_training.data.dataset import OpenDataset, open_dataset
from sd_training.data.encoded import EncoderProcesses
from sd_training.data.index.report import DatasetReport
from sd_training.data.loader import BadSampleLog, TrainingLoader
from sd_training.data.order.buckets import training_sizes
from sd_training.data.order.order import RunOrder, SampleOrder
from sd_training.data.samples.cache import LatentCache, data_key
from sd_training.data.samples.captions import Tokenizer
from sd_training.data.samples.sample import NO_DROPOUT, DrawSettings, SampleRequest, TrainingSamples
from sd_training.data.sources.base import printable
from sd_training.data.storage.files import shown as shown_location
from sd_training.errors import CheckpointError, Checks, ConfigError, DataError
from sd_training.log import get_logger, redacted_values
from sd_training.types import PixelBatch

log = get_logger(__name__)


_DECISIVE = (
    *("path", "filters", "resolution", "buckets", "captions", "image_column", "caption_column", "tags"),
    *("synthetic", "max_image_pixels"),
)
"""Of `dataset.params`: what decides which samples are selected and in which buckets."""
_OPTION_OF = {
    "seed": "experiment.seed",
    "global_batch": "system.batch_size × system.gradient_accumulation × processes",
    "resampled": "dataset.params.resampled",
    "lanes": "dataset.params.lanes",
    "window": "dataset.params.window",
}
"""Entry of a checkpoint about the order → the option that decides it."""
_HELD_OUT_SEED = 2**40
"""Of the noise; not the run's, so that runs with other seeds are measured alike."""


def _open(option: str, *args: Any, **options: Any) -> OpenDataset:
    """As `open_dataset`; errors name the option that says where the samples are, not that of the first data set."""
    try:
        return open_dataset(*args, **options)
    except (ConfigError, DataError) as error:
        raise type(error)(str(error).replace("dataset.params.path", option)) from error


class HeldOutData:
    """Delivers PixelBatches by their number. Type and processing are those of the run's first data set, without
    regularisation.

    Args:
        run: what is trained on.
        config: where the samples are, and how many.
        option: that has named them, for messages.
    """

    def __init__(self, run: "TrainingData", config: ValidationConfig, option: str = "validation.path") -> None:
        assert config.path is not None, "without a path there is nothing to measure on"
        self.run, self.config, self.option, self._warned = run, config, option, set[tuple[str, str]]()
        self.params = run.dataset.params.replace(path=config.path, crop="center", flip_prob=0.0)
        self.draws = replace(
            run.draws, seed=_HELD_OUT_SEED, dropout=NO_DROPOUT, has_input_noise=False, is_stratified=False
        )

    @cached_property
    def samples(self) -> TrainingSamples:
        """Opens the data.

        Raises:
            ConfigError, DataError: it cannot be used.
        """
        table, params, kind = training_sizes(self.params), self.params, self.run.dataset.type
        dataset = _open(self.option, kind, params, params, table, 1, captions_needed=self.run.captions_needed)
        return TrainingSamples([dataset], table, params, self.run.tokenizers, self.draws, global_batch=1)

    @cached_property
    def requests(self) -> list[list[SampleRequest]]:
        """Samples at equal distances, bucket by bucket; they depend on nothing but the data and the options."""
        (dataset,) = self.samples.datasets
        total = len(dataset.selected)
        count = min(self.config.num_samples, total)
        chosen = np.arange(count) * total // count
        buckets, batches, size = dataset.bucket_of[chosen], [], self.run.plan.micro_batch
        for bucket in np.unique(buckets).tolist():
            positions = np.flatnonzero(buckets == bucket).tolist()
            requests = [SampleRequest(p, 0, int(dataset.selected[chosen[p]]), bucket) for p in positions]
            batches += [requests[start : start + size] for start in range(0, len(requests), size)]
        return batches

    def sentence(self) -> str:
        """Summary of the validation schedule."""
        config, total = self.config, len(self.samples.datasets[0].selected)
        count = sum(map(len, self.requests))
        levels = f" at {config.num_levels} noise levels" if self.draws.has_noise else ""
        return f"validation: {count:,} of {total:,} held-out samples{levels}, every {config.every:,} optimizer steps"

    def report(self, trained: Sequence[OpenDataset]) -> None:
        """Logs the validation schedule, problems of the shards, and which of them are trained on as well."""
        log.info(self.sentence())
        (own,) = self.samples.datasets
        self.run.bad_samples.report(own.selection.problems, "the held-out data")
        locations = {shard.location for dataset in trained for shard in dataset.index.shards}
        shared = [shown_location(shard.location) for shard in own.index.shards if shard.location in locations]
        if shared:
            shards = counted(len(shared), own.reader.source.shard_noun)
            log.warning(f"validation.path: trained on as well: {shards}, such as {shared[0]}")

    def __len__(self) -> int:
        """Batches."""
        return len(self.requests)

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
        result = self.samples[self.requests[number]]
        for skipped in result.skipped:
            if (skipped.shard, skipped.key) not in self._warned:  # all of them are named in the file
                self._warned.add((skipped.shard, skipped.key))
                self.run.bad_samples.name(skipped)
                shard, key, reason = (printable(part) for part in skipped[:3])
                log.warning(f"{self.option}: {shard} {key} cannot be used, another sample replaces it: {reason}")
        if result.error is not None:
            raise type(result.error)(f"{self.option}: {result.error}")
        assert result.batch is not None, "a result has a batch or an error"
        return result.batch


@dataclass(kw_only=True, eq=False, repr=False)
class TrainingData(pl.LightningDataModule):
    """Delivers PixelBatches in the order of the run."""

    dataset: DatasetConfig
    """`dataset` of the config."""
    plan: BatchPlan
    """Batch arithmetic for the number of training processes, `processes` × `sharing`."""
    workers: int
    """Loader processes per training process."""
    tokenizers: Mapping[str, Tokenizer]
    """Text encoder → tokenizer; without any, batches have no tokens."""
    draws: DrawSettings
    """What is drawn per sample."""
    captions_needed: bool = True
    """Whether samples without a caption are left out."""
    run_dir: Path | None
    """Where bad samples are named; None names them nowhere."""
    validation: InitVar[ValidationConfig | None] = None
    """`validation` of the config; None: no held-out data."""
    cache: LatentCache | None = None
    """What was encoded before training, instead of images and captions; held-out data do not use it."""
    encoders: EncoderProcesses | None = None
    """Encode beside the training, with a trainer; held-out data do not use them."""

    def __post_init__(self, validation: ValidationConfig | None) -> None:
        super().__init__()
        dataset = self.dataset
        self.entries: list[DatasetConfig | MixEntry] = [dataset, *dataset.mix]
        self.is_paired = dataset.prior.path is not None
        if dataset.prior.path is not None:
            prompts = dataset.prior.prompts  # several: every class image has its own beside it
            captions = CaptionConfig(text=prompts[0] if len(prompts) == 1 else None)
            params = SourceParams(path=str(output_path(dataset.prior.path)), captions=captions)
            self.entries.append(MixEntry(type="ImageFolder", params=params))
        self.table = training_sizes(dataset.params)
        self.bad_samples = BadSampleLog(self.run_dir, dataset.params.max_bad_fraction)
        self.held_out = HeldOutData(self, validation) if validation and validation.path is not None else None
        """What the run is measured on."""

    def prepare_data(self) -> None:
        """Builds the index; Lightning calls this on one process of each machine while the others wait."""
        checks = Checks()
        checks.run(lambda: self.order)
        checks.run(lambda: self._checked_cache)
        if self.held_out is not None:
            checks.run(self.held_out.sentence)
        checks.finish()

    def setup(self, stage: str) -> None:
        """Opens the index; logs and writes to a file what is wrong with the shards."""
        datasets = self.datasets
        if self.trainer is None or self.trainer.global_rank > 0:
            return
        for dataset in datasets:
            self.bad_samples.report(dataset.selection.problems, "the data")
        if self.held_out is not None:
            self.held_out.report(datasets)
        if self.dataset.reuse_batch:
            log.warning(
                "dataset.reuse_batch: every step trains on one batch, so nothing is learnt; for benchmarks only"
            )

    def train_dataloader(self) -> TrainingLoader:
        """The micro-batches of this rank from the trainer's optimizer step on."""
        trainer = self.trainer
        assert trainer is not None, "without a trainer, use loader(rank, first_step)"
        loader = self.loader(trainer.global_rank // self.plan.sharing, lambda: trainer.global_step)
        if self.encoders is None:
            return loader
        machine = zlib.crc32(platform.node().encode())
        # Collective: the first process of a machine has chosen the addresses.
        own = torch.tensor([machine, self.encoders.code], device=trainer.strategy.root_device)
        machines, codes = trainer.strategy.all_gather(own).reshape(-1, 2).T.tolist()
        first = trainer.global_rank - trainer.local_rank
        if machines[first] != machine:
            raise ConfigError(
                "distributed.encoders: the ranks of a machine must be neighbours; srun --distribution=block"
            )
        return replace(loader, encoded=replace(self.encoders, code=codes[first]))

    def loader(self, rank: int, first_step: Callable[[], int]) -> TrainingLoader:
        """The micro-batches from optimizer step `first_step()` on; usable without a trainer.

        Args:
            rank: 0..`plan.processes`-1; processes that share their samples have one.
        """
        # Loader processes are forked; the tokenizers package would warn about its threads in every one of them.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        samples, reuse = self.samples(), self.dataset.reuse_batch
        return TrainingLoader(samples, self.order, self.plan, rank, self.workers, first_step, self.bad_samples, reuse)

    def samples(self) -> TrainingSamples:
        """Request → example."""
        params, global_batch, cache = self.dataset.params, self.plan.global_batch, self._checked_cache
        return TrainingSamples(self.datasets, self.table, params, self.tokenizers, self.draws, global_batch, cache)

    @cached_property
    def _checked_cache(self) -> LatentCache | None:
        """The cache, compared with the data once.

        Raises:
            ConfigError: it is of other data.
        """
        if self.cache is not None:
            has_text = bool(self.cache.storage.text_shapes)
            self.cache.check("data", data_key(self.entries, self.datasets, self.table, has_text=has_text))
            self.cache.check_samples(self.datasets, self.table)
        return self.cache

    def name_of(self, sample_id: int) -> tuple[str, str]:
        """Location of the shard and key of a batch's sample; untrusted text."""
        for dataset in self.datasets:
            if sample_id < len(dataset.index):
                return dataset.index.name(sample_id)
            sample_id -= len(dataset.index)
        raise ValueError(f"sample id {sample_id} beyond the end of all data sets")

    def report(self, *, of_run: bool = True, is_size_known: bool = True) -> list[DatasetReport]:
        """What the data sets are; usable without a trainer.

        Args:
            of_run: whether to report what the run draws from it.
            is_size_known: whether the size that images are trained at is that of a run.

        Raises:
            DataError: it cannot be used.
        """
        return [
            DatasetReport(dataset, self.order, number, self.table, of_run, is_size_known)
            for number, dataset in enumerate(self.datasets)
        ]

    def fingerprint(self) -> str:
        """sha256 of the selected samples, their buckets and their order: equal means that the run sees the same."""
        digest = hashlib.sha256()
        for dataset in self.datasets:
            digest.update(dataset.index.fingerprint.encode())
            digest.update(dataset.selected.astype("<i8").tobytes())
            digest.update(dataset.bucket_of.astype("<i4").tobytes())
        shares = (
            f"Share(weight={e.weight!r}, start_step={e.start_step!r}, end_step={e.end_step!r})" for e in self.entries
        )
        digest.update(f"({self.table.sizes!r}, [{', '.join(shares)}])".encode())
        if self.dataset.reuse_batch:
            digest.update(b"reuse_batch")
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """The data's part of a checkpoint. The position is the optimizer step, which the trainer keeps."""
        return {
            "options": _options(self.dataset),
            "fingerprint": self.fingerprint(),
            "num_samples": sum(len(dataset.selected) for dataset in self.datasets),
            **_order(self.dataset, self.plan, self.draws.seed),
            "lanes": [own.num_streams for own in self.order.orders],
            "window": [own.window for own in self.order.orders],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Checks that the run would see the same data in the same order.

        Raises:
            CheckpointError: shards, filters, buckets, order, seed or global batch are not those of the checkpoint.
        """
        changed = _changes(state_dict, self.state_dict())
        if changed and self.dataset.params.allow_change:
            log.warning("dataset.params.allow_change: the run continues with other data: %s", "; ".join(changed))
        elif changed:
            raise CheckpointError(_other_data(changed))

    @cached_property
    def datasets(self) -> list[OpenDataset]:
        """The data sets of the run, opened; the first is the main one."""
        checks = Checks()
        named = [*(f"{prefix}.params.path" for prefix, _ in data_sets(self.dataset)), "dataset.prior.path"]
        shared, opened = (self.dataset.params, self.table, self._batch_per_dataset), list[OpenDataset | None]()
        for option, entry in zip(named, self.entries, strict=False):
            open_one = partial(_open, option, entry.type, entry.params, *shared, captions_needed=self.captions_needed)
            opened.append(checks.run(open_one))
        checks.finish()
        return [dataset for dataset in opened if dataset is not None]

    @cached_property
    def order(self) -> RunOrder:
        """Which samples each optimizer step draws."""
        params, plan, orders = self.dataset.params, self.plan, []
        for number, dataset in enumerate(self.datasets):
            seed = self.draws.seed + (number << 32)  # data sets of equal length must not be shuffled alike
            block_of = dataset.index.numbers("block")[dataset.selected]
            orders.append(SampleOrder(params, seed, self._batch_per_dataset, block_of, dataset.bucket_of))
        selected = [dataset.selected for dataset in self.datasets]
        shares = self.entries[:1] if self.is_paired else self.entries
        return RunOrder(shares, self.draws.seed, plan.num_steps, orders, selected, is_paired=self.is_paired)

    @property
    def _batch_per_dataset(self) -> int:
        """Samples of an optimizer step that come from one data set."""
        return self.plan.global_batch // (2 if self.is_paired else 1)


def order_problem(before: Mapping[str, Any], dataset: DatasetConfig, plan: BatchPlan, seed: int) -> str:
    """The error of a checkpoint whose samples come in another order, as far as options tell without the data; names
    changed options of the data as well. Empty where the order is the same, or may change.

    Args:
        before: what the checkpoint says about the data.
        dataset: of this start.
        plan: of this start.
        seed: of this start.
    """
    if dataset.params.allow_change or not before:
        return ""
    order = _order_changes(before, _order(dataset, plan, seed))
    return _other_data([*_option_changes(before, _options(dataset)), *order]) if order else ""


def _other_data(changed: Sequence[str]) -> str:
    return (
        f"the checkpoint belongs to a run on other data or in another order: {'; '.join(changed)}. Restore "
        "dataset, experiment.seed and batch_size × accumulation × processes, take another name, or set "
        "dataset.params.allow_change=true to continue with the new data"
    )


def _options(dataset: DatasetConfig) -> dict[str, Any]:
    """Dotted option → value of what decides which samples there are and in which buckets, without secrets."""
    params = dataset.params.model_dump()
    options = {f"dataset.params.{name}": params[name] for name in _DECISIVE}
    options |= {f"dataset.{name}": value for name, value in dataset.model_dump().items() if name != "params"}
    return redacted_values(options)


def _order(dataset: DatasetConfig, plan: BatchPlan, seed: int) -> dict[str, Any]:
    """What options say about the order."""
    return {"seed": seed, "global_batch": plan.global_batch, "resampled": dataset.params.resampled}


def _option_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    known: Mapping[str, Any] = before.get("options", {})
    changes = (change for key, value in known.items() for change in differences(key, value, now.get(key)))
    return [change.sentence() for change in changes]


def _order_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changed = [key for key in _OPTION_OF if key in now and now[key] != before.get(key)]
    return [f"{_OPTION_OF[key]} was {shown(before.get(key))}, now {shown(now[key])}" for key in changed]


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The reasons why the stream of samples differs from that of a checkpoint, as text."""
    if now["fingerprint"] == before.get("fingerprint"):
        return _order_changes(before, now)
    changed = _option_changes(before, now["options"])
    if not changed:
        changed.append("the files of dataset.params.path, or what was chosen of them, have changed")
    if now["num_samples"] != before.get("num_samples"):
        changed.append(f"{counted(before.get('num_samples', 0), 'sample')} were selected, now {now['num_samples']:,}")
    decided_by_options = {key: now[key] for key in ("seed", "global_batch", "resampled")}  # the others follow from data
    return changed + _order_changes(before, decided_by_options)
