"""The index of a data set: built shard by shard, kept on disk, mapped into memory as columns.

The index of one shard is a parquet file with one row per sample, written once and replaced only as a whole. The indexes
of all shards are joined into one Arrow file that every process of a machine maps into memory: mapped pages belong to
the page cache, so ten loader processes hold an index of a million samples once.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
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
from sd_training.data.sources.base import Shard, Source
from sd_training.data.storage.locations import shown
from sd_training.errors import DataError
from sd_training.log import get_logger, is_main_process

log = get_logger(__name__)

FORMAT_VERSION = 3
CHECK = "check:"
"""Columns that count for the fingerprint only, such as checksums, and are not kept."""
FEW_SHARDS = 16
"""Up to so many shards are indexed in this process: starting others would take longer."""
MAX_PROCESSES = 16
_INFO = b"sd_training"
_JOINED_KEPT_S = 30 * 24 * 3600
"""Joined indexes not opened for so long are removed; they are made again from the shards' in seconds."""
_PARTIAL_KEPT_S = 24 * 3600
"""Writing an index file takes less."""


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

    def __init__(self, path: Path, shards: Sequence[Shard]) -> None:
        """Raises OSError, ValueError or KeyError where the file is missing, damaged or of another program."""
        self.path, self.shards = path, list(shards)
        self._numbers: dict[str, NDArray[Any]] = {}
        os.utime(path)
        self.columns = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        info = json.loads(self.columns.schema.metadata[_INFO])
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

    def __reduce__(self) -> tuple[type["DatasetIndex"], tuple[Path, list[Shard]]]:
        return DatasetIndex, (self.path, self.shards)


def default_index_dir() -> Path:
    """`$XDG_CACHE_HOME/sd_training/index` or `~/.cache/sd_training/index`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sd_training" / "index"


def load_index(source: Source, index_dir: Path | None, fields: Iterable[str] = ()) -> DatasetIndex:
    """Indexes the shards that are new or changed, and opens the index of all.

    Args:
        source: what to index.
        index_dir: where the index is kept; None takes `default_index_dir()`.
        fields: metadata fields that filters and captions need.

    Raises:
        DataError: a shard or the index folder cannot be read or written.
    """
    folder = index_dir or default_index_dir()
    shards, wanted = source.shards(), frozenset(fields)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [_shard_path(source, shard, folder) for shard in shards]
        joined = folder / f"joined-{_name_of([[path.name for path in paths], sorted(wanted)])}.arrow"
        try:
            return DatasetIndex(joined, shards)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            log.warning("the index %s is damaged (%s) and is joined again", joined, error)
        _build_missing(source, [shard for shard, path in zip(shards, paths, strict=True) if not path.exists()], folder)
        with ThreadPoolExecutor(8) as pool:
            files = list(pool.map(lambda shard: _read_or_rebuild(source, shard, folder, wanted), shards))
        _sweep(folder)
        _write_joined(files, joined)
        return DatasetIndex(joined, shards)
    except OSError as error:
        raise DataError(
            f"the data cannot be indexed: {error}; dataset.params.index_dir must be a writable folder "
            f"(now '{folder}') and the data readable"
        ) from error


def _name_of(identity: object) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def _shard_path(source: Source, shard: Shard, folder: Path) -> Path:
    """Where the index of this very state of the shard is kept."""
    return folder / f"{_name_of([source.identity, *shard, FORMAT_VERSION])}.parquet"


def _build_missing(source: Source, missing: Sequence[Shard], folder: Path) -> None:
    count = min(len(missing), MAX_PROCESSES, os.cpu_count() or 1)
    if len(missing) <= FEW_SHARDS or count == 1:
        for shard in missing:
            _build(source, shard, folder)
        return
    # Reading headers holds the interpreter lock, so processes; fresh ones, because this one may run threads.
    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))
    with pool, tqdm(total=len(missing), desc="indexing", unit="shard", disable=not is_main_process()) as bar:
        futures = [pool.submit(_build, source, shard, folder) for shard in missing]
        try:
            for future in as_completed(futures):
                future.result()
                bar.update()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _build(source: Source, shard: Shard, folder: Path) -> None:
    """Scans the shard and writes its index."""
    scan = source.scan(shard)
    rows = len(scan.columns["key"])
    every = {"block": pa.array(np.zeros(rows, dtype=np.int32)), "cls": pa.nulls(rows, pa.large_string())}
    table = pa.table(every | scan.columns)
    info = {"content_sha256": _content_hash(table), "problems": scan.problems.to_json()}
    table = table.drop_columns([name for name in table.column_names if name.startswith(CHECK)])
    table = table.replace_schema_metadata({_INFO: json.dumps(info).encode()})
    with _replaced_whole(_shard_path(source, shard, folder)) as temporary:
        pq.write_table(table, temporary, compression="zstd")


@contextmanager
def _replaced_whole(path: Path) -> Iterator[str]:
    """A file to write that then becomes `path`. Several processes may do so at once: the last complete file stays."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    os.close(descriptor)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


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


