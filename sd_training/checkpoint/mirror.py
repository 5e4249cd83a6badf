"""Copies of a run's checkpoints in an object store or another folder (`checkpoint.mirror`). Needs no torch.

    URL/RUN/checkpoints/step=N/<every file>       first
    URL/RUN/checkpoints/step=N/MANIFEST.json      last; without it the copy does not exist

A run saves to its folder and resumes from it. The mirror receives what was sealed there, and restores it for a run
whose folder lacks it: on a new machine, or after the loss of a disk. A copy is compared with its manifest before it
gets its name.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

import obstore
from obstore.store import ObjectStore

from sd_training.checkpoint import folder as sealed
from sd_training.checkpoint.folder import RunLock, remove_quietly
from sd_training.data.storage.object_store import is_outage, open_store, reason_of
from sd_training.errors import ConfigError, DamagedCheckpointsError, OutageError, UserError
from sd_training.log import get_logger

log = get_logger(__name__)

_NUM_RETRIES, _TIMEOUT_S = 5, 60.0
_MAX_MANIFEST_BYTES = 16 * 2**20
"""A larger one is not read."""
_STEP = re.compile(r"step=(0|[1-9][0-9]{0,14})")
AT_START = "; start with checkpoint.mirror=null to continue from this machine's checkpoints"


class _BadCopy(Exception):
    """A copy is not what was sent."""


class Mirror:
    """The copies of one run. Every method raises OutageError or ConfigError where the mirror cannot be read or written,
    and TakenOverError where another start has taken the run over.

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
        """Optimizer steps of the complete copies, oldest first."""
        with self._errors_named(AT_START):
            return [step for step, names in self._copies().items() if sealed.MANIFEST_NAME in names]

    def send(self, folder: Path, run_lock: RunLock) -> None:
        """Copies a sealed checkpoint, its manifest last; an equal copy is kept."""
        step, manifest = sealed.step_of(folder), (folder / sealed.MANIFEST_NAME).read_bytes()
        with self._errors_named():
            with suppress(_BadCopy):  # there is none; the right to delete is not needed then
                if self._manifest_bytes(step) == manifest:
                    return
                run_lock.check()
                obstore.delete(self._store, self._path(step, sealed.MANIFEST_NAME))
            for name in [*sealed.parse_manifest(manifest).files, sealed.MANIFEST_NAME]:
                run_lock.check()
                obstore.put(self._store, self._path(step, name), folder / name)

    def rotate(self, newest: int, keep: int, num_best: int, run_lock: RunLock) -> None:
        """Deletes what the run folder would: all but the newest `keep`, milestones and the best; also incomplete copies
        and copies above the newest, which a rollback has left behind. A copy whose manifest cannot be used, such as one
        of another version of this program, is kept, named in the log, and does not count.

        Args:
            newest: optimizer steps of the checkpoint that was just sent; stays.
            keep, num_best: as `checkpoint.keep` and `checkpoint.keep_best`.
            run_lock: of this start of the run.
        """
        with self._errors_named():
            copies, infos, unusable = self._copies(), {}, []
            for step in (step for step, names in copies.items() if sealed.MANIFEST_NAME in names):
                try:
                    infos[step] = self._manifest(step).info
                except _BadCopy as error:
                    unusable.append(step)
                    log.warning(f"{self.root}/{sealed.folder_name(step)} is left as it is, for you to delete: {error}")
            infos = {step: info for step, info in infos.items() if step <= newest}
            protected = sealed.protected_checkpoints(infos, num_best)
            kept = {newest, *unusable, *list(infos)[-max(keep, sealed.MIN_KEPT) :], *protected}
            for step in copies.keys() - kept:
                run_lock.check()
                for name in sorted(copies[step], key=lambda name: name != sealed.MANIFEST_NAME):  # the manifest first
                    obstore.delete(self._store, self._path(step, name))

    def restore(self, root: Path, run_lock: RunLock) -> Path | None:
        """Downloads the newest intact copy, where the run's own folder has no checkpoint as new that verifies.

        Args:
            root: the run's folder of checkpoints.
            run_lock: of this start of the run.

        Raises:
            OSError: nothing can be written here.
            DamagedCheckpointsError: none of the copies is intact, and `root` holds no checkpoint either.
        """
        folders = reversed(sealed.sealed_checkpoints(root))
        own = next((sealed.step_of(folder) for folder in folders if not sealed.verify_checkpoint(folder)), -1)
        newer = [step for step in self.steps() if step > own]
        for step in reversed(newer):
            copy = f"{self.root}/{sealed.folder_name(step)}"
            log.info(f"{root} has nothing intact as new as {copy}: downloading it")
            try:
                return self._download(step, root, run_lock)
            except (_BadCopy, sealed.ReadBackError) as error:
                log.error(f"{copy} cannot be used: {error}")
        if newer and own < 0:
            raise DamagedCheckpointsError(
                f"checkpoint.mirror: {self.root} holds copies of checkpoints, but none of them can be used"
            )
        return None

    def _download(self, step: int, root: Path, run_lock: RunLock) -> Path:
        with self._errors_named(AT_START):
            manifest = self._manifest(step)
        partial = sealed.begin_partial(root, step, run_lock, sealed.DOWNLOAD)
        assert partial is not None, "an intact checkpoint of this step is there"
        try:
            for name, file in manifest.files.items():
                with self._errors_named(AT_START), (partial / name).open("wb") as target:
                    for chunk in self._read(step, name, file.size):
                        target.write(chunk)
            (partial / sealed.MANIFEST_NAME).write_text(sealed.manifest_text(manifest), encoding="utf-8")
            return sealed.seal_partial(partial, None, run_lock)
        finally:
            remove_quietly(partial)  # gone where it was sealed

    def _manifest(self, step: int) -> sealed.Manifest:
        try:
            manifest = sealed.parse_manifest(self._manifest_bytes(step))
        except ValueError as error:
            raise _BadCopy(f"{sealed.MANIFEST_NAME}: {error}") from error
        if manifest.step != step:
            raise _BadCopy(f"its manifest is that of step {manifest.step:,}")
        return manifest

    def _manifest_bytes(self, step: int) -> bytes:
        return b"".join(self._read(step, sealed.MANIFEST_NAME, _MAX_MANIFEST_BYTES))

    def _read(self, step: int, name: str, max_bytes: int) -> Iterator[bytes]:
        """Content of a file of a copy, which is not trusted.

        Raises:
            _BadCopy: there is none, or a larger one than `max_bytes`.
        """
        try:
            found = obstore.get(self._store, self._path(step, name))
        except FileNotFoundError as error:
            raise _BadCopy(f"{name} is missing") from error
        if (size := found.meta["size"]) > max_bytes:
            raise _BadCopy(f"{name} has {size:,} bytes, at most {max_bytes:,} belong there")
        return map(bytes, found.stream())

    def _copies(self) -> dict[int, list[str]]:
        """Step → names of files of all copies, complete or not, oldest first."""
        if self._url.startswith("file://"):
            try:
                os.stat(self.root.removeprefix("file://"))
            except FileNotFoundError:
                return {}  # opening the store would make the folder
        found: dict[int, list[str]] = defaultdict(list)
        for page in obstore.list(self._store, self._prefix):
            for file in page:
                folder, _, name = file["path"].removeprefix(f"{self._prefix}/").partition("/")
                if match := _STEP.fullmatch(folder):
                    found[int(match[1])].append(name)
        return dict(sorted(found.items()))

    def _path(self, step: int, name: str) -> str:
        return f"{self._prefix}/{sealed.folder_name(step)}/{name}"

    @contextmanager
    def _errors_named(self, remedy: str = "") -> Iterator[None]:
        """Whatever obstore and the disk raise, as one error that names the mirror."""
        try:
            yield
        except (UserError, _BadCopy):
            raise
        except Exception as error:
            kind = OutageError if is_outage(error) else ConfigError
            raise kind(f"checkpoint.mirror: {self.root}: {reason_of(error)}{remedy}") from error
