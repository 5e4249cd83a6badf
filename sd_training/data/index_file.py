"""The index of one shard: a parquet file with one row per sample, written once and replaced only as a whole."""

import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sd_training.data.problems import Problems, SkippedSample
from sd_training.data.tar_index import Scalar, TarSample, scan_tar

FORMAT_VERSION = 1
MAX_FIELDS = 1_000
"""Metadata fields indexed per shard."""
NUMBER, TEXT = "number:", "text:"
"""Prefixes of the two columns of a metadata field: its value as float64 and as the text that was written."""
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_INFO = b"sd_training"


@dataclass(frozen=True)
class ShardState:
    """What identifies the content of a shard without reading it."""

    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> "ShardState":
        """Asks the file system; OSError is passed on."""
        status = os.stat(path)
        return cls(path, status.st_size, status.st_mtime_ns)

    def index_path(self, index_dir: Path) -> Path:
        """Where the index of this very state is kept."""
        identity = json.dumps([str(self.path), self.size, self.mtime_ns, FORMAT_VERSION])
        return index_dir / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.parquet"


def build_index_file(shard: ShardState, index_dir: Path) -> None:
    """Scans the shard and writes its index. Several processes may do so at once: the last complete file stays."""
    scan = scan_tar(shard.path)
    table = _table(scan.samples, scan.problems, shard)
    info = {"size": shard.size, "keys_sha256": _keys_hash(scan.samples), "problems": scan.problems.to_json()}
    table = table.replace_schema_metadata({_INFO: json.dumps(info).encode()})
    descriptor, temporary = tempfile.mkstemp(dir=index_dir, suffix=".partial")
    os.close(descriptor)
    try:
        pq.write_table(table, temporary, compression="zstd")
        os.replace(temporary, shard.index_path(index_dir))
    except BaseException:
        os.unlink(temporary)
        raise


@dataclass
class IndexFile:
    """One shard's index as read back."""

    table: pa.Table
    fields: frozenset[str]
    """All metadata fields of the shard; `table` holds those that were asked for."""
    keys_sha256: str
    problems: Problems


def read_index_file(path: Path, fields: frozenset[str]) -> IndexFile:
    """Reads the positions of the members and the metadata columns of `fields`.

    Raises:
        OSError, ValueError: the file is missing, damaged (pyarrow's errors are of these kinds) or of another program.
    """
    with pq.ParquetFile(path, memory_map=True) as file:
        schema = file.schema_arrow
        info = json.loads((schema.metadata or {})[_INFO]) if _INFO in (schema.metadata or {}) else None
        if info is None:
            raise ValueError(f"{path} is not a shard index")
        present = frozenset(name.partition(":")[2] for name in schema.names if name.startswith((NUMBER, TEXT)))
        wanted = [name for name in schema.names if ":" not in name or name.partition(":")[2] in fields]
        table = file.read(columns=wanted, use_threads=False)
    return IndexFile(table, present, info["keys_sha256"], Problems.from_json(info["problems"]))


def _keys_hash(samples: list[TarSample]) -> str:
    """Sample keys with the lengths of their members: enough to tell another data set, free of paths and times."""
    rows = [[sample.key, sorted((role, span[1]) for role, span in sample.spans.items())] for sample in samples]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _table(samples: list[TarSample], problems: Problems, shard: ShardState) -> pa.Table:
    columns = {"key": pa.array([sample.key for sample in samples], pa.string())}
    for role in ("image", "caption"):
        spans = [sample.spans.get(role, (-1, -1)) for sample in samples]
        columns[f"{role}_offset"] = pa.array([span[0] for span in spans], pa.int64())
        columns[f"{role}_length"] = pa.array([span[1] for span in spans], pa.int64())
    columns["cls"] = pa.array([sample.cls for sample in samples], pa.string())
    names = list(dict.fromkeys(name for sample in samples for name in sample.metadata))
    if len(names) > MAX_FIELDS:
        problems.add(SkippedSample(str(shard.path), "", f"more than {MAX_FIELDS} metadata fields"))
    for name in names[:MAX_FIELDS]:
        columns |= _field_columns(name, [sample.metadata.get(name) for sample in samples])
    return pa.table(columns)


def _field_columns(name: str, values: list[Scalar | None]) -> dict[str, pa.Array]:
    texts = [value if isinstance(value, str) else None for value in values]
    columns = {NUMBER + name: pa.array([_number(value) for value in values], pa.float64())}
    if any(text is not None for text in texts):
        columns[TEXT + name] = pa.array(texts, pa.string())
    return columns


def _number(value: Scalar | None) -> float | None:
    """Numbers stored as text ("512") are numbers to a filter; true and false are 1 and 0."""
    if not isinstance(value, str):
        return value
    if value in ("true", "false"):
        return float(value == "true")
    return float(value) if _NUMBER.fullmatch(value) else None
