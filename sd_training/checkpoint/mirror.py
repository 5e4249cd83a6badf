"""Copies of a run's checkpoints in an object store, or wherever else fsspec writes to. Needs no torch.

    URL/RUN/checkpoints/step=N/<every file>       first
    URL/RUN/checkpoints/step=N/MANIFEST.json      last; without it there is no copy

A run saves to its folder and resumes from it. The mirror gets what was sealed there, and gives it back to a run whose
folder has less: a new machine, a lost disk. What comes back is compared with its manifest before it gets its name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
                if self._files.cat_file(copied) == own.read_bytes():
                    return
                fence.check()
                self._files.rm_file(copied)
            for path in files_below(folder):
                if path != own:
                    fence.check()
                    self._put(path, self._path(step, path.relative_to(folder).as_posix()))
            fence.check()
            self._put(own, copied)

    def rotate(self, newest: int, keep: int, num_best: int, fence: Fence) -> None:
        """Deletes what the run folder would: all but the newest `keep`, milestones and the best. Also half sent ones,
        and copies above the newest: the run has gone back behind them.

        Args:
            newest: optimizer steps of the checkpoint that was just sent; stays.
            keep: as `checkpoint.keep`.
            num_best: as `checkpoint.keep_best`.
            fence: of this start of the run.

        Raises:
            MirrorError: it could not be asked, or something could not be deleted.
            TakenOverError: another start has the run.
        """
        whole = [step for step in self.steps() if step <= newest]
        with self._told():
            infos = {step: self._manifest(step).info for step in whole}
            kept = {*whole[-max(keep, MIN_KEPT) :], *to_keep(infos, num_best)}
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
        if recorded.step != step:
            raise _BadCopy(f"its manifest is that of step {recorded.step:,}")
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

    def _manifest(self, step: int) -> manifest.Manifest:
        try:
            return manifest.parse(self._files.cat_file(self._path(step, manifest.NAME)))
        except (ValueError, FileNotFoundError) as error:
            raise _BadCopy(f"{manifest.NAME}: {error}") from error

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
        return sorted(int(name[5:]) for name in names if name.startswith("step=") and name[5:].isdigit())

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
