"""Copies of a run's checkpoints in an object store or another folder (`checkpoint.mirror`). Needs no torch.

    URL/RUN/checkpoints/step=N/<every file>       first
    URL/RUN/checkpoints/step=N/MANIFEST.json      last; without it the copy does not exist

A run saves to its folder and resumes from it. The mirror receives what was sealed there, and restores it for a run
whose folder has less: a new machine, a lost disk. A copy is compared with its manifest before it gets its name.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import obstore
from obstore.store import ObjectStore

from sd_training.checkpoint.atomic_io import files_below, remove_quietly
from sd_training.checkpoint.folder import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    MIN_KEPT,
    Manifest,
    ReadBackError,
    begin_partial,
    folder_name,
    manifest_text,
    parse_manifest,
    protected_checkpoints,
    seal_partial,
    sealed_checkpoints,
    step_of,
    verify_checkpoint,
)
from sd_training.checkpoint.run_lock import RunLock
from sd_training.data.storage.object_store import is_outage, open_store, reason_of
from sd_training.errors import ConfigError, DamagedCheckpointsError, TakenOverError
from sd_training.log import get_logger

log = get_logger(__name__)

_NUM_RETRIES, _TIMEOUT_S = 5, 60.0
_STEP = re.compile(r"step=(0|[1-9][0-9]{0,14})")


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


class Mirror:
    """The copies of one run.

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
            return [step for step, sizes in self._copies().items() if MANIFEST_NAME in sizes]

    def send(self, folder: Path, run_lock: RunLock) -> None:
        """Copies a sealed checkpoint, its manifest last; an equal copy is left alone.

        Raises:
            MirrorError: it could not be sent.
            TakenOverError: another start has taken the run over.
        """
        step, own = step_of(folder), folder / MANIFEST_NAME
        with self._errors_named():
            if (found := self._manifest_bytes(step)) == own.read_bytes():
                return
            run_lock.check()
            if found:  # else the right to delete is not needed
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
            keep, num_best, best_by: as `checkpoint.keep`, `checkpoint.keep_best` and `checkpoint.best_by`.
            run_lock: of this start of the run.

        Raises:
            MirrorError: it could not be read, or something could not be deleted.
            TakenOverError: another start has taken the run over.
        """
        with self._errors_named():
            copies, infos, unusable = self._copies(), {}, []
            for step in (step for step, sizes in copies.items() if MANIFEST_NAME in sizes):
                try:
                    infos[step] = self._manifest(step).info
                except _BadCopy as error:
                    unusable.append(step)
                    log.warning(f"{self.root}/{folder_name(step)} is left as it is, for you to delete: {error}")
            infos = {step: info for step, info in infos.items() if step <= newest}
            protected = protected_checkpoints(infos, num_best, best_by)
            kept = {newest, *unusable, *list(infos)[-max(keep, MIN_KEPT) :], *protected}
            for step in copies.keys() - kept:
                run_lock.check()
                for name in sorted(copies[step], key=lambda name: name != MANIFEST_NAME):  # the manifest first
                    obstore.delete(self._store, self._path(step, name))

    def restore(self, root: Path, run_lock: RunLock) -> Path | None:
        """Downloads the newest intact copy, where the run's own folder has no checkpoint as new that verifies.

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
        with self._errors_named():
            newer = {step: sizes for step, sizes in self._copies().items() if step > own and MANIFEST_NAME in sizes}
        for step, sizes in reversed(newer.items()):
            copy = f"{self.root}/{folder_name(step)}"
            log.info(f"{root} has nothing intact as new as {copy}: downloading it")
            try:
                return self._download(step, sizes, root, run_lock)
            except _BadCopy as error:
                log.error(f"{copy} cannot be used: {error}")
        if newer and own < 0:
            raise DamagedCheckpointsError(
                f"checkpoint.mirror: {self.root} holds copies of checkpoints, but none of them can be used"
            )
        return None

    def _download(self, step: int, sizes: Mapping[str, int], root: Path, run_lock: RunLock) -> Path:
        with self._errors_named():
            manifest = self._manifest(step)
        partial = begin_partial(root, step, run_lock)
        assert partial is not None, "an intact checkpoint of this step is there"
        try:
            for name, file in manifest.files.items():
                if sizes.get(name) != file.size:  # the copy may not be what was sent
                    raise _BadCopy(f"{name} has {sizes.get(name, 0):,} bytes, {file.size:,} were sent")
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                with self._errors_named(), (partial / name).open("wb") as target:
                    for chunk in obstore.get(self._store, self._path(step, name)).stream():
                        target.write(chunk)
            (partial / MANIFEST_NAME).write_text(manifest_text(manifest), encoding="utf-8")
            return seal_partial(partial, None, run_lock)
        except ReadBackError as error:
            raise _BadCopy(str(error)) from error
        finally:
            remove_quietly(partial)  # gone where it was sealed

    def _manifest(self, step: int) -> Manifest:
        try:
            manifest = parse_manifest(self._manifest_bytes(step))
        except ValueError as error:
            raise _BadCopy(f"{MANIFEST_NAME}: {error}") from error
        if manifest.step != step:
            raise _BadCopy(f"its manifest is that of step {manifest.step:,}")
        return manifest

    def _manifest_bytes(self, step: int) -> bytes:
        """Empty where there is none, or a larger one than a manifest may be."""
        try:
            found = obstore.get(self._store, self._path(step, MANIFEST_NAME))
        except FileNotFoundError:
            return b""
        return bytes(found.bytes()) if found.meta["size"] <= MAX_MANIFEST_BYTES else b""

    def _copies(self) -> dict[int, dict[str, int]]:
        """Step → file → size [bytes] of all copies, complete or not, oldest first."""
        if self._url.startswith("file://"):
            try:
                os.stat(self.root.removeprefix("file://"))
            except FileNotFoundError:
                return {}  # opening the store would make the folder
        found: dict[int, dict[str, int]] = defaultdict(dict)
        for page in obstore.list(self._store, self._prefix):
            for file in page:
                folder, _, name = file["path"].removeprefix(f"{self._prefix}/").partition("/")
                if match := _STEP.fullmatch(folder):
                    found[int(match[1])][name] = file["size"]
        return dict(sorted(found.items()))

    def _path(self, step: int, name: str) -> str:
        return f"{self._prefix}/{folder_name(step)}/{name}"

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Whatever obstore and the disk raise, as one error that names the mirror."""
        try:
            yield
        except (TakenOverError, ConfigError, _BadCopy):
            raise
        except Exception as error:
            raise MirrorError(f"checkpoint.mirror: {self.root}: {reason_of(error)}", is_outage(error)) from error