def _read_or_rebuild(source: Source, shard: Shard, folder: Path, fields: frozenset[str]) -> pa.Table:
    path = _shard_path(source, shard, folder)
    try:
        return _read(path, fields)
    except (OSError, ValueError, KeyError) as error:
        log.warning("the index file %s is damaged (%s) and is built again", path, error)
        _build(source, shard, folder)
        return _read(path, fields)


def _read(path: Path, fields: frozenset[str]) -> pa.Table:
    """The index of a shard with the metadata fields that were asked for; all of them are named in its metadata.

    Raises OSError, ValueError or KeyError where the file is missing, damaged (pyarrow's errors are of these kinds) or
    of another program."""
    with pq.ParquetFile(path, memory_map=True) as file:
        schema = file.schema_arrow
        info = json.loads((schema.metadata or {})[_INFO]) | {"fields": sorted(field_names(schema.names))}
        wanted = [name for name in schema.names if not field_names([name]) or field_names([name]) & fields]
        table = file.read(columns=wanted, use_threads=False)
    return table.replace_schema_metadata({_INFO: json.dumps(info).encode()})


def _write_joined(tables: Sequence[pa.Table], path: Path) -> None:
    infos = [json.loads(table.schema.metadata[_INFO]) for table in tables]
    joined = pa.concat_tables([t.replace_schema_metadata(None) for t in tables], promote_options="permissive")
    shard = np.repeat(np.arange(len(tables), dtype=np.int32), [table.num_rows for table in tables])
    # Blocks are numbered within their shard; here they are numbered over all of them.
    block, starts = joined["block"].to_numpy(), np.ones(len(shard), dtype=bool)
    starts[1:] = (shard[1:] != shard[:-1]) | (block[1:] != block[:-1])
    blocks = pa.array((np.cumsum(starts) - 1).astype(np.int32))
    joined = joined.append_column("unit", pa.array(shard))
    joined = joined.set_column(joined.column_names.index("block"), "block", blocks).combine_chunks()
    problems = Problems()
    for info in infos:
        problems.merge(Problems.from_json(info["problems"]))
    whole = {
        "fields": sorted({field for info in infos for field in info["fields"]}),
        "problems": problems.to_json(),
        "contents": [info["content_sha256"] for info in infos],
    }
    joined = joined.replace_schema_metadata({_INFO: json.dumps(whole).encode()})
    with (
        _replaced_whole(path) as temporary,
        pa.OSFile(temporary, "wb") as sink,
        pa.ipc.new_file(sink, joined.schema) as writer,
    ):
        writer.write_table(joined)


def _sweep(folder: Path) -> None:
    """Removes joined indexes that have not been opened for long, and incomplete files of killed processes."""
    kept_s = dict.fromkeys(folder.glob("joined-*.arrow"), _JOINED_KEPT_S)
    for path, seconds in (kept_s | dict.fromkeys(folder.glob("*.partial"), _PARTIAL_KEPT_S)).items():
        try:
            if time.time() - path.stat().st_mtime > seconds:
                path.unlink()
        except OSError:  # another process was faster
            continue
