"""The index of one unit: a parquet file with one row per sample, written once and replaced only as a whole."""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sd_training.data.index_columns import field_names
from sd_training.data.problems import Problems
from sd_training.data.source import Source, Unit, UnitScan

FORMAT_VERSION = 3
CHECK = "check:"
"""Columns that count for the fingerprint only, such as checksums, and are not kept."""
_INFO = b"sd_training"
_STANDARD: dict[str, tuple[pa.DataType, object]] = {
    "width": (pa.int32(), 0),
    "height": (pa.int32(), 0),
    "caption_length": (pa.int64(), -1),
    "block": (pa.int32(), 0),
    "cls": (pa.large_string(), None),
}
"""Columns that every index has, with the value of a scan that does not give them."""


def index_path(source: Source, unit: Unit, index_dir: Path) -> Path:
    """Where the index of this very state of the unit is kept."""
    identity = json.dumps([source.identity, *unit, FORMAT_VERSION])
    return index_dir / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.parquet"


def build_index_file(source: Source, unit: Unit, index_dir: Path) -> None:
    """Scans the unit and writes its index. Several processes may do so at once: the last complete file stays."""
    scan = source.scan(unit)
    table = _table(scan)
    info = {"content_sha256": _content_hash(table), "problems": scan.problems.to_json()}
    table = table.drop_columns([name for name in table.column_names if name.startswith(CHECK)])
    table = table.replace_schema_metadata({_INFO: json.dumps(info).encode()})
    descriptor, temporary = tempfile.mkstemp(dir=index_dir, suffix=".partial")
    os.close(descriptor)
    try:
        pq.write_table(table, temporary, compression="zstd")
        os.replace(temporary, index_path(source, unit, index_dir))
    except BaseException:
        os.unlink(temporary)
        raise


@dataclass
class IndexFile:
    """One unit's index as read back."""

    table: pa.Table
    fields: frozenset[str]
    """All metadata fields of the unit; `table` holds those that were asked for."""
    content_sha256: str
    problems: Problems


def read_index_file(path: Path, fields: frozenset[str]) -> IndexFile:
    """Reads the positions of the samples and the metadata columns of `fields`.

    Raises:
        OSError, ValueError: the file is missing, damaged (pyarrow's errors are of these kinds) or of another program.
    """
    with pq.ParquetFile(path, memory_map=True) as file:
        schema = file.schema_arrow
        info = json.loads((schema.metadata or {})[_INFO]) if _INFO in (schema.metadata or {}) else None
        if info is None:
            raise ValueError(f"{path} is not an index")
        wanted = [name for name in schema.names if _is_wanted(name, fields)]
        table = file.read(columns=wanted, use_threads=False).replace_schema_metadata(None)
    return IndexFile(table, field_names(schema.names), info["content_sha256"], Problems.from_json(info["problems"]))


def _is_wanted(name: str, fields: frozenset[str]) -> bool:
    return not field_names([name]) or bool(field_names([name]) & fields)


def _table(scan: UnitScan) -> pa.Table:
    columns = {name: _wide(column) for name, column in scan.columns.items()}
    rows = len(columns["key"])
    for name, (kind, value) in _STANDARD.items():
        if name not in columns:
            columns[name] = pa.nulls(rows, kind) if value is None else pa.array(np.full(rows, value), kind)
        elif columns[name].type != kind:
            columns[name] = columns[name].cast(kind)
    return pa.table(columns)


def _wide(column: pa.Array) -> pa.Array:
    """Texts of many units together pass the 2 GiB that 32-bit offsets can address."""
    return column.cast(pa.large_string()) if pa.types.is_string(column.type) else column


def _content_hash(table: pa.Table) -> str:
    """Of everything that tells samples apart; offsets are left out, so that a shard written anew is the same data."""
    digest = hashlib.sha256()
    for name in sorted(name for name in table.column_names if not (name.startswith("at:") and "offset" in name)):
        column = table[name]
        digest.update(f"{name}\n".encode())
        if pa.types.is_integer(column.type) and not column.null_count:
            digest.update(column.to_numpy().astype("<i8").tobytes())
        else:
            digest.update(json.dumps(column.to_pylist(), default=str).encode())
    return digest.hexdigest()
