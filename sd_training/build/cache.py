"""Making a cache of latents and text states, and opening one for a run; `data/samples/cache.py` describes the files.

The builder encodes as the training step does: the same family, precisions and batch size, so that in fp32 a row has the
bits that the step would compute (kernels round in another way for other batch sizes; the neighbours in a batch change
nothing).
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from sd_training.build.models import text_precision, vae_precision
from sd_training.build.plan import Plan
from sd_training.checkpoint.folder import flush, flush_file, replace_text, system_error, whole_file, write_failure
from sd_training.config.schema import Config
from sd_training.config.value_types import output_path
from sd_training.data.datamodule import TrainingData
from sd_training.data.loader import worker_options
from sd_training.data.samples.cache import (
    CACHE_FILE,
    DTYPES,
    FORMAT,
    ROWS_FILE,
    LatentCache,
    Storage,
    cached_crop,
    caption_digest,
    data_key,
    identity_of,
    moments_file,
    read_chunk,
    texts_file,
)
from sd_training.data.samples.captions import Tokenizer
from sd_training.data.samples.image import CropRequest
from sd_training.errors import BadSample, ConfigError, DataError, SaveError
from sd_training.export.pipeline import NOT_SETTINGS
from sd_training.log import get_logger
from sd_training.models.execution import autocast_weights
from sd_training.models.family import AUTOCAST_DTYPE, Family, autocast
from sd_training.training import scaled_pixels

log = get_logger(__name__)

_CHUNK_BYTES = 2**27
"""About as large is a chunk: small enough to hold in memory and to lose by a kill, large enough for few files."""
_ENCODER_WEIGHTS = ("encoder.", "quant_conv.")
_NO_FUNCTION_OF = NOT_SETTINGS | {"scaling_factor", "shift_factor", "latents_mean", "latents_std", "sample_size"}
"""Settings that the posterior of an autoencoder and the states of a text encoder do not depend on."""


# --- What a cache was made with ---


def open_cache(plan: Plan, family: Family) -> LatentCache | None:
    """The cache of a run, checked to be of its model; None where none is asked for. The data is checked when it is
    opened (`TrainingData.samples`).

    Raises:
        ConfigError: it cannot be used, or this run needs what no cache has.
    """
    config = plan.config
    if config.dataset.cache.path is None:
        return None
    cache, params = LatentCache(output_path(config.dataset.cache.path)), config.dataset.params
    stored = cache.storage
    problems = uncached_needs(config, has_text=bool(stored.text_shapes))
    if params.flip_prob > 0 and not stored.has_flips:
        problems.append(f"dataset.params.flip_prob: {params.flip_prob:g}, but the cache was made with 0; make it anew")
    if (params.crop == "random") != (stored.num_crops is not None):
        cuts = "the centre of every picture" if stored.num_crops is None else f"{stored.num_crops} random cuts of it"
        problems.append(
            f"dataset.params.crop: {params.crop}, but the cache holds {cuts}; make it anew with other crops="
        )
    if problems:
        raise ConfigError(problems)
    cache.check("model", model_key(plan, family, list(stored.text_shapes)))
    return cache


def uncached_needs(config: Config, *, has_text: bool) -> list[str]:
    """What a training of this config needs and no cache has.

    Args:
        has_text: whether the cache holds states of captions.
    """
    problems = []
    if config.objective.masked_loss != "none":
        problems.append("objective.masked_loss: a cache holds no alpha of the images; use none, or train without cache")
    if has_text and config.model.trains_text:
        option = config.model.text_option
        problems.append(f"{option}: the states of a trained encoder change; make the cache with text=none")
    return problems


def model_key(plan: Plan, family: Family, encoders: Sequence[str]) -> dict[str, Any]:
    """What decides the rows of a cache, of the model; with digests of weights and tokenizers.

    Args:
        encoders: text encoders whose states are stored.
    """
    model, vae = plan.config.model, family.vae
    precision, settings = vae_precision(model, plan.precision), dict(vae.config)
    key = {
        "weights of model.vae": _digest(vae, settings, precision, _ENCODER_WEIGHTS),
        "model.vae_precision": precision,
        "model.vae_tiling": model.vae_tiling,
        "trainer.matmul_precision": plan.config.trainer.matmul_precision,
    }
    for name in encoders:
        network, precision = family.parts[name], text_precision(model, plan.precision).replace("no", "fp32")
        key[f"weights of model.{name}"] = _digest(network, network.config.to_dict(), precision)
        key[f"tokenizer of model.{name}"] = _tokenizer_digest(family.tokenizers()[name])
        key["model.text_encoder_precision"] = precision
        key["model.family"] = family.name
        key["layers and pooling of model.text_encoders"] = family.text_settings
    return key


def _digest(network: nn.Module, settings: Mapping[str, Any], precision: str, prefix: tuple[str, ...] = ("",)) -> str:
    """sha256 of what decides a network's output: its weights, as autocast of this precision uses them, whether they
    have been cast already or not, and its settings. Tensors are hashed by several threads.

    Args:
        prefix: beginnings of the names of the weights that count.
    """
    cast = {id(weight) for weight in autocast_weights(network)} if (dtype := AUTOCAST_DTYPE[precision]) else set()
    state = {name: value for name, value in network.state_dict(keep_vars=True).items() if name.startswith(prefix)}
    weights = {name: value.to(dtype) if id(value) in cast else value for name, value in state.items()}

    def of_tensor(item: tuple[str, Tensor]) -> str:
        name, tensor = item
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return f"{name} {tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()}"

    with ThreadPoolExecutor() as pool:
        tensors = list(pool.map(of_tensor, sorted(weights.items())))
    known = {name: value for name, value in settings.items() if name[0] != "_" and name not in _NO_FUNCTION_OF}
    return hashlib.sha256(json.dumps([tensors, known], sort_keys=True, default=str).encode()).hexdigest()


def _tokenizer_digest(tokenizer: Tokenizer) -> str:
    own = tokenizer.tokenizer
    rules = json.loads(own.backend_tokenizer.to_str()) if own.is_fast else {"vocabulary": own.get_vocab()}
    # The latest call sets these two; lengths are ours.
    rules |= {"truncation": None, "padding": None}
    words = [tokenizer.length, tokenizer.is_lowercase, tokenizer.prefix, tokenizer.suffix]
    named = [*words, own.pad_token_id, own.eos_token_id]
    return hashlib.sha256(json.dumps([rules, named], sort_keys=True).encode()).hexdigest()


# --- Making one ---


class _Job(NamedTuple):
    """One chunk."""

    name: str
    """Of its file."""
    rows: int
    """Of the chunk."""
    num_bytes: int
    first: int
    """Caption of its first row; of pictures the rank in the bucket."""
    dataset: int = -1
    """-1: captions."""
    bucket: int = -1


class _Picked(NamedTuple):
    """Pictures that are encoded together."""

    dataset: int
    bucket: int
    samples: list[int]
    crop: int


@dataclass
class _Pictures(Dataset[Any]):
    """Reads pictures in loader processes."""

    data: TrainingData
    storage: Storage

    def __getitem__(self, picked: _Picked) -> tuple[Tensor, dict[int, str], DataError | None]:
        """[n, 3, H, W] uint8, zeros for those that cannot be used; why these cannot; why the builder cannot go on."""
        size, params = self.data.table.sizes[picked.bucket], self.data.dataset.params
        pixels, bad = torch.zeros(len(picked.samples), 3, *size, dtype=torch.uint8), dict[int, str]()
        for row, sample in enumerate(picked.samples):
            wanted = CropRequest(*size, *cached_crop(self.storage, sample, picked.crop))
            try:
                picture = self.data.datasets[picked.dataset].reader.picture(sample, wanted, params.max_image_pixels)
                pixels[row] = torch.from_numpy(picture.pixels)
            except BadSample as reason:
                bad[row] = str(reason)
            except DataError as error:
                return pixels, bad, error
        return pixels, bad, None


class CacheBuilder:
    """Makes the chunks of a cache that are not there yet.

    Args:
        plan: of the training; its batch size is that of the encoders.
        family: autoencoder and text encoders with their weights; those of the denoiser are not needed.
        data: of the training, without a cache.
        folder: of the cache.
        device: encodes.
        dtype: of moments and states, a key of `DTYPES`.
        num_crops: random cuts per picture; None: the centre.
        text: `none`; `pooled`: text encoders of which only a pooled vector is read; `states`: all text encoders.

    Raises:
        ConfigError: the folder holds another cache, or captions cannot be stored.
        DataError: the data cannot be used.
    """

    def __init__(
        self,
        plan: Plan,
        family: Family,
        data: TrainingData,
        folder: Path,
        device: torch.device,
        *,
        dtype: str,
        num_crops: int | None,
        text: str,
    ) -> None:
        self.plan, self.family, self.data, self.folder = plan, family, data, folder
        self.device, self.tokenizers = device, family.tokenizers()
        for network in (family.vae, *family.text_encoders().values()):
            network.to(device)
        shapes = {} if text == "none" else self._text_shapes(text)
        if problems := uncached_needs(plan.config, has_text=bool(shapes)):
            raise ConfigError(problems)
        captions = self._captions() if shapes else {}
        self.digests = np.array(sorted(captions), dtype=np.int64)
        self.captions = [captions[digest] for digest in self.digests.tolist()]
        item = DTYPES[dtype].itemsize
        variants = (num_crops or 1) * (2 if data.dataset.params.flip_prob > 0 else 1)
        row_bytes = [item * variants * 2 * int(np.prod(data.draws.grid.shape(*size))) for size in data.table.sizes]
        text_bytes = sum(item * int(np.prod(states) + np.prod(pooled)) for states, pooled in shapes.values())
        self.storage = Storage(
            dtype=dtype,
            num_crops=num_crops,
            has_flips=data.dataset.params.flip_prob > 0,
            text=text,
            text_shapes=shapes,
            batch_size=plan.batch.micro_batch,
            rows_of_chunk=[max(1, _CHUNK_BYTES // size) for size in row_bytes],
            texts_of_chunk=max(1, _CHUNK_BYTES // max(1, text_bytes)),
        )
        self.made_with = {
            "model": model_key(plan, family, list(shapes)),
            "data": data_key(data.entries, data.datasets, data.table, has_text=bool(shapes)),
            "rows": {
                "captions": _array_digest(self.digests),
                "selected samples": _array_digest(*(dataset.selected for dataset in data.datasets)),
                "buckets of samples": _array_digest(*(dataset.bucket_of for dataset in data.datasets)),
            },
        }
        self.identity = identity_of(self.made_with, self.storage)
        self.jobs = [*self._moment_jobs(row_bytes), *self._text_jobs(text_bytes)]
        self._check_folder()

    def missing(self, rank: int, world: int) -> list[_Job]:
        """Chunks that are still to be made. Files of a rank's own share are read, and must have the content they were
        written with; of the others the name counts, which a chunk has only once it is whole.

        Args:
            rank, world: the share is every `world`-th chunk from number `rank` on.
        """
        return [
            job
            for number, job in enumerate(self.jobs)
            if not (self._is_whole(job.name) if number % world == rank else (self.folder / job.name).exists())
        ]

    def write_plan(self) -> None:
        """The files that say what the cache holds."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {"captions": torch.from_numpy(self.digests)} if self.captions else {}
        for number, dataset in enumerate(self.data.datasets):
            tensors[f"samples.{number}"] = torch.from_numpy(dataset.selected)
            tensors[f"bucket.{number}"] = torch.from_numpy(dataset.bucket_of)
            tensors[f"rank.{number}"] = torch.from_numpy(_ranks(dataset.bucket_of))
        self._write(ROWS_FILE, tensors, {})
        written = {"format": FORMAT, "storage": asdict(self.storage), "made_with": self.made_with}
        replace_text(self.folder / CACHE_FILE, json.dumps(written, indent=1) + "\n")

    def make(self, jobs: Sequence[_Job], advance: Callable[[int], object]) -> dict[tuple[str, str], str]:
        """Makes chunks one after the other; pictures are read ahead by `system.workers` processes.

        Args:
            advance: called with the number of rows after each batch.

        Returns:
            Shard and key of each picture that cannot be used → why.
        """
        bad = dict[tuple[str, str], str]()
        batches = self._read_pictures([job for job in jobs if job.dataset >= 0])
        for job in jobs:
            if job.dataset < 0:
                self._write(job.name, self._text_rows(job, advance), {})
                continue
            rows, reasons = self._moment_rows(job, batches, advance)
            self._write(job.name, {"moments": rows}, reasons)
            samples, index = self._samples_of(job), self.data.datasets[job.dataset].index
            bad |= {index.name(int(samples[row])): reason for row, reason in reasons.items()}
        return bad

    def _moment_jobs(self, row_bytes: Sequence[int]) -> Iterator[_Job]:
        for number, dataset in enumerate(self.data.datasets):
            counts = np.bincount(dataset.bucket_of, minlength=len(self.data.table.sizes)).tolist()
            for bucket, (count, rows) in enumerate(zip(counts, self.storage.rows_of_chunk, strict=True)):
                for chunk, first in enumerate(range(0, count, rows)):
                    name, own = moments_file(number, self.data.table.sizes[bucket], chunk), min(rows, count - first)
                    yield _Job(name, own, own * row_bytes[bucket], first, number, bucket)

    def _text_jobs(self, row_bytes: int) -> Iterator[_Job]:
        rows, total = self.storage.texts_of_chunk, len(self.captions)
        for chunk, first in enumerate(range(0, total, rows)):
            own = min(rows, total - first)
            yield _Job(texts_file(chunk), own, own * row_bytes, first)

    def _text_shapes(self, mode: str) -> dict[str, list[list[int]]]:
        """Text encoder → shapes of what is read from it, of those that are stored; found by encoding a caption."""
        shapes = {}
        for name in self.tokenizers:
            states, pooled, _ = self._encode_captions(name, [""])
            if mode == "states" or not states.numel():
                shapes[name] = [list(states.shape[1:]) or [0], list(pooled.shape[1:]) or [0]]
        if not shapes:
            raise ConfigError(
                f"text: pooled, but states are read from every text encoder of {self.family.name}; use states or none"
            )
        return shapes

    def _captions(self) -> dict[int, str]:
        """Digest → caption, of all that samples may have, and of the empty one, which dropped captions have.

        Raises:
            ConfigError: captions are arranged anew at every visit.
        """
        found = {caption_digest(""): ""}
        for dataset in self.data.datasets:
            for sample in dataset.selected.tolist():
                try:
                    captions = dataset.all_captions(sample)
                except BadSample:  # such a visit is replaced in training, too
                    continue
                for caption in captions:
                    if found.setdefault(caption_digest(caption), caption) != caption:
                        raise ConfigError("text: two captions have one digest; use text=none")
        return found

    def _check_folder(self) -> None:
        """Raises ConfigError where another cache is in the folder."""
        if not (self.folder / CACHE_FILE).exists():
            return
        other = LatentCache(self.folder)
        differ = [text for part, key in self.made_with.items() for text in other.differences(part, key)]
        if other.identity != self.identity:
            reason = "; ".join(differ) or "it is stored in another way"
            raise ConfigError(f"out: {self.folder} holds another cache: {reason}; give another folder, or delete it")

    def _samples_of(self, job: _Job) -> NDArray[np.int64]:
        dataset = self.data.datasets[job.dataset]
        return dataset.selected[dataset.bucket_of == job.bucket][job.first : job.first + job.rows]

    def _read_pictures(self, jobs: Sequence[_Job]) -> Iterator[tuple[Tensor, dict[int, str], DataError | None]]:
        """The pictures of jobs in the order in which `_moment_rows` takes them."""
        size, workers = self.storage.batch_size, self.plan.config.system.workers
        picked = [
            _Picked(job.dataset, job.bucket, samples[start : start + size].tolist(), crop)
            for job in jobs
            for samples in [self._samples_of(job)]
            for start in range(0, job.rows, size)
            for crop in range(self.storage.num_crops or 1)
        ]
        pictures = _Pictures(self.data, self.storage)
        return iter(DataLoader(pictures, batch_size=None, sampler=picked, **worker_options(workers)))

    def _moment_rows(
        self, job: _Job, batches: Iterator[Any], advance: Callable[[int], object]
    ) -> tuple[Tensor, dict[int, str]]:
        """[rows, crops × flips, 2C, h, w] moments, and why rows are empty."""
        stored, bad = self.storage, dict[int, str]()
        channels, height, width = self.data.draws.grid.shape(*self.data.table.sizes[job.bucket])
        shape = (job.rows, stored.num_variants, 2 * channels, height, width)
        rows, size = torch.zeros(shape, dtype=DTYPES[stored.dtype]), stored.batch_size
        for start in range(0, job.rows, size):
            for crop in range(stored.num_crops or 1):
                pixels, reasons, error = next(batches)
                if error is not None:
                    raise error
                bad |= {start + row: reason for row, reason in reasons.items()}
                for flip in (False, True) if stored.has_flips else (False,):
                    own = self._encode_pixels(pixels.flip(3) if flip else pixels)[: len(pixels)].cpu()
                    rows[start : start + len(own), stored.variant(crop, flip)] = self._stored(own, "moments")
            advance(len(pixels))
        rows[list(bad)] = 0
        return rows, bad

    def _text_rows(self, job: _Job, advance: Callable[[int], object]) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        captions, size = self.captions[job.first : job.first + job.rows], self.storage.batch_size
        for start in range(0, job.rows, size):
            own = captions[start : start + size]
            for name in self.storage.text_shapes:
                states, pooled, mask = self._encode_captions(name, own)
                named = {"states": states, "pooled": pooled}
                for part, value in {**named, "mask": mask}.items():
                    value = self._stored(value.cpu(), f"{part} of {name}") if part in named else value
                    parts.setdefault(f"{name}.{part}", []).append(
                        value.reshape(len(own), *value.shape[1:]) if value.numel() else torch.empty(len(own), 0)
                    )
            advance(len(own))
        return {name: torch.cat(values) for name, values in parts.items()}

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        """Moments of pictures [n, 3, H, W] uint8, encoded as many at once as in training; rows beyond n are copies."""
        given = _filled(pixels, self.plan.batch.micro_batch).to(self.device)
        model = self.plan.config.model
        return self.family.moments(scaled_pixels(given), vae_precision(model, self.plan.precision), model.vae_batch)

    @torch.no_grad()
    def _encode_captions(self, name: str, captions: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """States, pooled vectors and masks of captions, encoded as many at once as in training."""
        encoded = [self.tokenizers[name].encode(caption) for caption in captions]
        tokens, mask = (torch.from_numpy(np.stack(column)) for column in zip(*encoded, strict=True))
        given = (_filled(column, self.plan.batch.micro_batch).to(self.device) for column in (tokens, mask))
        with autocast(self.device, text_precision(self.plan.config.model, self.plan.precision)):
            output = self.family.encode_text(name, *given)
        states, pooled = (value[: len(captions)] for value in output)
        return states, pooled, mask

    def _stored(self, values: Tensor, what: str) -> Tensor:
        """In the type of the cache.

        Raises:
            ConfigError: the type cannot hold them.
        """
        stored = values.to(DTYPES[self.storage.dtype])
        if not bool(stored.isfinite().all()):
            largest = float(values.abs().max())
            raise ConfigError(
                f"dtype: {what} are up to {largest:.4g}, which {self.storage.dtype} cannot hold; use dtype=fp32 or bf16"
                if np.isfinite(largest)
                else f"model: {what} are not finite; see model.vae_precision and model.text_encoder_precision"
            )
        return stored

    def _write(self, name: str, tensors: dict[str, Tensor], bad: Mapping[int, str]) -> None:
        """One file, which has its name once it is whole and on the disk."""
        metadata = {"identity": self.identity, "bad": json.dumps(bad), "sha256": _content_digest(tensors)}
        try:
            with whole_file(self.folder / name) as beside:
                save_file({key: value.contiguous() for key, value in tensors.items()}, beside, metadata)
                flush_file(beside)
            flush(self.folder)
        except (OSError, SafetensorError) as error:
            raise SaveError(f"out: {write_failure(name, self.folder, system_error(error) or error)}") from error

    def _is_whole(self, name: str) -> bool:
        try:
            tensors, metadata = read_chunk(self.folder / name)
            return bool(metadata["identity"] == self.identity and metadata["sha256"] == _content_digest(tensors))
        except (OSError, SafetensorError, LookupError, TypeError):
            return False


def _ranks(bucket_of: NDArray[np.int32]) -> NDArray[np.int64]:
    """[n] how many samples before each are in its bucket."""
    ranks = np.empty(len(bucket_of), dtype=np.int64)
    for bucket in np.unique(bucket_of):
        own = bucket_of == bucket
        ranks[own] = np.arange(own.sum())
    return ranks


def _filled(rows: Tensor, count: int) -> Tensor:
    """`rows` with copies of the last one behind, so that there are `count`."""
    return torch.cat([rows, rows[-1:].expand(count - len(rows), *rows.shape[1:])])


def _array_digest(*arrays: NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _content_digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)} ".encode())
        digest.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
