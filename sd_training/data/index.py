"""The index of the data set: built shard by shard, kept on disk, concatenated into columns in memory."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from sd_training.data.index_file import IndexFile, ShardState, build_index_file, read_index_file
from sd_training.data.problems import Problems
from sd_training.errors import DataError
from sd_training.rank_log import get_logger, is_main_process

log = get_logger(__name__)

FEW_SHARDS = 16
"""Up to so many shards are indexed in this process: starting others would take longer."""
MAX_PROCESSES = 16


class DatasetIndex:
    """Columns over all samples of all shards, in the order of the shards.

    Attributes:
        shards: the shard files.
        shard_of: [N] int32, the shard of a sample.
        keys: N sample keys.
        image_offset, image_length, caption_offset, caption_length: [N] int64 bytes; -1 where there is no caption.
        cls: N class ids as text, or null.
        metadata: arrow table of the columns `number:<field>` and `text:<field>` that were asked for.
        fields: every metadata field that some shard has.
        problems: what was wrong with the shards.
        fingerprint: sha256 over names and sizes of the shards and keys of the samples; data may move.
    """

    def __init__(self, states: Sequence[ShardState], files: Sequence[IndexFile]) -> None:
        self.shards = [state.path for state in states]
        table = pa.concat_tables([file.table for file in files], promote_options="default")
        self.shard_of = np.repeat(np.arange(len(files), dtype=np.int32), [file.table.num_rows for file in files])
        self.keys = table["key"]
        self.image_offset, self.image_length, self.caption_offset, self.caption_length = (
            table[f"{role}_{part}"].to_numpy() for role in ("image", "caption") for part in ("offset", "length")
        )
        self.cls = table["cls"]
        self.metadata = table.select([name for name in table.column_names if ":" in name])
        self.fields = frozenset().union(*(file.fields for file in files))
        self.problems = Problems()
        for file in files:
            self.problems.merge(file.problems)
        self.fingerprint = _fingerprint(states, files)

    def __len__(self) -> int:
        return len(self.shard_of)

    def name(self, sample: int) -> tuple[str, str]:
        """Shard file and key of a sample."""
        return str(self.shards[self.shard_of[sample]]), self.keys[sample].as_py()


def default_index_dir() -> Path:
    """`$XDG_CACHE_HOME/sd_training/index` or `~/.cache/sd_training/index`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sd_training" / "index"


def load_index(shards: Sequence[Path], index_dir: Path | None, fields: Iterable[str] = ()) -> DatasetIndex:
    """Indexes the shards that are new or changed, and reads the index of all.

    Args:
        shards: existing files.
        index_dir: where the index is kept; None takes `default_index_dir()`.
        fields: metadata fields that filters need.

    Raises:
        DataError: a shard or the index folder cannot be read or written.
    """
    folder = index_dir or default_index_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        states = [ShardState.of(shard) for shard in shards]
        _build([state for state in states if not state.index_path(folder).exists()], folder)
        wanted = frozenset(fields)
        with ThreadPoolExecutor(8) as pool:
            files = list(pool.map(lambda state: _read(state, folder, wanted), states))
    except OSError as error:
        raise DataError(
            f"the shards cannot be indexed: {error}; dataset.params.index_dir must be a writable folder "
            f"(now '{folder}') and the shards readable files"
        ) from error
    return DatasetIndex(states, files)


def _read(state: ShardState, folder: Path, fields: frozenset[str]) -> IndexFile:
    path = state.index_path(folder)
    try:
        return read_index_file(path, fields)
    except (OSError, ValueError, KeyError) as error:
        log.warning("the index file %s is damaged (%s) and is built again", path, error)
        build_index_file(state, folder)
        return read_index_file(path, fields)


def _build(missing: Sequence[ShardState], folder: Path) -> None:
    if len(missing) <= FEW_SHARDS:
        for state in missing:
            build_index_file(state, folder)
        return
    bar = tqdm(total=len(missing), desc="indexing shards", unit="shard", disable=not is_main_process())
    with _processes(len(missing)) as pool, bar:
        futures = [pool.submit(build_index_file, state, folder) for state in missing]
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


def _fingerprint(states: Sequence[ShardState], files: Sequence[IndexFile]) -> str:
    digest = hashlib.sha256()
    for state, file in zip(states, files, strict=True):
        line = f"{state.path.name}/{state.size}/{file.keys_sha256}\n"  # no file name contains a slash
        digest.update(line.encode("utf-8", "backslashreplace"))
    return digest.hexdigest()
