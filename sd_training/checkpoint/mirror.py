"""Copies of a run's checkpoints in an object store or another folder (`checkpoint.mirror`). Needs no torch.

    URL/RUN/checkpoints/step=N/<every file>       first
    URL/RUN/checkpoints/step=N/MANIFEST.json      last; without it the copy does not exist

A run saves to its folder and resumes from it. The mirror receives what was sealed there, and restores it for a run
whose folder has less: a new machine, a lost disk. A copy is compared with its manifest before it gets its name.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import obstore
from obstore.store import ObjectStore

from sd_training.checkpoint.atomic_io import files_below, remove_quietly
from sd_training.checkpoint.folder import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    ReadBackError,
    begin_partial,
    folder_name,
    manifest_text,
    parse_manifest,
    seal_partial,
    sealed_checkpoints,
    step_of,
    verify_checkpoint,
)
from sd_training.checkpoint.retention import MIN_KEPT, to_keep
from sd_training.checkpoint.run_lock import RunLock
from sd_training.data.storage.object_store import is_outage, open_store, reason_of
from sd_training.errors import ConfigError, DamagedCheckpointsError, TakenOverError
from sd_training.log import get_logger

log = get_logger(__name__)

_NUM_RETRIES, _TIMEOUT_S = 5, 60.0


class MirrorError(OSError):
    """The mirror cannot be read or written.

    Args:
        text: names the mirror and the reason.
        is_outage: whether another start may succeed.
    """

    def __init__(self, text: str, is_outage: bool = False) -> None:
        super().__init__(text)
        self.is_outage = is_outage


class _BadCopy(Exception):
    """A copy is not what was sent."""


class _IncompleteCopy(_BadCopy):
    """Its sender was stopped, or has begun to delete it."""


class Mirror:
    """Of one run.

    Args:
        url: `checkpoint.mirror`.
        run: name of the run folder.
    """

    def __init__(self, url: str, run: str) -> None:
        self.root = f"{url.rstrip('/')}/{run}/checkpoints"
        """URL of the copies."""
        self._url = url
        scheme, _, place = url.partition("://")
        folder = "" if scheme == "file" else place.partition("/")[2].strip("/")
        self._prefix = "/".join(filter(None, (folder, run, "checkpoints")))
        self._unusable: set[int] = set()
        """Steps of the copies that rotation leaves alone and the log has named."""

    @cached_property
    def _store(self) -> ObjectStore:
        """Opened at its first use; a local folder is then made."""
        return open_store(self._url, _NUM_RETRIES, _TIMEOUT_S)[0]

    def steps(self) -> list[int]:
        """Optimizer steps of the complete copies, oldest first.

        Raises:
            MirrorError: it cannot be read.
        """
        with self._errors_named():
            return [step for step in self._folders() if self._size(step, MANIFEST_NAME) is not None]

    def send(self, folder: Path, run_lock: RunLock) -> None:
        """Copies a sealed checkpoint, its manifest last; an equal copy is left alone.

        Raises:
            MirrorError: it could not be sent.
            TakenOverError: another start has taken the run over.
        """
        step, own = step_of(folder), folder / MANIFEST_NAME
        with self._errors_named():
            size = self._size(step, MANIFEST_NAME)
            if size == own.stat().st_size and self._read(self._path(step, MANIFEST_NAME)) == own.read_bytes():
                return
            run_lock.check()
            if size is not None:
                obstore.delete(self._store, self._path(step, MANIFEST_NAME))
            for path in [*(path for path in files_below(folder) if path != own), own]:
                run_lock.check()
                obstore.put(self._store, self._path(step, path.relative_to(folder).as_posix()), path)

    def rotate(self, newest: int, keep: int, num_best: int, best_by: str, run_lock: RunLock) -> None:
        """Deletes what the run folder would: all but the newest `keep`, milestones and the best; also incomplete copies
        and copies above the newest, which a rollback has left behind. A copy whose manifest cannot be used, such as one
        of another version of this program, is left alone and named in the log, and does not count.

        Args:
            newest: optimizer steps of the checkpoint that was just sent; stays.
            keep: as `checkpoint.keep`.
            num_best, best_by: as `checkpoint.keep_best` and `checkpoint.best_by`.
            run_lock: of this start of the run.

        Raises:
            MirrorError: it could not be read, or something could not be deleted.
            TakenOverError: another start has taken the run over.
        """
        with self._errors_named():
            infos = {step: info for step, info in self._infos().items() if step <= newest}
            kept = {newest, *self._unusable, *list(infos)[-max(keep, MIN_KEPT) :], *to_keep(infos, num_best, best_by)}
            for step in set(self._folders()) - kept:
                run_lock.check()
                if self._size(step, MANIFEST_NAME) is not None:  # first: without it the copy does not exist
                    obstore.delete(self._store, self._path(step, MANIFEST_NAME))
                for files in obstore.list(self._store, self._path(step)):
                    obstore.delete(self._store, [file["path"] for file in files])

    def restore(self, root: Path, run_lock: RunLock) -> Path | None:
        """Fetches the newest intact copy, where the run's own folder has no checkpoint as new that verifies.

        Args:
            root: the run's folder of checkpoints.
            run_lock: of this start of the run.

        Raises:
            MirrorError: the mirror cannot be read.
            OSError: nothing can be written here.
            DamagedCheckpointsError: there are copies, none of them is intact, and `root` holds nothing either.
        """
        intact = (step_of(folder) for folder in reversed(sealed_checkpoints(root)) if not verify_checkpoint(folder))
        own = next(intact, -1)
        newer = [step for step in self.steps() if step > own]
        for step in reversed(newer):
            log.info(f"{root} has nothing intact as new as {self._url_of(step)}: fetching it")
            try:
                return self._fetch(step, root, run_lock)
            except _BadCopy as error:
                log.error(f"{self._url_of(step)} cannot be used: {error}")
        if newer and own < 0:
            raise DamagedCheckpointsError(
                f"checkpoint.mirror: {self.root} holds copies of checkpoints, but none of them can be used"
            )
        return None

    def _fetch(self, step: int, root: Path, run_lock: RunLock) -> Path:
        with self._errors_named():
            recorded = self._manifest(step)
        partial = begin_partial(root, step, sum(file.size for file in recorded.files.values()), run_lock)
        if partial is None:
            return root / folder_name(step)
        try:
            with self._errors_named():
                for name, file in recorded.files.items():
                    self._get(step, name, partial, file.size)
            (partial / MANIFEST_NAME).write_text(manifest_text(recorded), encoding="utf-8")
            return seal_partial(partial, None, run_lock)
        except ReadBackError as error:
            raise _BadCopy(str(error)) from error
        finally:
            remove_quietly(partial)  # gone where it was sealed

    def _infos(self) -> dict[int, dict[str, Any]]:
        """What the usable manifests say, oldest first."""
        found, unusable = {}, set()
        for step in self._folders():
            try:
                found[step] = self._manifest(step).info
            except _IncompleteCopy:
                continue
            except _BadCopy as error:
                unusable.add(step)
                if step not in self._unusable:
                    log.error(f"{self._url_of(step)} is left as it is, for you to delete: {error}")
        self._unusable = unusable
        return found

    def _manifest(self, step: int) -> Manifest:
        """Of a copy; no more is read than a manifest may have."""
        size = self._size(step, MANIFEST_NAME) or 0
        if size > MAX_MANIFEST_BYTES:
            raise _BadCopy(f"{MANIFEST_NAME} has {size:,} bytes, at most {MAX_MANIFEST_BYTES:,} are read")
        try:
            raw = self._read(self._path(step, MANIFEST_NAME)) if size else b""
        except FileNotFoundError:
            raw = b""
        if not raw.endswith(b"}"):
            raise _IncompleteCopy(f"{MANIFEST_NAME} is missing or has no end")
        try:
            recorded = parse_manifest(raw)
        except ValueError as error:
            raise _BadCopy(f"{MANIFEST_NAME}: {error}") from error
        if recorded.step != step:
            raise _BadCopy(f"its manifest is that of step {recorded.step:,}")
        return recorded

    def _get(self, step: int, name: str, folder: Path, size: int) -> None:
        """Compares sizes first: the copy may not be what was sent."""
        found = self._size(step, name)
        if found != size:
            raise _BadCopy(f"{name} is missing" if found is None else f"{name} has {found:,} bytes, {size:,} were sent")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as target:
            for chunk in obstore.get(self._store, self._path(step, name)).stream():
                target.write(chunk)

    def _size(self, step: int, name: str) -> int | None:
        """Of a file [bytes]; None where it does not exist."""
        try:
            return int(obstore.head(self._store, self._path(step, name))["size"])
        except FileNotFoundError:
            return None

    def _read(self, path: str) -> bytes:
        return bytes(obstore.get(self._store, path).bytes())

    def _folders(self) -> list[int]:
        """Steps of all copies, complete or not, oldest first."""
        if self._url.startswith("file://"):
            try:
                os.stat(self.root.removeprefix("file://"))
            except FileNotFoundError:
                return []  # opening the store would make the folder
        found = obstore.list_with_delimiter(self._store, self._prefix)["common_prefixes"]
        names = [path.rstrip("/").rpartition("/")[2] for path in found]
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step=(0|[1-9][0-9]{0,14})", name))

    def _path(self, step: int, name: str = "") -> str:
        return f"{self._prefix}/{folder_name(step)}/{name}".rstrip("/")

    def _url_of(self, step: int) -> str:
        return f"{self.root}/{folder_name(step)}"

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Whatever obstore and the disk raise, as one error that names the mirror."""
        try:
            yield
        except (TakenOverError, ConfigError, _BadCopy):
            raise
        except Exception as error:
            raise MirrorError(f"checkpoint.mirror: {self.root}: {reason_of(error)}", is_outage(error)) from error
