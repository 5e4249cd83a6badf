"""Folders written by `datasets.Dataset.save_to_disk`.

They are a list of Arrow stream files (`state.json` names them), which pyarrow reads. The index keeps where in its file
each image lies, and training reads those bytes: no file is mapped while training, where a disk's failure would end the
process, and the `datasets` library with pandas and dill (87 MB per process, datasets 5.2) is not needed.
"""

import json
import posixpath
import re
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from sd_training.data.index.columns import read_scalars
from sd_training.data.index.store import DatasetIndex
from sd_training.data.problems import BadSample, Problems, printable
from sd_training.data.samples.image import image_size
from sd_training.data.sources.arrow_cells import (
    IMAGE_COLUMNS,
    PATH_COLUMNS,
    Columns,
    check_caption,
    image_cells,
    is_metadata,
    pick_columns,
    plain,
    plain_type,
)
from sd_training.data.sources.base import Shard, ShardScan
from sd_training.data.sources.files import (
    FileReader,
    FileSample,
    ImageInfo,
    SampleColumns,
    caption_of,
    checked_path,
    folder_of,
    join,
    length_of,
    measure,
)
from sd_training.data.sources.tar import TarReader
from sd_training.data.storage.files import Access, file_state, find_state, open_bytes
from sd_training.data.storage.locations import exists, is_remote, local_path, shown
from sd_training.errors import DataError

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_MAX_JSON_BYTES = 16 << 20
"""Largest of these files; an Arrow file takes about 50 bytes of it."""
_SHOWN_SPLITS = 10
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
"""In no name of a file."""
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Of every Arrow stream."""


class HuggingFaceSource:
    """The source of saved datasets; one unit per Arrow file.

    The image column holds image files (`Image()` or binary) or paths (see `checked_path`), the caption column texts or
    lists of texts. All other columns of numbers, texts and lists of texts, and the caption column, are metadata.

    Args:
        paths: folders, local or remote; of a `DatasetDict` the folder of one split.
        access: how remote files are read.
        image_column: None looks for usual names.
        caption_column: likewise.
    """

    def __init__(
        self, paths: Sequence[str], access: Access, image_column: str | None = None, caption_column: str | None = None
    ) -> None:
        self.paths = list(dict.fromkeys(path.rstrip("/") if is_remote(path) else local_path(path) for path in paths))
        self.access, self.wanted = access, Columns(image_column, caption_column)

    @property
    def identity(self) -> str:
        return json.dumps(["huggingface", *self.wanted])

    def shards(self) -> list[Shard]:
        states = [file_state(file, self.access) for path in self.paths for file in self._files(path)]
        if not states:
            raise DataError(f"dataset.params.path: no Arrow file in {', '.join(map(shown, self.paths)) or 'no folder'}")
        return [Shard(state.location, state.size, state.version) for state in states]

    def _files(self, folder: str) -> list[str]:
        """The Arrow files of a saved dataset, in order."""
        state = self._json(f"{folder}/{_STATE}")
        if state is None:
            if splits := _splits(self._json(f"{folder}/{_SPLITS}") or {}, f"{folder}/{_SPLITS}"):
                raise DataError(
                    f"dataset.params.path: '{shown(folder)}' holds several splits; name one: {_choices(folder, splits)}"
                )
            raise DataError(
                f"dataset.params.path: '{shown(folder)}' is not a folder written by save_to_disk: it has no {_STATE}"
            )
        if state.get("_indices_data_files") or state.get("_indices_files"):
            raise DataError(
                f"dataset.params.path: '{shown(folder)}' was saved with a table of row numbers, by an old version of "
                "datasets; load it and save it again"
            )
        names = _names(state, f"{folder}/{_STATE}")
        if unsafe := [name for name in names if posixpath.basename(name) != name]:
            raise DataError(f"dataset.params.path: '{shown(folder)}/{_STATE}' names a file elsewhere: {unsafe[0]}")
        return [f"{folder}/{name}" for name in names]

    def _json(self, location: str) -> dict[str, Any] | None:
        if not is_remote(location) and not exists(location):
            return None
        state = find_state(location, self.access)
        if state is None:
            return None
        if state.size > _MAX_JSON_BYTES:
            raise DataError(
                f"'{shown(location)}' has {state.size:,} bytes, at most {_MAX_JSON_BYTES:,} are read; "
                "it is not what save_to_disk wrote"
            )
        file = open_bytes(state, self.access)
        try:
            value = json.loads(file.pread(file.size, 0))
        except (ValueError, RecursionError) as error:
            raise DataError(f"'{shown(location)}' is not JSON: {error}") from error
        finally:
            file.close()
        if not isinstance(value, dict):
            raise DataError(f"'{shown(location)}' holds no JSON object; it is not what save_to_disk wrote")
        return value

    def scan(self, unit: Shard) -> ShardScan:
        """As `Source.scan`."""
        problems = Problems()
        columns = SampleColumns(shown(unit.location), problems)
        scan = _ArrowScan(unit.location, self.wanted, self.access, columns)
        try:
            offsets = scan.run(_content(unit.location, self.access))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"'{shown(unit.location)}' is not a readable Arrow file: {error}") from error
        return ShardScan(columns.columns() | {"at:image_offset": pa.array(offsets, pa.int64())}, problems)

    def reader(self, index: DatasetIndex) -> "HuggingFaceReader":
        return HuggingFaceReader(index, self.access)


def _names(state: dict[str, Any], location: str) -> list[str]:
    """The Arrow files that a `state.json` names."""
    entries, wanted = state.get("_data_files") or [], "a list of entries such as {'filename': 'x.arrow'}"
    if not isinstance(entries, list):
        raise _wrong(location, "_data_files", wanted, entries)
    names = []
    for entry in entries:
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name or _UNUSABLE.search(name):
            raise _wrong(location, "_data_files", wanted, entry)
        names.append(name)
    return names


def _splits(told: dict[str, Any], location: str) -> list[str]:
    """Those that a `dataset_dict.json` names."""
    splits = told.get("splits") or []
    if not isinstance(splits, list) or not all(isinstance(split, str) for split in splits):
        raise _wrong(location, "splits", "a list of names", splits)
    return splits


def _wrong(location: str, key: str, wanted: str, value: Any) -> DataError:
    return DataError(f"'{shown(location)}': '{key}' must be {wanted}, not {printable(reprlib.repr(value))}")


def _choices(folder: str, splits: Sequence[str]) -> str:
    known = " or ".join(f"'{shown(folder)}/{printable(split)}'" for split in splits[:_SHOWN_SPLITS])
    return known + (f", or one of {len(splits) - _SHOWN_SPLITS} more" if len(splits) > _SHOWN_SPLITS else "")


def _content(location: str, access: Access) -> pa.Buffer:
    """The whole file; a local one is mapped."""
    if not is_remote(location):
        return pa.memory_map(location).read_buffer()
    file = open_bytes(location, access)
    try:
        return pa.py_buffer(file.pread(file.size, 0))
    finally:
        file.close()


class _Image(NamedTuple):
    """The image cell of a row."""

    content: pa.Buffer | None
    """The image file."""
    path: str
    """A path as `join` takes it, where there is no content."""


class _ArrowScan:
    def __init__(self, location: str, wanted: Columns, access: Access, columns: SampleColumns) -> None:
        self.location, self.wanted, self.access, self.columns = location, wanted, access, columns
        self.base = folder_of(location)
        self.offsets: list[int] = []
        self.num_rows = 0

    def run(self, content: pa.Buffer) -> list[int]:
        """Adds all samples to the columns; returns where the images are in the file [bytes], -1 for files elsewhere."""
        if content.size < len(_END) or content.slice(content.size - len(_END)).to_pybytes() != _END:
            raise pa.ArrowInvalid(
                "it is truncated, or no Arrow stream"
            )  # pyarrow takes a cut between parts for the end
        with pa.ipc.open_stream(content) as stream:
            image, caption = pick_columns(
                shown(self.location), stream.schema.names, self.wanted, IMAGE_COLUMNS + PATH_COLUMNS
            )
            check_caption(shown(self.location), stream.schema.field(caption))
            fields = [field for field in stream.schema if field.name != image]
            metadata = [field.name for field in fields if is_metadata(plain_type(field.type))]
            read = list(dict.fromkeys([*metadata, caption]))
            for batch in stream:
                images = image_cells(shown(self.location), image, batch.column(image))
                texts = pa.RecordBatch.from_arrays([plain(batch.column(name)) for name in read], names=read)
                rows = texts.to_pylist()
                self.columns.add(list(self._samples(images, rows, caption, content)))
        return self.offsets

    def _samples(
        self,
        images: Sequence[tuple[pa.Buffer | None, str | None]],
        rows: Sequence[dict[str, Any]],
        caption: str,
        content: pa.Buffer,
    ) -> Iterator[FileSample]:
        found = [self._image(row, *cell) for row, cell in enumerate(images, self.num_rows)]
        outside = [image.path for image in found if image is not None and image.content is None]
        infos = iter(measure([join(self.base, path) for path in outside], self.access))
        for number, (image, values) in enumerate(zip(found, rows, strict=True), self.num_rows):
            if image is None:
                continue
            info = next(infos) if image.content is None else _info(image.content)
            if info is None:
                self._problem(number, f"image file missing: {shown(image.path)}")
                continue
            self.offsets.append(-1 if image.content is None else self._offset(image.content, content))
            yield self._sample(number, image.path if image.content is None else None, info, values, caption)
        self.num_rows += len(rows)

    def _sample(
        self, number: int, path: str | None, info: ImageInfo, values: dict[str, Any], caption: str
    ) -> FileSample:
        text = caption_of(values[caption])
        if text is None:
            self._problem(number, "caption is empty")
        return FileSample(
            f"row {number}", path, info, text, caption_length=length_of(text), metadata=read_scalars(values)
        )

    def _image(self, row: int, content: pa.Buffer | None, path: str | None) -> _Image | None:
        if content is not None:
            return _Image(content, "")
        try:
            return _Image(None, checked_path(self.base, path or ""))
        except BadSample as error:
            self._problem(row, str(error))
            return None

    def _offset(self, part: pa.Buffer, content: pa.Buffer) -> int:
        offset = int(part.address - content.address)
        if 0 <= offset <= content.size - part.size:
            return offset
        raise DataError(  # pyarrow unpacked it into memory of its own
            f"'{shown(self.location)}' is a compressed Arrow file; save_to_disk writes plain ones: save it again"
        )

    def _problem(self, row: int, reason: str) -> None:
        self.columns.name(f"row {row}", reason)


def _info(content: pa.Buffer) -> ImageInfo:
    return ImageInfo(content.size, *image_size(pa.BufferReader(content)))


class HuggingFaceReader:
    """The `SampleReader` of saved datasets: images in an Arrow file or in files of their own."""

    def __init__(self, index: DatasetIndex, access: Access) -> None:
        self.index = index
        self._inside = TarReader(index, access)
        self._outside = FileReader(index, access, [folder_of(unit.location) for unit in index.shards])

    def image(self, sample: int) -> bytes:
        is_inside = self.index.numbers("at:image_offset")[sample] >= 0
        return (self._inside if is_inside else self._outside).image(sample)

    def caption(self, sample: int) -> str:
        return self._outside.caption(sample)
