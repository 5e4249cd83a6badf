"""The index of a data set as it is read: columns of a file that is mapped into memory."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sd_training.data.index.columns import NUMBER, TEXT
from sd_training.data.problems import Problems
from sd_training.data.storage.locations import FileState, shown

INFO = b"sd_training"
"""Key of what an index file says about itself, besides its columns."""


class DatasetIndex:
    """Columns over all samples of all shards, in the order of the shards; mapped from a file, not held in memory.

    Attributes:
        path: the joined index.
        shards: the shards it was made from.
        columns: arrow table: `key`, `unit` (number of the shard), `block`, `width`, `height`, `caption_length`, `cls`,
            `at:…`, perhaps `caption`, and the metadata columns of the fields that were asked for.
        fields: every metadata field that some shard has.
        problems: what was wrong with the shards.
        fingerprint: sha256 over names, sizes and contents of the shards, without their folders.
    """

    def __init__(self, path: Path, shards: Sequence[FileState]) -> None:
        """Raises OSError, ValueError or KeyError where the file is missing, damaged or of another program."""
        self.path, self.shards = path, list(shards)
        self._numbers: dict[str, NDArray[Any]] = {}
        os.utime(path)  # joined indexes that were not opened for long are removed
        self.columns = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        info = json.loads(self.columns.schema.metadata[INFO])
        self.fields, self.problems = frozenset[str](info["fields"]), Problems.from_json(info["problems"])
        digest = hashlib.sha256()
        for shard, content in zip(shards, info["contents"], strict=True):
            line = f"{shard.location.rstrip('/').rpartition('/')[2]}/{shard.size}/{content}\n"  # names hold no slash
            digest.update(line.encode("utf-8", "backslashreplace"))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return int(self.columns.num_rows)

    def numbers(self, column: str) -> NDArray[Any]:
        """[N] an integer column without nulls, such as `width` [pixels], as a view of the mapped file."""
        if column not in self._numbers:
            # Not by `to_numpy`, which imports pandas where it is installed: a second and 60 MB in every loader process.
            values = self.columns[column]
            chunk = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
            dtype = np.dtype(str(chunk.type))
            offset = chunk.offset * dtype.itemsize
            self._numbers[column] = np.frombuffer(chunk.buffers()[1], dtype, len(chunk), offset)
        return self._numbers[column]

    def text(self, column: str, sample: int) -> str | None:
        """A value of a text column; None where it is null or there is no such column."""
        return self.columns[column][sample].as_py() if column in self.columns.column_names else None

    def metadata_text(self, field: str, sample: int) -> str | None:
        """A metadata field as text; a number is written as short as it can be."""
        text = self.text(TEXT + field, sample)
        if text is None and NUMBER + field in self.columns.column_names:
            number = self.columns[NUMBER + field][sample].as_py()
            return None if number is None else f"{number:.15g}"
        return text

    def name(self, sample: int) -> tuple[str, str]:
        """Location of the shard as it may be shown, without secrets, and key, of a sample."""
        return shown(self.shards[self.numbers("unit")[sample]].location), str(self.columns["key"][sample].as_py())

    def __reduce__(self) -> tuple[type["DatasetIndex"], tuple[Path, list[FileState]]]:
        return DatasetIndex, (self.path, self.shards)
