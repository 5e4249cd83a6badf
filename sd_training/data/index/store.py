"""The index of a data set: built shard by shard, kept on disk, mapped into memory as columns.

The index of one shard is a parquet file with one row per sample, written once and replaced only as a whole. The indexes
of all shards are joined into one Arrow file that every process of a machine maps into memory: mapped pages belong to
the page cache, so ten loader processes hold an index of a million samples once.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from sd_training.data.sources.base import INFO, DatasetIndex, Problems, Shard, Source, field_names
from sd_training.data.storage.files import cache_folder
from sd_training.errors import DataError
from sd_training.log import get_logger, is_main_process

log = get_logger(__name__)

FORMAT_VERSION = 4
CHECK = "check:"
"""Columns that count for the fingerprint only, such as checksums, and are not kept."""
FEW_SHARDS = 16
"""Up to so many shards are indexed in this process: starting others would take longer."""
MAX_PROCESSES = 16
_JOINED_KEPT_S = 30 * 24 * 3600
"""Joined indexes not opened for so long are removed; they are made again from the shards' in seconds."""
_PARTIAL_KEPT_S = 24 * 3600
"""Writing an index file takes less."""
T = TypeVar("T")


def load_index(source: Source, index_dir: Path | None, fields: Iterable[str] = ()) -> DatasetIndex:
    """Indexes the shards that are new or changed, and opens the index of all.

    Args:
        source: what to index.
        index_dir: where the index is kept; None takes `cache_folder("index")`.
        fields: metadata fields that filters and captions need.

    Raises:
        DataError: a shard or the index folder cannot be read or written.
    """
    folder = index_dir or cache_folder("index")
    shards, wanted = source.shards(), frozenset(fields)
    paths = [folder / f"{_name_of([source.identity, *shard, FORMAT_VERSION])}.parquet" for shard in shards]
    joined = folder / f"joined-{_name_of([[path.name for path in paths], sorted(wanted)])}.arrow"

    def shard_table(shard: Shard, path: Path) -> pa.Table:
        return _kept(path, partial(_read, path, wanted), partial(_build, source, shard, path))

    def join() -> None:
        with _one_at_a_time(joined):
            missing = [(shard, path) for shard, path in zip(shards, paths, strict=True) if not path.exists()]
            if len(missing) > FEW_SHARDS:
                # Reading headers holds the interpreter lock, so processes; fresh ones: this one may run threads.
                count = min(MAX_PROCESSES, os.cpu_count() or 1)
                with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as processes:
                    built = processes.map(_build, repeat(source), *zip(*missing, strict=True))
                    for _ in tqdm(built, "indexing", len(missing), unit="shard", disable=not is_main_process()):
                        pass
            else:
                for shard, path in missing:
                    _build(source, shard, path)
            _sweep(folder)
            with ThreadPoolExecutor(8) as threads:
                _write_joined(list(threads.map(shard_table, shards, paths)), joined)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _kept(joined, lambda: DatasetIndex(joined, shards), join)
    except OSError as error:
        raise DataError(
            f"the data cannot be indexed: {error}; dataset.params.index_dir must be a writable folder "
            f"(now '{folder}') and the data readable"
        ) from error


@contextmanager
def _one_at_a_time(joined: Path) -> Iterator[None]:
    """Processes that begin together index every shard once; where files cannot be locked, each of them does."""
    lock = joined.with_suffix(".lock")
    with lock.open("a") as handle:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _kept(path: Path, read: Callable[[], T], make: Callable[[], None]) -> T:
    """What a file of the index holds; it is made first where it is missing or damaged."""
    try:
        return read()
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        log.warning("the index file %s is damaged (%s) and is made again", path, error)
    make()
    return read()


def _name_of(identity: object) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def _build(source: Source, shard: Shard, path: Path) -> None:
    """Scans the shard and writes its index."""
    columns, problems = source.scan(shard)
    rows = len(columns["key"])
    every = {"block": pa.array(np.zeros(rows, dtype=np.int32)), "cls": pa.nulls(rows, pa.large_string())}
    table = pa.table(every | columns)
    info = {"content_sha256": _content_hash(table), "problems": problems.to_json()}
    table = table.drop_columns([name for name in table.column_names if name.startswith(CHECK)])
    table = table.replace_schema_metadata({INFO: json.dumps(info).encode()})
    with _replaced_whole(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


@contextmanager
def _replaced_whole(path: Path) -> Iterator[str]:
    """A file to write that then becomes `path`. Several processes may do so at once: the last complete file stays."""
    with tempfile.TemporaryDirectory(dir=path.parent, suffix=".partial") as folder:
        temporary = os.path.join(folder, path.name)
        yield temporary
        os.replace(temporary, path)


def _content_hash(table: pa.Table) -> str:
    """Of everything that distinguishes samples; offsets are left out, so that a rewritten shard is the same data."""
    digest = hashlib.sha256()
    for name in sorted(name for name in table.column_names if not (name.startswith("at:") and "offset" in name)):
        column = table[name]
        digest.update(f"{name}\n".encode())
        if pa.types.is_integer(column.type) and not column.null_count:
            digest.update(column.to_numpy().astype("<i8").tobytes())
        else:
            digest.update(json.dumps(column.to_pylist(), default=str).encode())
    return digest.hexdigest()


def _read(path: Path, fields: frozenset[str]) -> pa.Table:
    """The index of a shard with the requested metadata fields; all of them are named in its metadata.

    Raises OSError, ValueError or KeyError where the file is missing, damaged (pyarrow's errors are of these kinds) or
    of another program."""
    with pq.ParquetFile(path, memory_map=True) as file:
        schema = file.schema_arrow
        info = json.loads((schema.metadata or {})[INFO]) | {"fields": sorted(field_names(schema.names))}
        wanted = [name for name in schema.names if not field_names([name]) or field_names([name]) & fields]
        table = file.read(columns=wanted, use_threads=False)
    return table.replace_schema_metadata({INFO: json.dumps(info).encode()})


def _write_joined(tables: Sequence[pa.Table], path: Path) -> None:
    infos = [json.loads(table.schema.metadata[INFO]) for table in tables]
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
    joined = joined.replace_schema_metadata({INFO: json.dumps(whole).encode()})
    with (
        _replaced_whole(path) as temporary,
        pa.OSFile(temporary, "wb") as sink,
        pa.ipc.new_file(sink, joined.schema) as writer,
    ):
        writer.write_table(joined)


def _sweep(folder: Path) -> None:
    """Removes joined indexes that have not been opened for long, and incomplete files of killed processes."""
    for pattern, kept_s in (("joined-*.arrow", _JOINED_KEPT_S), ("*.partial", _PARTIAL_KEPT_S)):
        for path in folder.glob(pattern):
            with suppress(OSError):  # another process was faster
                if time.time() - path.stat().st_mtime > kept_s:
                    (shutil.rmtree if path.is_dir() else os.unlink)(path)
