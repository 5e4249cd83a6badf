"""Sealed checkpoint folders on a file system: write, verify, find the newest intact one, delete old ones. Needs no
torch.

A folder `step=N` exists only after every file in it was flushed to disk and read back equal to `MANIFEST.json` (sizes,
SHA-256 sums, and a sum of the manifest itself). A process killed at any moment leaves at most a `step=N.partial-…`,
`step=N.download-…` or `step=N.deleting` behind, which `remove_leftovers` removes. One process of a run calls these
functions; the run lock is checked before anything is published or deleted.

A `step=N` may be a link to a folder, as after a move to another disk. It is read like a folder; a rename or removal
affects the link. A dangling link is a damaged checkpoint: its disk may be mounted again later.

Files are hashed after they were written, not while: the sums must be compared with what the disk holds in any case, so
files are read again, and the first of the two readings comes from the page cache.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from sd_training.checkpoint.atomic_io import (
    flush_folder,
    flush_tree,
    forget_cached,
    make_empty_folder,
    remove_durably,
    remove_quietly,
    replace_text,
)
from sd_training.checkpoint.run_lock import NO_LOCK, RunLock
from sd_training.errors import DamagedCheckpointsError
from sd_training.log import get_logger

log = get_logger(__name__)

MANIFEST_NAME = "MANIFEST.json"
MIN_KEPT = 2
"""`rotate` never leaves fewer verified checkpoints: the newest may turn out damaged [count]."""
_FORMAT = 1
_CHUNK_BYTES = 4 * 2**20
_THREADS = 4
_PARTIAL, DOWNLOAD = ".partial", ".download"
"""Kinds of folders that are being written: a save, or the copy of one. A `DOWNLOAD` says nothing about saves."""
_SAVED_STEP_FILE = "saved_step"
"""File in the run folder: optimizer steps of the last checkpoint, whether or not it still exists."""
_SEALED_NAME = re.compile(r"step=(\d+)", re.ASCII)
_DAMAGED_NAME = re.compile(r"step=\d+\.damaged(-\d+)?", re.ASCII)
"""Also the numbered ones of earlier versions."""
_FILE_NAME = re.compile(r"\w[\w=.-]*", re.ASCII)
"""Of a file in a checkpoint, which has no folders in it."""
_LEFTOVER_NAME = re.compile(r"step=\d+\.(partial|download|deleting)(-\d+)?", re.ASCII)
_Name = TypeVar("_Name")


class ReadBackError(OSError):
    """Files are not on disk as their manifest describes them."""


def folder_name(step: int) -> str:
    """Name of the checkpoint after `step` optimizer steps."""
    return f"step={step}"


def step_of(folder: Path) -> int:
    """Optimizer steps of a checkpoint folder, by its name.

    Raises:
        ValueError: the name is not `step=N`.
    """
    match = _SEALED_NAME.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is not a checkpoint folder: its name must be step=N, N optimizer steps")
    return int(match[1])


def begin_partial(root: Path, step: int, run_lock: RunLock = NO_LOCK, kind: str = _PARTIAL) -> Path | None:
    """An empty folder to write a checkpoint into, for `seal_partial`; None when `step=N` exists and verifies: replacing
    it would put it at risk. One that does not verify is set aside.

    Args:
        root: the run's folder of checkpoints; made when missing.
        step: optimizer steps completed.
        run_lock: of this start of the run.
        kind: of the folder.

    Raises:
        OSError: it cannot be made.
        TakenOverError: another start has taken the run over.
    """
    run_lock.check()
    final = root / folder_name(step)
    if os.path.lexists(final):
        problems = verify_checkpoint(final)
        if not problems:
            return None
        _set_aside(final, problems)
    partial = root / f"{folder_name(step)}{kind}{run_lock.suffix}"
    make_empty_folder(partial)
    return partial


def seal_partial(partial: Path, info: Mapping[str, Any] | None, run_lock: RunLock = NO_LOCK) -> Path:
    """Flushes, verifies and renames the folder of `begin_partial`; returns the checkpoint.

    Args:
        partial: holds all files.
        info: JSON for a new manifest, see `Manifest`; None for a copy of a checkpoint, which has its manifest.
        run_lock: of this start of the run.

    Raises:
        ReadBackError: the files are not what the manifest describes.
        TakenOverError: another start has taken the run over.
    """
    final = partial.with_name(partial.name.partition(".")[0])
    if info is not None:
        paths = sorted(partial.iterdir())
        with ThreadPoolExecutor(_THREADS) as pool:  # hashing releases the interpreter lock
            records = pool.map(lambda path: FileRecord(path.stat().st_size, _sha256(path)), paths)
            files = {path.name: record for path, record in zip(paths, records, strict=True)}
        manifest = Manifest(step_of(final), dict(info), files)
        (partial / MANIFEST_NAME).write_text(manifest_text(manifest), encoding="utf-8")
    flush_tree(partial)
    for path in partial.iterdir():
        forget_cached(path)
    if problems := verify_checkpoint(partial):
        raise ReadBackError(errno.EIO, f"not read back as it was written: {'; '.join(problems)}")
    run_lock.check()
    record = None if run_lock.run_dir is None else run_lock.run_dir / _SAVED_STEP_FILE
    before = record.read_text(encoding="utf-8", errors="replace") if record is not None and record.exists() else None
    if record is not None:
        replace_text(record, f"{step_of(final)}\n")
    try:
        os.rename(partial, final)
    except OSError:
        run_lock.check()
        if record is not None and before is not None:
            replace_text(record, before)
        elif record is not None:
            record.unlink()
        raise
    flush_folder(final.parent)
    return final


def verify_checkpoint(folder: Path, *, contents: bool = True) -> list[str]:
    """Problems of a sealed folder, one sentence each; empty when it is intact.

    Args:
        folder: `step=N`, or one that is about to get this name.
        contents: also read every file and compare its checksum; without it only names and sizes are compared.
    """
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return [f"{MANIFEST_NAME} is missing"]
    except (OSError, ValueError) as error:
        return [f"{MANIFEST_NAME} cannot be used: {error}"]

    def problem_of(name: str) -> str | None:
        path, expected = folder / name, manifest.files[name]
        try:
            if path.is_symlink():
                return f"{name} is a link"
            if (size := path.stat().st_size) != expected.size:
                return f"{name} has {size:,} bytes, {expected.size:,} were written"
            if contents and _sha256(path) != expected.sha256:
                return f"{name} has changed since it was written (SHA-256 differs)"
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name} cannot be read: {error}"
        return None

    with ThreadPoolExecutor(_THREADS) as pool:
        problems = [problem for problem in pool.map(problem_of, manifest.files) if problem]
    if folder.name.partition(".")[0] != folder_name(manifest.step):
        problems.append(f"{MANIFEST_NAME} belongs to step {manifest.step:,}")
    return problems


def sealed_checkpoints(root: Path) -> list[Path]:
    """Folders `step=N` of `root`, oldest first by number. Not verified."""
    return sorted(_folders(root, _SEALED_NAME), key=step_of)


def last_saved_step(run_dir: Path) -> str | None:
    """Optimizer steps of the last checkpoint that was sealed for this run, whether or not it still exists; None when
    the folder has no record of one.

    The record is written just before the checkpoint gets its name, so that none is ever without it. Where the folder
    still has its name of before, a kill came between, and the checkpoint was not sealed.

    Raises:
        OSError: the record cannot be read.
    """
    leftovers = _folders(run_dir / "checkpoints", _LEFTOVER_NAME)  # first: another process may be removing both
    try:
        step = (run_dir / _SAVED_STEP_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    is_sealed = not any(folder.name.startswith(f"step={step}{_PARTIAL}") for folder in leftovers)
    return step or "unknown" if is_sealed else None


def newest_verified(root: Path, *, contents: bool = True) -> Path | None:
    """The newest checkpoint that verifies, or None when none was ever finished. Newer ones that do not verify are
    renamed `step=N.damaged`, with the reason in the log.

    Args:
        root: the run's folder of checkpoints.
        contents: read every file; without it only names and sizes are compared, and nothing is renamed.

    Raises:
        CheckpointError: checkpoints exist, or were set aside before, and none verifies. Nothing is renamed then.
    """
    damaged: dict[Path, list[str]] = {}
    for folder in reversed(sealed_checkpoints(root)):
        problems = verify_checkpoint(folder, contents=contents)
        if problems:
            damaged[folder] = problems
            continue
        for other, reasons in damaged.items() if contents else ():
            _set_aside(other, reasons)
        return folder
    set_aside = _folders(root, _DAMAGED_NAME)
    if not damaged and not set_aside:
        return None
    lines = [f"{root} holds checkpoints, but none of them can be used:"]
    lines += [f"  {folder.name}: {'; '.join(problems)}" for folder, problems in damaged.items()]
    lines += [f"  {folder.name}: set aside earlier" for folder in set_aside]
    lines.append("Put a good copy of one back, or take another experiment.name to train from the beginning.")
    raise DamagedCheckpointsError("\n".join(lines))


def remove_leftovers(root: Path) -> list[Path]:
    """Removes what killed processes left half written or half deleted; returns the names. Call it once at start."""
    if last_saved_step(root.parent) is None and not sealed_checkpoints(root):  # before what it is found out from
        (root.parent / _SAVED_STEP_FILE).unlink(missing_ok=True)
    leftovers = _folders(root, _LEFTOVER_NAME)
    for folder in leftovers:
        log.info(f"removing {folder}, left by a process that was stopped")
        doomed = folder.with_name(f"{folder.name.partition('.')[0]}.deleting")
        if folder != doomed:  # a former start that is about to publish it finds it gone at once
            remove_quietly(doomed)
            os.rename(folder, doomed)
        remove_quietly(doomed)
    return leftovers


def _folders(root: Path, name: re.Pattern[str]) -> list[Path]:
    if not root.is_dir():
        return []
    return [p for p in sorted(root.iterdir()) if name.fullmatch(p.name) and (p.is_dir() or p.is_symlink())]


def _set_aside(folder: Path, problems: list[str]) -> None:
    target = folder.with_name(f"{folder.name}.damaged")
    instead = ", in place of an earlier one" if os.path.lexists(target) else ""
    log.error(f"checkpoint {folder} is damaged and is set aside as {target.name}{instead}: {'; '.join(problems)}")
    try:
        remove_durably(target)
        os.rename(folder, target)
    except OSError as error:
        log.error(f"{folder} could not be renamed: {error}")


def rotate(
    root: Path,
    keep: int,
    num_best: int = 0,
    newest: Path | None = None,
    also_kept: Collection[Path] = (),
    run_lock: RunLock = NO_LOCK,
) -> None:
    """Deletes checkpoints older than the `keep` newest verified ones, except milestones and the best. An older one that
    is itself damaged is left for a person to look at.

    Args:
        root: the run's folder of checkpoints.
        keep: verified checkpoints to leave [count]; fewer than 2 count as 2. Damaged ones do not count.
        num_best: how many with the lowest validation loss are left, the newest ones included.
        newest: was verified a moment ago and is not read again.
        also_kept: older ones that are left as well.
        run_lock: of this start of the run.
    """
    infos: dict[Path, Mapping[str, Any]] = {}
    for folder in sealed_checkpoints(root):
        try:
            infos[folder] = read_manifest(folder).info
        except (OSError, ValueError):
            infos[folder] = {}
    protected = {*protected_checkpoints(infos, num_best), *also_kept}
    good = 0
    for folder in reversed(infos):
        if good < max(keep, MIN_KEPT):
            good += folder == newest or not verify_checkpoint(folder)
        elif folder not in protected and not verify_checkpoint(folder, contents=False):
            run_lock.check()
            discard_checkpoint(folder)


def protected_checkpoints(infos: Mapping[_Name, Mapping[str, Any]], num_best: int) -> list[_Name]:
    """Of checkpoints with the `info` of their manifests: milestones, and the `num_best` with the lowest loss."""
    losses = {name: loss for name, info in infos.items() if isinstance(loss := info.get("validation_loss"), float)}
    best = sorted(losses, key=losses.__getitem__)[:num_best]
    return [*best, *(name for name, info in infos.items() if info.get("is_milestone") is True)]


def discard_checkpoint(folder: Path) -> None:
    """Deletes a checkpoint; of a link, the link alone. It is renamed first, so a kill half way leaves no damaged
    `step=N`."""
    if os.path.lexists(folder):
        doomed = folder.with_name(f"{folder.name}.deleting")
        remove_durably(doomed)
        os.rename(folder, doomed)
        remove_durably(doomed)


@dataclass(frozen=True)
class FileRecord:
    """One file of a sealed folder."""

    size: int
    """Length [bytes]."""
    sha256: str
    """Hexadecimal digest of the content."""


@dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json."""

    step: int
    """Optimizer steps completed."""
    info: dict[str, Any]
    """JSON about the checkpoint, which outlives the run that wrote it and a change of its options. `rotate` reads
    `is_milestone` (never to be deleted) and `validation_loss` (after the checkpoint's step; null where it is not known
    or not finite)."""
    files: dict[str, FileRecord]
    """By name."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        ValueError: it is damaged, of another format, or names a file outside of the folder.
        OSError: it cannot be read.
    """
    path = folder / MANIFEST_NAME
    if path.is_symlink():
        raise ValueError("a link")
    return parse_manifest(path.read_bytes())


