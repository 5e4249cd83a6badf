"""Copies of a run's checkpoints in an object store, or wherever else fsspec writes to. Needs no torch.

    URL/RUN/checkpoints/step=N/<every file>       first
    URL/RUN/checkpoints/step=N/MANIFEST.json      last; without it there is no copy

A run saves to its folder and resumes from it. The mirror gets what was sealed there, and gives it back to a run whose
folder has less: a new machine, a lost disk. What comes back is compared with its manifest before it gets its name.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from sd_training.checkpoint import manifest, seal
from sd_training.checkpoint.durable import files_below
from sd_training.checkpoint.kinds import to_keep
from sd_training.checkpoint.rotation import MIN_KEPT
from sd_training.checkpoint.writer import Fence
from sd_training.errors import ConfigError, DamagedCheckpointsError, TakenOverError
from sd_training.rank_log import get_logger

log = get_logger(__name__)

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}


class MirrorError(OSError):
    """The mirror cannot be asked, or does not take what it is sent."""


class _BadCopy(Exception):
    """What is there is not what was sent."""


class _HalfSent(_BadCopy):
    """Whoever sent it was stopped, or has begun to delete it."""


class Mirror:
    """Of one run.

    Args:
        url: `checkpoint.mirror`.
        run: name of the run folder.

    Raises:
        ConfigError: a package for this kind of URL is missing.
    """

    def __init__(self, url: str, run: str) -> None:
        protocol = url.partition("://")[0]
        try:
            # Others write there as well, so listings are not kept; and nobody else's settings are shared.
            self._files, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
        except ImportError as error:
            needed = _PACKAGES.get(protocol, protocol)
            raise ConfigError(f"checkpoint.mirror: {protocol}:// needs a package: pip install {needed}") from error
        self.root = f"{path.rstrip('/')}/{run}/checkpoints"
        self._has_folders = protocol == "file"
        self._left: set[int] = set()
        """Steps of the copies that the log has named because rotation leaves them."""

    def steps(self) -> list[int]:
        """Optimizer steps of the whole copies, oldest first.

        Raises:
            MirrorError: it cannot be asked.
        """
        with self._told():
            return [step for step in self._folders() if self._has_manifest(step)]

    def send(self, folder: Path, fence: Fence) -> None:
        """Copies a sealed checkpoint, its manifest last; one that is there already is left alone.

        Raises:
            MirrorError: it could not be sent.
            TakenOverError: another start has the run.
        """
        step = seal.step_of(folder)
        own, copied = folder / manifest.NAME, self._path(step, manifest.NAME)
        with self._told():
            if self._has_manifest(step):
                if self._is_same(copied, own.read_bytes()):
                    return
                fence.check()
                self._files.rm_file(copied)
            for path in files_below(folder):
                if path != own:
                    fence.check()
                    self._put(path, self._path(step, path.relative_to(folder).as_posix()))
            fence.check()
            self._put(own, copied)

    def rotate(self, newest: int, keep: int, num_best: int, best_by: str, fence: Fence) -> None:
        """Deletes what the run folder would: all but the newest `keep`, milestones and the best. Also half sent ones,
        and copies above the newest: the run has gone back behind them. A copy whose manifest cannot be used, as one of
        another version of this program, is left, is named in the log, and counts for nothing.

        Args:
            newest: optimizer steps of the checkpoint that was just sent; stays.
            keep: as `checkpoint.keep`.
            num_best, best_by: as `checkpoint.keep_best` and `checkpoint.best_by`.
            fence: of this start of the run.

        Raises:
            MirrorError: it could not be asked, or something could not be deleted.
            TakenOverError: another start has the run.
        """
        with self._told():
            infos = {step: info for step, info in self._infos().items() if step <= newest}
            kept = {newest, *self._left, *list(infos)[-max(keep, MIN_KEPT) :], *to_keep(infos, num_best, best_by)}
            for step in self._folders():
                if step not in kept:
                    fence.check()
                    self._remove(step)

    def restore(self, root: Path, fence: Fence) -> Path | None:
        """Fetches the newest whole copy, where the run's own folder of checkpoints has none as new that verifies.

        Args:
            root: the run's folder of checkpoints.
            fence: of this start of the run.

        Raises:
            MirrorError: the mirror cannot be asked.
            OSError: nothing can be written here.
            DamagedCheckpointsError: there are copies, none of them is whole, and `root` holds nothing either.
        """
        own = next((seal.step_of(folder) for folder in reversed(seal.sealed(root)) if not seal.verify(folder)), -1)
        newer = [step for step in self.steps() if step > own]
        for step in reversed(newer):
            log.info(f"{root} has nothing whole as new as {self._path(step)}: fetching it")
            try:
                return self._fetch(step, root, fence)
            except _BadCopy as error:
                log.error(f"{self._path(step)} cannot be used: {error}")
            finally:
                seal.abandon(root, step, fence)
        if newer and own < 0:
            raise DamagedCheckpointsError(
                f"checkpoint.mirror: {self.root} holds copies of checkpoints, but none of them can be used"
            )
        return None

    def _fetch(self, step: int, root: Path, fence: Fence) -> Path:
        with self._told():
            recorded = self._manifest(step)
        partial = seal.begin(root, step, sum(file.size for file in recorded.files.values()), fence)
        if partial is None:
            return root / seal.folder_name(step)
        with self._told():
            for name, file in recorded.files.items():
                self._get(step, name, partial, file.size)
        (partial / manifest.NAME).write_text(manifest.to_text(recorded), encoding="utf-8")
        try:
            return seal.adopt(partial, fence)
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
                    log.error(f"{self._path(step)} is left as it is, for you to delete: {error}")
        self._left = left
        return found

    def _manifest(self, step: int) -> manifest.Manifest:
        """Of the copy; no more than a manifest may have is read."""
        path = self._path(step, manifest.NAME)
        try:
            size = self._files.size(path)
            if size > manifest.MAX_BYTES:
                raise _BadCopy(f"{manifest.NAME} has {size:,} bytes, at most {manifest.MAX_BYTES:,} are read")
            raw = self._files.cat_file(path, start=0, end=size) if size else b""
        except FileNotFoundError as error:
            raise _HalfSent(f"{manifest.NAME} is missing") from error
        if not raw.endswith(b"}"):
            raise _HalfSent(f"{manifest.NAME} has no end")
        try:
            recorded = manifest.parse(raw)
        except ValueError as error:
            raise _BadCopy(f"{manifest.NAME}: {error}") from error
        if recorded.step != step:
            raise _BadCopy(f"its manifest is that of step {recorded.step:,}")
        return recorded

    def _is_same(self, path: str, content: bytes) -> bool:
        return (
            self._files.size(path) == len(content) and self._files.cat_file(path, start=0, end=len(content)) == content
        )

    def _get(self, step: int, name: str, folder: Path, size: int) -> None:
        """The size is looked at first: what is there may not be what was sent."""
        try:
            there = self._files.size(self._path(step, name))
        except FileNotFoundError as error:
            raise _BadCopy(f"{name} is missing") from error
        if there != size:
            raise _BadCopy(f"{name} has {there:,} bytes, {size:,} were sent")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(self._path(step, name), str(folder / name))

    def _put(self, path: Path, target: str) -> None:
        if self._has_folders:
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(path), target)
        if (there := self._files.size(target)) != path.stat().st_size:
            raise OSError(f"{target} has {there} bytes after it was sent, {path} has {path.stat().st_size}")

    def _remove(self, step: int) -> None:
        """The manifest first. File by file where names with `*` or `[` would be taken for patterns."""
        if self._has_manifest(step):
            self._files.rm_file(self._path(step, manifest.NAME))
        if self._has_folders:
            self._files.rm(self._path(step), recursive=True)
        else:
            for path in self._files.find(self._path(step)):
                self._files.rm_file(path)

    def _folders(self) -> list[int]:
        try:
            found = self._files.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        names = [path.rstrip("/").rpartition("/")[2] for path in found]
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step=(0|[1-9][0-9]{0,14})", name))

    def _has_manifest(self, step: int) -> bool:
        return bool(self._files.exists(self._path(step, manifest.NAME)))

    def _path(self, step: int, name: str = "") -> str:
        return f"{self.root}/{seal.folder_name(step)}/{name}".rstrip("/")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Whatever the libraries raise, as one error that names the mirror."""
        try:
            yield
        except (TakenOverError, _BadCopy):
            raise
        except Exception as error:
            said = str(error).strip() or type(error).__name__
            raise MirrorError(f"checkpoint.mirror: {self.root}: {said}") from error
