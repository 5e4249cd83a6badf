"""Loose samples → numbered WebDataset shards, written by several threads, each shard whole or absent."""

import io
import json
import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image
from webdataset import TarWriter

from sd_training.data.file_reader import tidy
from sd_training.data.image_decode import FORMATS, ImageRules, decode
from sd_training.data.loose_samples import LooseSample
from sd_training.data.problems import BadSample, SkippedSample

_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
_MAX_PIXELS = 178_956_970
_QUALITY = 95


@dataclass
class ShardReport:
    """What became of the samples of one shard."""

    shard: str
    written: int = 0
    skipped: list[SkippedSample] = field(default_factory=list)


def encode_sample(sample: LooseSample, resize: int | None) -> dict[str, Any]:
    """The members of one sample by extension: image, `txt` and `json`.

    The image's bytes are kept as they are. With `resize` an image whose short side is longer is made smaller, upright
    and RGB, in its own format. The metadata get `original_width` and `original_height` [pixels, upright] unless they
    have them.

    Raises:
        BadSample: a part is missing or damaged; the message is the reason.
    """
    if sample.problem is not None or sample.image is None:
        raise BadSample(sample.problem or "image is missing")
    data = sample.image if isinstance(sample.image, bytes) else _read(sample.image, "image")
    caption, metadata = _caption(sample.caption), _metadata(sample.metadata)
    image = Image.fromarray(decode(data, ImageRules(_MAX_PIXELS)).pixels)
    kind = str(Image.open(io.BytesIO(data), formats=FORMATS).format)
    metadata = {"original_width": image.width, "original_height": image.height, **metadata}
    if resize is not None and min(image.size) > resize:
        data = _smaller(image, resize, kind)
    text = json.dumps(_plain(metadata), ensure_ascii=False, allow_nan=False)
    return {_EXTENSIONS[kind]: data, "txt": caption.encode(), "json": text.encode()}


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise BadSample(f"{what} is missing: {path.name}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadSample(f"{what} cannot be read: {path.name}, {error}") from error


def _caption(caption: Path | str | None) -> str:
    """As training on the files themselves takes it: an empty text file is the empty caption, an empty cell is none."""
    try:
        if isinstance(caption, Path):
            return tidy(_read(caption, "caption").decode("utf-8-sig"))
        text = (caption or "").strip()
        text.encode()  # a lone surrogate from a table would fail later
    except UnicodeError:
        raise BadSample("caption is not UTF-8 text") from None
    if not text:
        raise BadSample("caption is empty")
    return text


def _metadata(metadata: Path | dict[str, Any]) -> dict[str, Any]:
    if isinstance(metadata, dict):
        return metadata
    if not metadata.exists():
        return {}
    try:
        value = json.loads(_read(metadata, "metadata"))
    except (ValueError, RecursionError):
        raise BadSample("metadata is not JSON") from None
    if not isinstance(value, dict):
        raise BadSample("metadata is not a JSON object")
    return value


def _plain(value: Any) -> Any:
    """JSON can hold it: bytes are left out, what is not a number becomes null, dates and decimals become text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if not isinstance(v, (bytes, bytearray))}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value if not isinstance(v, (bytes, bytearray))]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


def _smaller(image: Image.Image, short_side: int, kind: str) -> bytes:
    scale = short_side / min(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    stream = io.BytesIO()
    image.resize(size, Image.Resampling.LANCZOS).save(stream, format=kind, quality=_QUALITY)
    return stream.getvalue()


def write_shard(path: Path, samples: Sequence[tuple[int, LooseSample]], resize: int | None) -> ShardReport:
    """Writes one tar of (number, sample) pairs; keys are the numbers, so they are unique over all shards.

    The file appears under its name when it is complete; a shard without a usable sample is not written. The same
    samples give the same bytes.
    """
    report = ShardReport(path.name)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as stream:
        with TarWriter(stream, mtime=0) as sink:
            for number, sample in samples:
                try:
                    members = encode_sample(sample, resize)
                except BadSample as error:
                    report.skipped.append(SkippedSample(path.name, sample.name, str(error)))
                    continue
                sink.write({"__key__": f"{number:09d}", **members})
                report.written += 1
        stream.flush()
        os.fsync(stream.fileno())
    if report.written:
        os.replace(partial, path)
    else:
        partial.unlink()
    return report


def write_shards(
    folder: Path, samples: Iterator[LooseSample], *, per_shard: int, workers: int, resize: int | None
) -> Iterator[ShardReport]:
    """Writes `folder/00000.tar`, `00001.tar`, ... of `per_shard` samples each, and reports them in order.

    Which sample goes where does not depend on `workers`. The samples of at most `workers` + 1 shards are in memory.
    """
    numbered = enumerate(samples)
    with ThreadPoolExecutor(workers) as pool:
        running: deque[Future[ShardReport]] = deque()
        for shard, chunk in enumerate(iter(lambda: list(islice(numbered, per_shard)), [])):
            if len(running) >= workers:
                yield running.popleft().result()
            running.append(pool.submit(write_shard, folder / f"{shard:05d}.tar", chunk, resize))
        while running:
            yield running.popleft().result()