def parse_manifest(raw: bytes) -> Manifest:
    """The manifest in a file's content.

    Raises:
        ValueError: it is damaged, of another format, or names a file outside of the folder.
    """
    try:
        body = json.loads(raw)
        if body["format"] != _FORMAT:
            raise ValueError(f"format {body['format']!r:.20}; this version reads format {_FORMAT}")
        files = {name: FileRecord(record["size"], record["sha256"]) for name, record in body["files"].items()}
        manifest = Manifest(body["step"], dict(body["info"]), files)
        is_own = manifest_text(manifest).encode() == raw
        counts = [manifest.step, *(file.size for file in files.values())]
    except (LookupError, TypeError, AttributeError, UnicodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not a manifest: {error!r:.200}") from error
    if outside := [name for name in files if not _FILE_NAME.fullmatch(name)]:
        raise ValueError(f"it names a file outside of its folder: {outside[0]!r:.100}")
    if not is_own:
        raise ValueError("its own checksum does not match")
    if not files or any(type(count) is not int or count < 0 for count in counts):
        raise ValueError("it names no files, or something else than counts where these belong")
    return manifest


def manifest_text(manifest: Manifest) -> str:
    """The canonical JSON of a manifest; its last member is the digest of all the others.

    Raises:
        TypeError: `info` is not JSON.
    """
    body = {"format": _FORMAT} | asdict(manifest)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps(body | {"manifest_sha256": digest}, indent=1)


def _sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as stream:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
