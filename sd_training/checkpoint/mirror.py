"""Copies of a run's checkpoints in an object store, or wherever else fsspec writes to. Needs no torch.

    URL/RUN/checkpoints/step=N/<every file>       first
    URL/RUN/checkpoints/step=N/MANIFEST.json      last; without it there is no copy

A run saves to its folder and resumes from it. The mirror gets what was sealed there, and gives it back to a run whose
folder has less: a new machine, a lost disk. What comes back is compared with its manifest before it gets its name.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import fsspec

from sd_training.checkpoint import manifest, seal
from sd_training.checkpoint.durable import files_below, make_empty_folder, require_free
from sd_training.checkpoint.kinds import protected
from sd_training.checkpoint.rotation import MIN_KEPT
from sd_training.checkpoint.writer import Fence
from sd_training.errors import ConfigError, DamagedCheckpointsError, TakenOverError
from sd_training.rank_log import get_logger

log = get_logger(__name__)

_Result = TypeVar("_Result")
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}


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
            OSError: it cannot be asked.
        """

        def ask() -> list[int]:
            try:
                found = self._files.ls(self.root, detail=False)
            except FileNotFoundError:
                return []
            names = [path.rstrip("/").rpartition("/")[2] for path in found]
            steps = [int(name[5:]) for name in names if name.startswith("step=") and name[5:].isdigit()]
            return sorted(step for step in steps if self._files.exists(self._path(step, manifest.NAME)))

        return self._told(ask)

    def send(self, folder: Path, fence: Fence) -> None:
        """Copies a sealed checkpoint, its manifest last. One that is there is sent again.

        Raises:
            OSError: it could not be sent.
            TakenOverError: another start has the run.
        """
        step = seal.step_of(folder)

        def copy() -> None:
            self._remove_manifest(step)
            for path in files_below(folder):
                name = path.relative_to(folder).as_posix()
                if name != manifest.NAME:
                    self._put(path, self._path(step, name))
            fence.check()
            self._put(folder / manifest.NAME, self._path(step, manifest.NAME))

        self._told(copy)

    def rotate(self, keep: int, num_best: int, fence: Fence) -> None:
        """Deletes what the run folder would: all but the newest `keep`, milestones and the best.

        Raises:
            OSError: it could not be asked, or something could not be deleted.
            TakenOverError: another start has the run.
        """
        steps = self.steps()
        if len(steps) <= max(keep, MIN_KEPT):
            return
        with TemporaryDirectory() as folder:  # of the manifests alone, which say what is to stay
            root = Path(folder)
            for step in steps:
                self._get_manifest(step, root / seal.folder_name(step))
            kept = {seal.step_of(path) for path in protected(root, num_best)}
        for step in set(steps[: -max(keep, MIN_KEPT)]) - kept:
            fence.check()
            self._told(lambda step=step: self._remove(step))  # type: ignore[misc]

    def restore(self, root: Path, fence: Fence) -> Path | None:
        """Fetches the newest copy, where the run's own folder of checkpoints has none as new.

        Args:
            root: the run's folder of checkpoints.
            fence: of this start of the run.

        Raises:
            OSError: the mirror cannot be asked, or nothing can be written here.
            DamagedCheckpointsError: there are copies, none of them is whole, and `root` holds nothing either.
        """
        own = max(map(seal.step_of, seal.sealed(root)), default=-1)
        newer = [step for step in self.steps() if step > own]
        for step in reversed(newer):
            try:
                log.info(f"{root} has nothing as new as {self.root}/{seal.folder_name(step)}: fetching it")
                return self._fetch(step, root, fence)
            except OSError as error:
                seal.abandon(root, step, fence)
                log.error(f"the copy of step {step:,} in {self.root} cannot be used: {error}")
        if newer and own < 0:
            raise DamagedCheckpointsError(
                f"checkpoint.mirror: {self.root} holds copies of checkpoints, but none of them can be used"
            )
        return None

    def _fetch(self, step: int, root: Path, fence: Fence) -> Path:
        partial = seal.begin(root, step, 0, fence)
        if partial is None:
            return root / seal.folder_name(step)
        self._get_manifest(step, partial)
        try:
            recorded = manifest.read(partial).files
        except ValueError as error:
            raise OSError(f"{manifest.NAME}: {error}") from error
        require_free(root, sum(file.size for file in recorded.values()))
        for name, file in recorded.items():
            self._told(lambda name=name, size=file.size: self._get(step, name, partial, size))  # type: ignore[misc]
        return seal.adopt(partial, fence)

    def _get(self, step: int, name: str, folder: Path, size: int) -> None:
        """The size is looked at first: what is there may not be what was sent."""
        there = self._files.size(self._path(step, name))
        if there != size:
            raise OSError(f"{name} has {there:,} bytes, {size:,} were sent")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(self._path(step, name), str(folder / name))

    def _get_manifest(self, step: int, folder: Path) -> None:
        def get() -> None:
            if not folder.exists():
                make_empty_folder(folder)
            self._files.get_file(self._path(step, manifest.NAME), str(folder / manifest.NAME))

        self._told(get)

    def _put(self, path: Path, target: str) -> None:
        if self._has_folders:
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(path), target)
        if (there := self._files.size(target)) != path.stat().st_size:
            raise OSError(f"{target} has {there} bytes after it was sent, {path} has {path.stat().st_size}")

    def _remove(self, step: int) -> None:
        self._remove_manifest(step)
        self._files.rm(self._path(step), recursive=True)

    def _remove_manifest(self, step: int) -> None:
        if self._files.exists(self._path(step, manifest.NAME)):
            self._files.rm_file(self._path(step, manifest.NAME))

    def _path(self, step: int, name: str = "") -> str:
        return f"{self.root}/{seal.folder_name(step)}/{name}".rstrip("/")

    def _told(self, act: Callable[[], _Result]) -> _Result:
        """Whatever the libraries raise, as one OSError that names the mirror."""
        try:
            return act()
        except TakenOverError:
            raise
        except Exception as error:
            said: Any = str(error).strip() or type(error).__name__
            raise OSError(f"checkpoint.mirror: {self.root}: {said}") from error
