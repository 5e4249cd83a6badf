"""All units' indexes as one Arrow file that every process of a machine maps into memory and shares.

Mapped pages belong to the page cache: ten loader processes hold an index of a million samples once.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from sd_training.data.index_file import IndexFile
from sd_training.data.problems import Problems

_INFO = b"sd_training"
_KEPT_S = 30 * 24 * 3600
"""Joined indexes that nobody has opened for so long are removed; they are made again from the units' in seconds."""
_HALF_WRITTEN_S = 24 * 3600
"""Nobody writes an index file for so long."""


def joined_path(index_files: Sequence[Path], fields: frozenset[str], index_dir: Path) -> Path:
    """Where the join of these files with these metadata fields is kept."""
    identity = json.dumps([[path.name for path in index_files], sorted(fields)])
    return index_dir / f"joined-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.arrow"


def write_joined(files: Sequence[IndexFile], path: Path) -> None:
    """Writes the join. Several processes may do so at once: the last complete file stays."""
    sweep_joined(path.parent)
    table = pa.concat_tables([file.table for file in files], promote_options="permissive")
    rows = [file.table.num_rows for file in files]
    table = table.append_column("unit", pa.array(np.repeat(np.arange(len(files), dtype=np.int32), rows)))
    table = _with_global_blocks(table).combine_chunks().replace_schema_metadata({_INFO: _info(files)})
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    os.close(descriptor)
    try:
        with pa.OSFile(temporary, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _info(files: Sequence[IndexFile]) -> bytes:
    problems = Problems()
    for file in files:
        problems.merge(file.problems)
    fields = sorted(frozenset().union(*(file.fields for file in files)))
    contents = [file.content_sha256 for file in files]
    return json.dumps({"fields": fields, "problems": problems.to_json(), "contents": contents}).encode()


def _with_global_blocks(table: pa.Table) -> pa.Table:
    """Blocks are numbered within their unit; here they are numbered over all of them."""
    unit, block = table["unit"].to_numpy(), table["block"].to_numpy()
    starts = np.empty(len(unit), dtype=bool)
    starts[:1] = True
    starts[1:] = (unit[1:] != unit[:-1]) | (block[1:] != block[:-1])
    numbers = (np.cumsum(starts) - 1).astype(np.int32)
    return table.set_column(table.column_names.index("block"), "block", pa.array(numbers))


def read_joined(path: Path) -> tuple[pa.Table, frozenset[str], Problems, list[str]]:
    """The table (mapped, not read), all metadata fields, the problems, and each unit's content hash.

    Raises:
        OSError, ValueError, KeyError: the file is missing, damaged or of another program.
    """
    os.utime(path)
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    info = json.loads(table.schema.metadata[_INFO])
    return table, frozenset(info["fields"]), Problems.from_json(info["problems"]), info["contents"]


def sweep_joined(index_dir: Path) -> None:
    """Removes joins that have not been opened for long, and what killed processes left half written."""
    kept_s = dict.fromkeys(index_dir.glob("joined-*.arrow"), _KEPT_S)
    for path, seconds in (kept_s | dict.fromkeys(index_dir.glob("*.partial"), _HALF_WRITTEN_S)).items():
        try:
            if time.time() - path.stat().st_mtime > seconds:
                path.unlink()
        except OSError:  # another process was faster
            continue
