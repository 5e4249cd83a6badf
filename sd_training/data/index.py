"""The index of the data set: built unit by unit, kept on disk, mapped into memory as columns."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from tqdm import tqdm

from sd_training.data.index_columns import NUMBER, TEXT
from sd_training.data.index_file import IndexFile, build_index_file, index_path, read_index_file
from sd_training.data.joined_index import joined_path, read_joined, write_joined
from sd_training.data.locations import shown
from sd_training.data.source import Source, Unit
from sd_training.errors import DataError
from sd_training.rank_log import get_logger, is_main_process

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

    def __init__(self, path: Path, units: Sequence[Unit]) -> None:
        self.path, self.units = path, list(units)
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
        return shown(self.units[self.numbers("unit")[sample]].location), str(self.columns["key"][sample].as_py())

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "units": self.units}

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
    units, wanted = source.units(), frozenset(fields)
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


def _read(source: Source, unit: Unit, folder: Path, fields: frozenset[str]) -> IndexFile:
    path = index_path(source, unit, folder)
    try:
        return read_index_file(path, fields)
    except (OSError, ValueError, KeyError) as error:
        log.warning("the index file %s is damaged (%s) and is built again", path, error)
        build_index_file(source, unit, folder)
        return read_index_file(path, fields)


def _build(source: Source, missing: Sequence[Unit], folder: Path) -> None:
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


def _fingerprint(units: Sequence[Unit], contents: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for unit, content in zip(units, contents, strict=True):
        line = f"{unit.location.rstrip('/').rpartition('/')[2]}/{unit.size}/{content}\n"  # names hold no slash
        digest.update(line.encode("utf-8", "backslashreplace"))
    return digest.hexdigest()
