"""The data of a run as Lightning sees it: index, selection and order put together."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from transformers import PreTrainedTokenizerBase

from sd_training.config.batch_plan import BatchPlan
from sd_training.config.class_prompts import read_class_prompts
from sd_training.config.filter_grammar import parse_filters
from sd_training.config.schema import DatasetConfig
from sd_training.data.bad_samples import BadSampleLog
from sd_training.data.captions import Prompts, Tokenizer
from sd_training.data.dataset import DrawShapes, TrainingSamples
from sd_training.data.index import DatasetIndex, load_index
from sd_training.data.loader import TrainingLoader
from sd_training.data.report import DataReport, make_report
from sd_training.data.selection import Selection, select
from sd_training.data.shards import expand_shards
from sd_training.data.tar_source import TarSource
from sd_training.errors import CheckpointError, ConfigError
from sd_training.rank_log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class _Opened:
    index: DatasetIndex
    selection: Selection
    prompts: Prompts | None


class TrainingData(pl.LightningDataModule):
    """Delivers PixelBatches in the order of the run.

    Args:
        dataset: `dataset` of the config.
        plan: batch arithmetic; its `processes` must be the number of training processes.
        workers: loader processes per training process.
        seed: of every draw.
        dropout_prob: share of samples with the empty caption.
        tokenizer: None gives batches without tokens.
        latent_shape: (C, h, w) of the latents that noise is drawn for.
        draw_noise: whether the noise of the forward process is drawn.
        run_dir: where bad samples are named; None names them nowhere.
    """

    def __init__(
        self,
        *,
        dataset: DatasetConfig,
        plan: BatchPlan,
        workers: int,
        seed: int,
        dropout_prob: float,
        tokenizer: PreTrainedTokenizerBase | None,
        latent_shape: tuple[int, int, int],
        draw_noise: bool,
        run_dir: Path | None,
    ) -> None:
        super().__init__()
        self.dataset, self.plan, self.workers = dataset, plan, workers
        self.draws = DrawShapes(seed, dropout_prob, latent_shape, draw_noise)
        self.tokenizer = Tokenizer(tokenizer)
        self.bad_samples = BadSampleLog(run_dir, dataset.params.max_bad_fraction)
        self._opened: _Opened | None = None

    def prepare_data(self) -> None:
        """Builds the index; Lightning calls this on one process of each machine while the others wait."""
        self._open()

    def setup(self, stage: str) -> None:
        """Opens the index, and says and writes down what is wrong with the shards."""
        problems = self._open().selection.problems
        if self.trainer is not None and self.trainer.global_rank == 0 and problems.total():
            log.warning("problems in the data: %s", problems.text())
            for problem in problems.named():
                self.bad_samples.name(problem)

    def train_dataloader(self) -> TrainingLoader:
        """The micro-batches of this rank from the trainer's optimizer step on.

        Raises:
            ConfigError: the number of processes is not the plan's.
        """
        trainer = self.trainer
        if trainer is None:
            raise RuntimeError("train_dataloader needs a trainer; use loader(rank, first_step)")
        if trainer.world_size != self.plan.processes:
            raise ConfigError(
                f"trainer.devices: the run was planned for {self.plan.processes} processes, not {trainer.world_size}"
            )
        return self.loader(trainer.global_rank, lambda: trainer.global_step)

    def loader(self, rank: int, first_step: Callable[[], int]) -> TrainingLoader:
        """The micro-batches of `rank` from optimizer step `first_step()` on; usable without a trainer."""
        # Loader processes are forked; the tokenizers package would warn about its threads in every one of them.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return TrainingLoader(self.samples(), self.plan, rank, self.workers, first_step, self.bad_samples)

    def samples(self) -> TrainingSamples:
        """The samples by visit."""
        opened = self._open()
        return TrainingSamples(
            source=TarSource(opened.index),
            survivors=opened.selection.survivors,
            params=self.dataset.params,
            prompts=opened.prompts,
            tokenizer=self.tokenizer,
            draws=self.draws,
        )

    def report(self) -> DataReport:
        """What the data set is; usable without a trainer.

        Raises:
            DataError: it cannot be used.
        """
        opened = self._open()
        return make_report(opened.index, opened.selection, self.plan)

    def fingerprint(self) -> str:
        """sha256 of the samples that survive, in their order: equal means that the run sees the same data."""
        opened = self._open()
        digest = hashlib.sha256(opened.index.fingerprint.encode())
        digest.update(opened.selection.survivors.astype("<i8").tobytes())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint says about the data. The position is the optimizer step, which the trainer keeps."""
        return {
            "fingerprint": self.fingerprint(),
            "num_samples": len(self._open().selection.survivors),
            "seed": self.draws.seed,
            "global_batch": self.plan.global_batch,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuses to continue on other data, where the position would mean other samples.

        Raises:
            CheckpointError: shards, filters, seed or global batch are not those of the checkpoint.
        """
        now = self.state_dict()
        changed = [
            f"{key} was {state_dict.get(key)}, now {new}" for key, new in now.items() if new != state_dict.get(key)
        ]
        if changed:
            raise CheckpointError(
                f"the checkpoint belongs to a run on other data or in another order: {'; '.join(changed)}. Restore "
                "dataset.params, experiment.seed and batch_size × accumulation × processes, or take another name"
            )

    def _open(self) -> _Opened:
        if self._opened is None:
            params = self.dataset.params
            comparisons, problems = parse_filters(params.filters)
            if problems:
                raise ConfigError(problems)
            prompts = self._prompts()
            folder = None if params.index_dir is None else Path(params.index_dir).expanduser()
            index = load_index(expand_shards(params.path), folder, [c.field for c in comparisons])
            self._opened = _Opened(index, select(index, comparisons, prompts), prompts)
        return self._opened

    def _prompts(self) -> Prompts | None:
        if self.dataset.type != "ClassificationWebDataset":
            return None
        prompts, problems = read_class_prompts(self.dataset.params)
        if problems:
            raise ConfigError(problems)
        return prompts
