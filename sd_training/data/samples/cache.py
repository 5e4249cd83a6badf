"""Latents and text states that were encoded before training: the folder that `scripts/cache_latents.py` writes, as the
loader reads it.

A row holds the *moments* of an autoencoder's posterior, so that every visit draws its own latents by its position
(design contract 3), and the states of a caption that a visit has drawn are found by the caption's text. Which samples
there are, their buckets and their captions are still read from the data set; only decoding and encoding are replaced.

cache.json                     what the cache was made with, and how it is stored
rows.safetensors               per data set its samples, the bucket of each, and its rank among those of the bucket; and
                               the digests of all captions, ascending
moments-D-HxW-N.safetensors    `moments` [rows, crops × flips, 2C, h, w] of chunk N of a bucket of data set D
texts-N.safetensors            per text encoder `E.states` [rows, L, D], `E.pooled` [rows, P] and `E.mask` [rows, L]

Files are mapped, and shared by all processes of a machine. A chunk has its name only once it is whole; its metadata
says which cache it belongs to (`identity`), and why rows of pictures that cannot be used are empty (`bad`).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sd_training.config.data_schema import DatasetConfig, MixEntry, read_class_prompts
from sd_training.config.plan import counted
from sd_training.data.dataset import OpenDataset
from sd_training.data.order.buckets import BucketTable
from sd_training.data.order.order import generator
from sd_training.errors import BadSample, ConfigError, DataError
from sd_training.types import as_array

CACHE_FILE, ROWS_FILE = "cache.json", "rows.safetensors"
FORMAT = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MAX_MAPPED = 4096
"""Chunks that a process keeps mapped: Linux allows a process 65,530 mappings by default (`vm.max_map_count`)."""
_REMEDY = "make the cache anew with scripts/cache_latents.py, or restore what differs"


@dataclass(frozen=True)
class Storage:
    """How a cache is stored."""

    dtype: str
    """Of moments and states: a key of `DTYPES`."""
    num_crops: int | None
    """Cuts of every picture; None: the centre."""
    has_flips: bool
    """Whether every cut is stored mirrored as well."""
    text: str
    """`none`, `pooled` or `states`."""
    text_shapes: dict[str, list[list[int]]]
    """Text encoder → shapes of states and pooled vector of a caption; [0] where the family does not read it."""
    batch_size: int
    """Rows that were encoded at once: with other numbers kernels may round in another way."""
    rows_of_chunk: list[int]
    """Rows of a chunk of each bucket."""
    texts_of_chunk: int
    """Captions of a chunk."""

    @property
    def num_variants(self) -> int:
        """Rows of a picture."""
        return (self.num_crops or 1) * (2 if self.has_flips else 1)

    def variant(self, crop: int, flip: bool) -> int:
        """Place of a cut, perhaps mirrored, among those of its picture."""
        return crop * 2 + flip if self.has_flips else crop


class StoredText(NamedTuple):
    """A caption's row of one text encoder, as `as_array` gives it."""

    states: NDArray[Any]
    """[L, D]; empty where only the pooled vector is read."""
    pooled: NDArray[Any]
    """[P]; empty where only states are read."""
    mask: NDArray[np.bool_]
    """[L] bool, as of the tokens."""


def cached_crop(storage: Storage, sample: int, crop: int) -> tuple[float | None, float | None]:
    """`top` and `left` of a cut's `CropRequest`: the same for all runs."""
    if storage.num_crops is None:
        return None, None
    top, left = generator(0, "cached_crop", sample, crop).random(2).tolist()
    return top, left


def caption_digest(caption: str) -> int:
    """What a caption is found by."""
    return int.from_bytes(hashlib.blake2b(caption.encode(), digest_size=8).digest(), "big", signed=True)


def moments_file(dataset: int, size: tuple[int, int], number: int) -> str:
    """Name of a chunk of pictures.

    Args:
        size: height and width of the bucket [pixels].
    """
    return f"moments-{dataset}-{size[0]}x{size[1]}-{number:05d}.safetensors"


def texts_file(number: int) -> str:
    """Name of a chunk of captions."""
    return f"texts-{number:05d}.safetensors"


