"""The index of the data set: built unit by unit, kept on disk, mapped into memory as columns.

The index of one unit: a parquet file with one row per sample, written once and replaced only as a whole.

All units' indexes as one Arrow file that every process of a machine maps into memory and shares.

Mapped pages belong to the page cache: ten loader processes hold an index of a million samples once.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from tqdm import tqdm

from sd_training.data.index.columns import NUMBER, TEXT, field_names
from sd_training.data.problems import Problems
from sd_training.data.sources.base import Shard, ShardScan, Source
from sd_training.data.storage.locations import shown
from sd_training.errors import DataError
from sd_training.log import get_logger, is_main_process

FORMAT_VERSION = 3
CHECK = "check:"
"""Columns that count for the fingerprint only, such as checksums, and are not kept."""
_UNIT_INFO = b"sd_training"
_STANDARD: dict[str, tuple[pa.DataType, object]] = {
    "width": (pa.int32(), 0),
    "height": (pa.int32(), 0),
    "caption_length": (pa.int64(), -1),
    "block": (pa.int32(), 0),
    "cls": (pa.large_string(), None),
}
"""Columns that every index has, with the value of a scan that does not give them."""


def index_path(source: Source, unit: Shard, index_dir: Path) -> Path:
    """Where the index of this very state of the unit is kept."""
    identity = json.dumps([source.identity, *unit, FORMAT_VERSION])
    return index_dir / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.parquet"


def build_index_file(source: Source, unit: Shard, index_dir: Path) -> None:
    """Scans the unit and writes its index. Several processes may do so at once: the last complete file stays."""
    scan = source.scan(unit)
    table = _table(scan)
    info = {"content_sha256": _content_hash(table), "problems": scan.problems.to_json()}
    table = table.drop_columns([name for name in table.column_names if name.startswith(CHECK)])
    table = table.replace_schema_metadata({_UNIT_INFO: json.dumps(info).encode()})
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
        info = json.loads((schema.metadata or {})[_UNIT_INFO]) if _UNIT_INFO in (schema.metadata or {}) else None
        if info is None:
            raise ValueError(f"{path} is not an index")
        wanted = [name for name in schema.names if _is_wanted(name, fields)]
        table = file.read(columns=wanted, use_threads=False).replace_schema_metadata(None)
    return IndexFile(table, field_names(schema.names), info["content_sha256"], Problems.from_json(info["problems"]))


def _is_wanted(name: str, fields: frozenset[str]) -> bool:
    return not field_names([name]) or bool(field_names([name]) & fields)


def _table(scan: ShardScan) -> pa.Table:
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


_JOINED_INFO = b"sd_training"
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
    table = _with_global_blocks(table).combine_chunks().replace_schema_metadata({_JOINED_INFO: _info(files)})
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
    info = json.loads(table.schema.metadata[_JOINED_INFO])
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


log = get_logger(__name__)

FEW_UNITS = 16
"""Up to so many units are indexed in this process: starting others would take longer."""
MAX_PROCESSES = 16


class DatasetIndex:
    """Columns over all samples of all units, in the order of the units; mapped from a file, not held in memory.

    Attributes:
        path: the joined index.
        units: the units it was made from.
        columns: arrow table: `key`, `unit`, `block`, `width`, `height`, `caption_length`, `cls`, `at:…`, perhaps
            `caption`, and the metadata columns of the fields that were asked for.
        fields: every metadata field that some unit has.
        problems: what was wrong with the units.
        fingerprint: sha256 over names, sizes and contents of the units; data may move.
    """

    def __init__(self, path: Path, units: Sequence[Shard]) -> None:
        self.path, self.shards = path, list(units)
        self._numbers: dict[str, NDArray[Any]] = {}
        self.columns, self.fields, self.problems, contents = read_joined(path)
        self.fingerprint = _fingerprint(units, contents)

    def __len__(self) -> int:
        return int(self.columns.num_rows)

    def numbers(self, column: str) -> NDArray[Any]:
        """[N] an integer column without nulls, such as `width` [pixels], as a view of the mapped file."""
        if column not in self._numbers:
            self._numbers[column] = _view(self.columns[column])
        return self._numbers[column]

    def text(self, column: str, sample: int) -> str | None:
        """A value of a text column; None where it is null or nobody has the column."""
        return self.columns[column][sample].as_py() if column in self.columns.column_names else None

    def metadata_text(self, field: str, sample: int) -> str | None:
        """A metadata field as text; a number is written as short as it can be."""
        text = self.text(TEXT + field, sample)
        if text is None and NUMBER + field in self.columns.column_names:
            number = self.columns[NUMBER + field][sample].as_py()
            return None if number is None else f"{number:.15g}"
        return text

    def name(self, sample: int) -> tuple[str, str]:
        """Location of the unit as it may be shown, without secrets, and key, of a sample."""
        return shown(self.shards[self.numbers("unit")[sample]].location), str(self.columns["key"][sample].as_py())

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "units": self.shards}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], state["units"])  # type: ignore[misc]


def _view(column: pa.ChunkedArray) -> NDArray[Any]:
    """A mapped column of integers as numpy sees it, without a copy.

    Not by `to_numpy`, which imports pandas where it is installed: a second and 60 MB in every loader process.
    """
    if column.num_chunks != 1 or column.null_count:
        return np.asarray(column.to_numpy())
    chunk, dtype = column.chunk(0), {pa.int32(): np.int32, pa.int64(): np.int64}[column.type]
    return np.frombuffer(chunk.buffers()[1], dtype, len(chunk), chunk.offset * np.dtype(dtype).itemsize)


def default_index_dir() -> Path:
    """`$XDG_CACHE_HOME/sd_training/index` or `~/.cache/sd_training/index`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sd_training" / "index"


