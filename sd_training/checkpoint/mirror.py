"""Copies of a run's checkpoints in an object store or another folder (`checkpoint.mirror`). Needs no torch.

    URL/RUN/checkpoints/step=N/<every file>       first
    URL/RUN/checkpoints/step=N/MANIFEST.json      last; without it there is no copy

A run saves to its folder and resumes from it. The mirror gets what was sealed there, and gives it back to a run whose
folder has less: a new machine, a lost disk. What comes back is compared with its manifest before it gets its name.
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

from sd_training.checkpoint.atomic_io import files_below
from sd_training.checkpoint.folder import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    adopt_partial,
    begin_partial,
    folder_name,
    manifest_text,
    parse_manifest,
    remove_partial,
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
    """The mirror cannot be asked, or does not take what it is sent.

    Args:
        text: names the mirror and the reason.
        is_outage: whether another start may succeed.
    """

    def __init__(self, text: str, is_outage: bool = False) -> None:
        super().__init__(text)
        self.is_outage = is_outage


class _BadCopy(Exception):
    """What is there is not what was sent."""


class _HalfSent(_BadCopy):
    """Whoever sent it was stopped, or has begun to delete it."""


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
        self._left: set[int] = set()
        """Steps of the copies that the log has named because rotation leaves them."""

    @cached_property
    def _store(self) -> ObjectStore:
        """Opened when it is first asked; a local folder is then made."""
        return open_store(self._url, _NUM_RETRIES, _TIMEOUT_S)[0]

    def steps(self) -> list[int]:
        """Optimizer steps of the whole copies, oldest first.

        Raises:
            MirrorError: it cannot be asked.
        """
        with self._errors_named():
            return [step for step in self._folders() if self._has_manifest(step)]

    def send(self, folder: Path, run_lock: RunLock) -> None:
        """Copies a sealed checkpoint, its manifest last; one that is there already is left alone.

        Raises:
            MirrorError: it could not be sent.
            TakenOverError: another start has the run.
        """
        step = step_of(folder)
        own, copied = folder / MANIFEST_NAME, self._path(step, MANIFEST_NAME)
        with self._errors_named():
            if self._has_manifest(step):
                if self._is_same(copied, own.read_bytes()):
                    return
                run_lock.check()
                obstore.delete(self._store, copied)
            for path in files_below(folder):
                if path != own:
                    run_lock.check()
                    self._put(path, self._path(step, path.relative_to(folder).as_posix()))
            run_lock.check()
            self._put(own, copied)

    def rotate(self, newest: int, keep: int, num_best: int, best_by: str, run_lock: RunLock) -> None:
        """Deletes what the run folder would: all but the newest `keep`, milestones and the best. Also half sent ones,
        and copies above the newest: the run has gone back behind them. A copy whose manifest cannot be used, as one of
        another version of this program, is left, is named in the log, and counts for nothing.

        Args:
            newest: optimizer steps of the checkpoint that was just sent; stays.
            keep: as `checkpoint.keep`.
            num_best, best_by: as `checkpoint.keep_best` and `checkpoint.best_by`.
            run_lock: of this start of the run.

        Raises:
            MirrorError: it could not be asked, or something could not be deleted.
            TakenOverError: another start has the run.
        """
        with self._errors_named():
            infos = {step: info for step, info in self._infos().items() if step <= newest}
            kept = {newest, *self._left, *list(infos)[-max(keep, MIN_KEPT) :], *to_keep(infos, num_best, best_by)}
            for step in self._folders():
                if step not in kept:
                    run_lock.check()
                    self._remove(step)

    def restore(self, root: Path, run_lock: RunLock) -> Path | None:
        """Fetches the newest whole copy, where the run's own folder of checkpoints has none as new that verifies.

        Args:
            root: the run's folder of checkpoints.
            run_lock: of this start of the run.

        Raises:
            MirrorError: the mirror cannot be asked.
            OSError: nothing can be written here.
            DamagedCheckpointsError: there are copies, none of them is whole, and `root` holds nothing either.
        """
        own = next(
            (step_of(folder) for folder in reversed(sealed_checkpoints(root)) if not verify_checkpoint(folder)), -1
        )
        newer = [step for step in self.steps() if step > own]
        for step in reversed(newer):
            log.info(f"{root} has nothing whole as new as {self._url_of(step)}: fetching it")
            try:
                return self._fetch(step, root, run_lock)
            except _BadCopy as error:
                log.error(f"{self._url_of(step)} cannot be used: {error}")
            finally:
                remove_partial(root, step, run_lock)
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
        with self._errors_named():
            for name, file in recorded.files.items():
                self._get(step, name, partial, file.size)
        (partial / MANIFEST_NAME).write_text(manifest_text(recorded), encoding="utf-8")
        try:
            return adopt_partial(partial, run_lock)
        except ValueError as error:
            raise _BadCopy(str(error)) from error

    def _infos(self) -> dict[int, dict[str, Any]]:
        """What the manifests say, oldest first. Of those that cannot be used, `_left` has all but the half sent."""
        found, left = {}, set()
        for step in self._folders():
            try:
                found[step] = self._manifest(step).info
            except _HalfSent:
                continue
            except _BadCopy as error:
                left.add(step)
                if step not in self._left:
                    log.error(f"{self._url_of(step)} is left as it is, for you to delete: {error}")
        self._left = left
        return found

    def _manifest(self, step: int) -> Manifest:
        """Of the copy; no more than a manifest may have is read."""
        path = self._path(step, MANIFEST_NAME)
        try:
            size = self._size(path)
            if size > MAX_MANIFEST_BYTES:
                raise _BadCopy(f"{MANIFEST_NAME} has {size:,} bytes, at most {MAX_MANIFEST_BYTES:,} are read")
            raw = self._read(path) if size else b""
        except FileNotFoundError as error:
            raise _HalfSent(f"{MANIFEST_NAME} is missing") from error
        if not raw.endswith(b"}"):
            raise _HalfSent(f"{MANIFEST_NAME} has no end")
        try:
            recorded = parse_manifest(raw)
        except ValueError as error:
            raise _BadCopy(f"{MANIFEST_NAME}: {error}") from error
        if recorded.step != step:
            raise _BadCopy(f"its manifest is that of step {recorded.step:,}")
        return recorded

    def _size(self, path: str) -> int:
        return int(obstore.head(self._store, path)["size"])

    def _read(self, path: str) -> bytes:
        return bytes(obstore.get(self._store, path).bytes())

    def _is_same(self, path: str, content: bytes) -> bool:
        return self._size(path) == len(content) and self._read(path) == content

    def _get(self, step: int, name: str, folder: Path, size: int) -> None:
        """The size is looked at first: what is there may not be what was sent."""
        path = self._path(step, name)
        try:
            there = self._size(path)
        except FileNotFoundError as error:
            raise _BadCopy(f"{name} is missing") from error
        if there != size:
            raise _BadCopy(f"{name} has {there:,} bytes, {size:,} were sent")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as target:
            for chunk in obstore.get(self._store, path).stream():
                target.write(chunk)

    def _put(self, path: Path, target: str) -> None:
        obstore.put(self._store, target, path)
        if (there := self._size(target)) != path.stat().st_size:
            raise OSError(f"{target} has {there} bytes after it was sent, {path} has {path.stat().st_size}")

    def _remove(self, step: int) -> None:
        """The manifest first: without it there is no copy."""
        if self._has_manifest(step):
            obstore.delete(self._store, self._path(step, MANIFEST_NAME))
        for files in obstore.list(self._store, self._path(step)):
            obstore.delete(self._store, [file["path"] for file in files])

    def _folders(self) -> list[int]:
        if self._url.startswith("file://"):
            try:
                os.stat(self.root.removeprefix("file://"))
            except FileNotFoundError:
                return []  # and nothing is made by asking
        found = obstore.list_with_delimiter(self._store, self._prefix)["common_prefixes"]
        names = [path.rstrip("/").rpartition("/")[2] for path in found]
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step=(0|[1-9][0-9]{0,14})", name))

    def _has_manifest(self, step: int) -> bool:
        try:
            obstore.head(self._store, self._path(step, MANIFEST_NAME))
        except FileNotFoundError:
            return False
        return True

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