def read_chunk(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors, mapped, and metadata of a file. Raises what safetensors raises: OSError, SafetensorError."""
    with safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118 - it is no mapping


class _Chunk(NamedTuple):
    arrays: dict[str, NDArray[Any]]
    bad: dict[str, str]
    """Row → why its picture cannot be used."""


@dataclass(eq=False)
class LatentCache:
    """A cache for reading. Copied into loader processes, each of which maps the files that it reads.

    Args:
        path: the folder.

    Raises:
        ConfigError: there is no cache.
    """

    path: Path
    storage: Storage = field(init=False)
    made_with: dict[str, dict[str, Any]] = field(init=False)
    """`model`, `data` and `rows` → name of something that decides the rows → its value or digest. `rows` is not
    compared with a run, which may have fewer samples: only with what is to be written into the same folder."""
    _open: dict[str, _Chunk] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        try:
            written = json.loads((self.path / CACHE_FILE).read_text(encoding="utf-8"))
            if written["format"] != FORMAT:
                raise ValueError(f"it has format {written['format']}, this version reads format {FORMAT}")
            self.storage, self.made_with = Storage(**written["storage"]), written["made_with"]
        except FileNotFoundError as error:
            raise ConfigError(
                f"dataset.cache.path: {self.path} holds no {CACHE_FILE}; make it with scripts/cache_latents.py"
            ) from error
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"dataset.cache.path: {self.path / CACHE_FILE} cannot be used: {error}") from error
        self.identity = identity_of(self.made_with, self.storage)

    def check(self, part: str, now: Mapping[str, Any]) -> None:
        """Compares a part of what the cache was made with.

        Args:
            part: `model` or `data`.
            now: the same of this run.

        Raises:
            ConfigError: naming everything that differs.
        """
        if differ := self.differences(part, now):
            raise ConfigError(
                f"dataset.cache.path: {self.path} was made for something else: {'; '.join(differ)}; {_REMEDY}"
            )

    def differences(self, part: str, now: Mapping[str, Any]) -> list[str]:
        """As `check`: everything that differs."""
        before = self.made_with.get(part, {})
        return [_difference(name, before.get(name), value) for name, value in now.items() if before.get(name) != value]

    def check_samples(self, datasets: Sequence[OpenDataset], table: BucketTable) -> None:
        """Checks that every selected sample has its row, and that all chunks are there.

        Raises:
            ConfigError: naming what is missing.
        """
        for number, dataset in enumerate(datasets):
            places = self._places(number, dataset.selected)
            if count := int((places < 0).sum()):
                raise ConfigError(
                    f"dataset.cache.path: {self.path} lacks {count:,} of {counted(len(places), 'selected sample')} of "
                    f"data set {number}: filters keep more samples than when it was made; {_REMEDY}"
                )
            if count := int((self._rows(f"bucket.{number}")[places] != dataset.bucket_of).sum()):
                raise ConfigError(
                    f"dataset.cache.path: {self.path} has {counted(count, 'sample')} in other buckets: small buckets "
                    "are joined by system.batch_size × system.gradient_accumulation × processes (processes= of "
                    f"scripts/cache_latents.py) and by filters; {_REMEDY}"
                )
        files = list(self.files(table))
        if missing := [name for name in files if not (self.path / name).exists()]:
            raise ConfigError(
                f"dataset.cache.path: {self.path} is not finished: {len(missing):,} of {counted(len(files), 'chunk')} "
                f"are missing, such as {missing[0]}; run the same scripts/cache_latents.py again, which makes the rest"
            )

    def files(self, table: BucketTable) -> Iterator[str]:
        """Names of all chunks."""
        for number in range(sum(name.startswith("samples.") for name in self._chunk(ROWS_FILE).arrays)):
            counts = np.bincount(self._rows(f"bucket.{number}"), minlength=len(table.sizes))
            for size, count, rows in zip(table.sizes, counts.tolist(), self.storage.rows_of_chunk, strict=True):
                yield from (moments_file(number, size, chunk) for chunk in range(-(-count // rows)))
        if self.storage.text_shapes:
            chunks = -(-len(self._rows("captions")) // self.storage.texts_of_chunk)
            yield from map(texts_file, range(chunks))

    def moments(self, dataset: int, sample: int, bucket: int, size: tuple[int, int], variant: int) -> NDArray[Any]:
        """[2C, h, w] mean and standard deviation, as `as_array` gives the stored type; a view of the mapped file.

        Raises:
            BadSample: the picture could not be used when the cache was made.
            DataError: the cache is damaged.
        """
        place = int(np.searchsorted(self._rows(f"samples.{dataset}"), sample))
        number, row = divmod(int(self._rows(f"rank.{dataset}")[place]), self.storage.rows_of_chunk[bucket])
        chunk = self._chunk(moments_file(dataset, size, number))
        if chunk.bad and (reason := chunk.bad.get(str(row))) is not None:
            raise BadSample(reason)
        return chunk.arrays["moments"][row, variant]

    def text(self, encoder: str, caption: str) -> StoredText:
        """The row of a caption.

        Raises:
            DataError: the caption is not in the cache, or the cache is damaged.
        """
        digests, digest = self._rows("captions"), caption_digest(caption)
        place = int(np.searchsorted(digests, digest))
        if place == len(digests) or digests[place] != digest:
            raise DataError(f"dataset.cache.path: {self.path} has no states of the caption {caption[:80]!r}; {_REMEDY}")
        number, row = divmod(place, self.storage.texts_of_chunk)
        arrays = self._chunk(texts_file(number)).arrays
        return StoredText(*(arrays[f"{encoder}.{part}"][row] for part in StoredText._fields))

    def _places(self, dataset: int, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where samples are among those of the cache, -1 where they are not."""
        known = self._rows(f"samples.{dataset}")
        places = np.minimum(np.searchsorted(known, samples), len(known) - 1)
        return np.where(known[places] == samples, places, -1)

    def _rows(self, name: str) -> NDArray[Any]:
        return self._chunk(ROWS_FILE).arrays[name]

    def _chunk(self, name: str) -> _Chunk:
        if name not in self._open:
            if len(self._open) > _MAX_MAPPED:  # the oldest but the rows; what is still read of it stays mapped
                del self._open[next(other for other in self._open if other != ROWS_FILE)]
            try:
                tensors, metadata = read_chunk(self.path / name)
                is_own, bad = metadata["identity"] == self.identity, json.loads(metadata["bad"])
            except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
                raise DataError(f"dataset.cache.path: {self.path / name} cannot be read: {error}; {_REMEDY}") from error
            if not is_own:
                raise DataError(f"dataset.cache.path: {self.path / name} belongs to another cache; {_REMEDY}")
            self._open[name] = _Chunk({key: as_array(tensor) for key, tensor in tensors.items()}, bad)
        return self._open[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}


def identity_of(made_with: Mapping[str, Any], storage: Storage) -> str:
    """What distinguishes the files of a cache from those of others."""
    written = json.dumps({"made_with": made_with, "storage": asdict(storage)}, sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()


def data_key(
    entries: Sequence[DatasetConfig | MixEntry], datasets: Sequence[OpenDataset], table: BucketTable, *, has_text: bool
) -> dict[str, Any]:
    """What decides the rows of a cache, of the data; the samples themselves are compared one by one.

    Args:
        has_text: whether the cache holds states of captions.
    """
    key: dict[str, Any] = {"sizes of dataset.params.buckets": [list(size) for size in table.sizes]}
    for number, (entry, dataset) in enumerate(zip(entries, datasets, strict=True)):
        option = f"dataset.mix.{number - 1}.params" if number else "dataset.params"
        key[f"files of {option}.path"] = dataset.index.fingerprint
        if has_text:
            prompts = read_class_prompts(entry.params)[0] if entry.type == "ClassificationWebDataset" else {}
            chosen = (rules.model_dump(exclude_defaults=True) for rules in (entry.params.captions, entry.params.tags))
            rules = [entry.type, *chosen, prompts]
            digest = hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()
            key[f"rules of {option}.captions, tags or idx_to_prompt"] = digest
    return key


def _difference(name: str, before: object, now: object) -> str:
    """One thing that has changed; digests are not shown."""
    is_shown = all(value is not None and len(str(value)) < 40 for value in (before, now))
    return f"{name} was {before}, now {now}" if is_shown else f"{name} differ" if before is not None else f"no {name}"
