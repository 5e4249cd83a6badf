"""The data of a run as Lightning uses it: opens the data sets, makes their order and the loader, and checks on resume
that the data are still the same."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from sd_training.config.changes import differences
from sd_training.config.data_schema import DatasetConfig, MixEntry
from sd_training.config.fields import shown
from sd_training.config.plan import BatchPlan, counted
from sd_training.config.schema import ValidationConfig
from sd_training.data.dataset import OpenDataset, open_dataset
from sd_training.data.held_out import HeldOutData
from sd_training.data.index.report import DataReport, make_report
from sd_training.data.loader import BadSampleLog, TrainingLoader
from sd_training.data.order.buckets import BucketTable, training_sizes
from sd_training.data.order.order import MixtureSchedule, OrderSettings, RunOrder, SampleOrder
from sd_training.data.problems import Problems
from sd_training.data.samples.captions import Tokenizer
from sd_training.data.samples.sample import DrawSettings, TrainingSamples
from sd_training.data.workers import WorkerDeaths
from sd_training.errors import CheckpointError, Checks, ConfigError
from sd_training.log import get_logger, redacted_values

log = get_logger(__name__)


_DECISIVE = (
    *("path", "filters", "resolution", "buckets", "captions", "image_column", "caption_column", "tags"),
    "max_image_pixels",
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


@dataclass(frozen=True)
class _Opened:
    datasets: list[OpenDataset]
    order: RunOrder


class TrainingData(pl.LightningDataModule):
    """Delivers PixelBatches in the order of the run.

    Args:
        dataset: `dataset` of the config.
        plan: batch arithmetic for the number of training processes, `processes` × `sharing`.
        workers: loader processes per training process.
        tokenizers: text encoder → tokenizer; without any, batches have no tokens.
        draws: what is drawn per sample.
        captions_needed: whether samples without a caption are left out.
        run_dir: where bad samples are named; None names them nowhere.
        validation: `validation` of the config; None: no held-out data.
    """

    def __init__(
        self,
        *,
        dataset: DatasetConfig,
        plan: BatchPlan,
        workers: int,
        tokenizers: Mapping[str, Tokenizer],
        draws: DrawSettings,
        captions_needed: bool = True,
        run_dir: Path | None,
        validation: ValidationConfig | None = None,
    ) -> None:
        super().__init__()
        self.dataset, self.plan, self.workers = dataset, plan, workers
        self.run_dir = run_dir
        self.draws, self.tokenizers, self.captions_needed = draws, dict(tokenizers), captions_needed
        params = dataset.params
        self.table: BucketTable = training_sizes(params)
        self.bad_samples = BadSampleLog(run_dir, params.max_bad_fraction)
        self.held_out: HeldOutData | None = None
        """What the run is measured on."""
        if validation is not None and validation.path is not None:
            self.held_out = HeldOutData(
                dataset,
                validation,
                plan.micro_batch,
                tokenizers,
                draws,
                self.bad_samples,
                captions_needed=captions_needed,
            )
        self._opened: _Opened | None = None

    def prepare_data(self) -> None:
        """Builds the index; Lightning calls this on one process of each machine while the others wait."""
        checks = Checks()
        checks.run(self._open)
        if self.held_out is not None:
            checks.run(self.held_out.open)
        checks.finish()

    def setup(self, stage: str) -> None:
        """Opens the index; logs and writes to a file what is wrong with the shards."""
        datasets, problems = self.datasets(), Problems()
        if self.trainer is None or self.trainer.global_rank > 0:
            return
        for dataset in datasets:
            problems.merge(dataset.selection.problems)
        self.bad_samples.report(problems, "the data")
        if self.held_out is not None:
            self.held_out.report(datasets)

    def train_dataloader(self) -> TrainingLoader:
        """The micro-batches of this rank from the trainer's optimizer step on.

        Raises:
            ConfigError: the number of processes is not the plan's.
        """
        trainer = self.trainer
        if trainer is None:
            raise RuntimeError("train_dataloader needs a trainer; use loader(rank, first_step)")
        if trainer.world_size != (processes := self.plan.processes * self.plan.sharing):
            planned = counted(processes, "process", "processes")
            raise ConfigError(f"trainer.devices: the run was planned for {planned}, not {trainer.world_size}")
        return self.loader(trainer.global_rank // self.plan.sharing, lambda: trainer.global_step)

    def loader(self, rank: int, first_step: Callable[[], int]) -> TrainingLoader:
        """The micro-batches from optimizer step `first_step()` on; usable without a trainer.

        Args:
            rank: 0..`plan.processes`-1; processes that share their samples have one.
        """
        # Loader processes are forked; the tokenizers package would warn about its threads in every one of them.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        order, deaths = self._open().order, WorkerDeaths(self.run_dir)
        return TrainingLoader(
            self.samples(), order, self.plan, rank, self.workers, first_step, self.bad_samples, deaths
        )

    def samples(self) -> TrainingSamples:
        """Request → example."""
        return TrainingSamples(
            self.datasets(),
            self.table,
            self.dataset.params,
            self.tokenizers,
            self.draws,
            self.plan.global_batch,
        )

    def datasets(self) -> list[OpenDataset]:
        """The data sets of the run, opened; the first is the main one."""
        return self._open().datasets

    def name_of(self, sample_id: int) -> tuple[str, str]:
        """Location of the shard and key of a batch's sample; hostile text."""
        for dataset in self.datasets():
            if sample_id < len(dataset.index):
                return dataset.index.name(sample_id)
            sample_id -= len(dataset.index)
        raise ValueError(f"sample id {sample_id} beyond the end of all data sets")

    def report(self, *, of_run: bool = True, is_size_known: bool = True) -> DataReport:
        """What the data set is; usable without a trainer.

        Args:
            of_run: whether to report what the run draws from it.
            is_size_known: whether the size that images are trained at is that of a run.

        Raises:
            DataError: it cannot be used.
        """
        opened = self._open()
        return make_report(opened.datasets, opened.order, self.table, of_run, is_size_known)

    def fingerprint(self) -> str:
        """sha256 of the selected samples, their buckets and their order: equal means that the run sees the same."""
        digest = hashlib.sha256()
        for dataset in self.datasets():
            digest.update(dataset.index.fingerprint.encode())
            digest.update(dataset.selected.astype("<i8").tobytes())
            digest.update(dataset.bucket_of.astype("<i4").tobytes())
        shares = (
            f"Share(weight={e.weight!r}, start_step={e.start_step!r}, end_step={e.end_step!r})" for e in self._entries()
        )
        digest.update(f"({self.table.sizes!r}, [{', '.join(shares)}])".encode())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """The data's part of a checkpoint. The position is the optimizer step, which the trainer keeps."""
        opened = self._open()
        return {
            "options": _options(self.dataset),
            "fingerprint": self.fingerprint(),
            "num_samples": sum(len(dataset.selected) for dataset in opened.datasets),
            **_order(self.dataset, self.plan, self.draws.seed),
            "lanes": [order.settings.num_streams for order in opened.order.orders],
            "window": [order.window for order in opened.order.orders],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses to continue on other data, where the position would mean other samples, unless told to.

        Raises:
            CheckpointError: shards, filters, buckets, order, seed or global batch are not those of the checkpoint.
        """
        changed = _changes(state_dict, self.state_dict())
        if changed and self.dataset.params.allow_change:
            log.warning("dataset.params.allow_change: the run continues with other data: %s", "; ".join(changed))
        elif changed:
            raise CheckpointError(_other_data(changed))

    def _entries(self) -> list[DatasetConfig | MixEntry]:
        return [self.dataset, *self.dataset.mix]

    def _open(self) -> _Opened:
        if self._opened is not None:
            return self._opened
        params, plan, checks = self.dataset.params, self.plan, Checks()
        open_one = partial(
            open_dataset,
            params=params,
            table=self.table,
            batch_size=plan.global_batch,
            captions_needed=self.captions_needed,
        )
        made = [checks.run(partial(open_one, entry.type, entry.params)) for entry in self._entries()]
        checks.finish()
        datasets = [dataset for dataset in made if dataset is not None]
        orders = []
        for number, dataset in enumerate(datasets):
            seed = self.draws.seed + (number << 32)  # data sets of equal length must not be shuffled alike
            settings = OrderSettings(seed, plan.global_batch, params.lanes, params.window, params.resampled)
            block_of = dataset.index.numbers("block")[dataset.selected]
            orders.append(SampleOrder(settings, block_of, dataset.bucket_of))
        mixture = MixtureSchedule(self._entries(), self.draws.seed, plan.num_steps)
        self._opened = _Opened(datasets, RunOrder([d.selected for d in datasets], orders, mixture))
        return self._opened


def order_problem(
    before: Mapping[str, Any], dataset: DatasetConfig, plan: BatchPlan, seed: int, *, is_refused: bool
) -> str:
    """The error of a checkpoint whose samples come in another order, as far as options tell without the data; names
    changed options of the data as well. Empty where the order is the same, or may change.

    Args:
        before: what the checkpoint says about the data.
        dataset: of this start.
        plan: of this start.
        seed: of this start.
        is_refused: the run does not start anyway; changed options of the data are then named in any case.
    """
    if dataset.params.allow_change or not before:
        return ""
    order = _order_changes(before, _order(dataset, plan, seed))
    changed = _option_changes(before, _options(dataset))
    if not order:
        return f"options of the data have changed, too: {'; '.join(changed)}" if is_refused and changed else ""
    return _other_data([*changed, *order])


def _other_data(changed: Sequence[str]) -> str:
    return (
        f"the checkpoint belongs to a run on other data or in another order: {'; '.join(changed)}. Restore "
        "dataset, experiment.seed and batch_size × accumulation × processes, take another name, or set "
        "dataset.params.allow_change=true to go on with the new data"
    )


def _options(dataset: DatasetConfig) -> dict[str, Any]:
    """Dotted option → value of what decides which samples there are and in which buckets, without secrets."""
    params = dataset.params.model_dump()
    options = {f"dataset.params.{name}": params[name] for name in _DECISIVE}
    options |= {f"dataset.{name}": value for name, value in dataset.model_dump().items() if name != "params"}
    plain: dict[str, Any] = redacted_values(options)
    return plain


def _order(dataset: DatasetConfig, plan: BatchPlan, seed: int) -> dict[str, Any]:
    """What options say about the order."""
    return {
        "seed": seed,
        "global_batch": plan.global_batch,
        "resampled": dataset.params.resampled,
    }


def _option_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    known: Mapping[str, Any] = before.get("options", {})
    changes = (change for key, value in known.items() for change in differences(key, value, now.get(key)))
    return [change.sentence() for change in changes]


def _order_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changed = [key for key in _OPTION_OF if key in now and now[key] != before.get(key)]
    return [f"{_OPTION_OF[key]} was {shown(before.get(key))}, now {shown(now[key])}" for key in changed]


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, what makes the stream of samples another one than that of a checkpoint."""
    if now["fingerprint"] == before.get("fingerprint"):
        return _order_changes(before, now)
    changed = _option_changes(before, now["options"])
    count = f"{counted(before.get('num_samples', 0), 'sample')} took part, now {now['num_samples']:,}"
    if not changed:
        changed.append(f"the files of dataset.params.path, or what was chosen of them, have changed: {count}")
    elif now["num_samples"] != before.get("num_samples"):
        changed.append(count)
    of_options = {
        key: value for key, value in now.items() if key not in ("lanes", "window")
    }  # these may follow from the data
    return changed + _order_changes(before, of_options)