def load_index(source: Source, index_dir: Path | None, fields: Iterable[str] = ()) -> DatasetIndex:
    """Indexes the units that are new or changed, and opens the index of all.

    Args:
        source: what to index.
        index_dir: where the index is kept; None takes `default_index_dir()`.
        fields: metadata fields that filters and captions need.

    Raises:
        DataError: a unit or the index folder cannot be read or written.
    """
    folder = index_dir or default_index_dir()
    units, wanted = source.shards(), frozenset(fields)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = joined_path([index_path(source, unit, folder) for unit in units], wanted, folder)
        try:
            return DatasetIndex(path, units)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            log.warning("the index %s is damaged (%s) and is joined again", path, error)
        _build(source, [unit for unit in units if not index_path(source, unit, folder).exists()], folder)
        with ThreadPoolExecutor(8) as pool:
            files = list(pool.map(lambda unit: _read(source, unit, folder, wanted), units))
        write_joined(files, path)
        return DatasetIndex(path, units)
    except OSError as error:
        raise DataError(
            f"the data cannot be indexed: {error}; dataset.params.index_dir must be a writable folder "
            f"(now '{folder}') and the data readable"
        ) from error


def _read(source: Source, unit: Shard, folder: Path, fields: frozenset[str]) -> IndexFile:
    path = index_path(source, unit, folder)
    try:
        return read_index_file(path, fields)
    except (OSError, ValueError, KeyError) as error:
        log.warning("the index file %s is damaged (%s) and is built again", path, error)
        build_index_file(source, unit, folder)
        return read_index_file(path, fields)


def _build(source: Source, missing: Sequence[Shard], folder: Path) -> None:
    if len(missing) <= FEW_UNITS:
        for unit in missing:
            build_index_file(source, unit, folder)
        return
    bar = tqdm(total=len(missing), desc="indexing", unit="unit", disable=not is_main_process())
    with _processes(len(missing)) as pool, bar:
        futures = [pool.submit(build_index_file, source, unit, folder) for unit in missing]
        try:
            for future in as_completed(futures):
                future.result()
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _processes(num_tasks: int) -> Executor:
    """Reading headers holds the interpreter lock, so processes; fresh ones, because this one may run threads."""
    count = min(num_tasks, MAX_PROCESSES, os.cpu_count() or 1)
    return ProcessPoolExecutor(count, mp_context=get_context("spawn")) if count > 1 else ThreadPoolExecutor(1)


def _fingerprint(units: Sequence[Shard], contents: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for unit, content in zip(units, contents, strict=True):
        line = f"{unit.location.rstrip('/').rpartition('/')[2]}/{unit.size}/{content}\n"  # names hold no slash
        digest.update(line.encode("utf-8", "backslashreplace"))
    return digest.hexdigest()
