"""Sealed checkpoint folders: write, verify, find the newest good one, rotate. Needs no torch.

A folder `step=N` exists only after every file in it was flushed to disk and read back equal to `MANIFEST.json`; a
process killed at any moment leaves at most a `step=N.partial-…` or `step=N.deleting` behind,
which `remove_leftovers` removes.
One process of a run calls these functions; the run_lock is asked before anything is published or deleted.

A `step=N` may be a link to a folder, as after a move to another disk. It is read like a folder; what is renamed or
removed is the link. One that leads nowhere is a damaged checkpoint: the disk may be back tomorrow.

Files are hashed after they were written, not while: the sums must be compared with what the disk holds in any case, so
files are read again whatever was summed before, and the first of the two readings comes from the system's memory.

MANIFEST.json: what a sealed folder holds, with sizes and SHA-256 sums, and the sum of the manifest itself.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sd_training.checkpoint.atomic_io import (
    files_below,
    flush_folder,
    flush_tree,
    forget_cached,
    make_empty_folder,
    remove_quietly,
    replace_text,
    require_free_space,
    write_failure,
)
from sd_training.checkpoint.run_lock import NO_LOCK, RunLock
from sd_training.errors import CheckpointError, DamagedCheckpointsError
from sd_training.log import get_logger

MANIFEST_NAME = "MANIFEST.json"
_FORMAT = 1
MAX_MANIFEST_BYTES = 16 * 2**20
"""Length of a manifest, wherever it comes from [bytes]."""
_CHUNK_BYTES = 4 * 2**20
_THREADS = 4


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
    """Free JSON about the run: versions, world size, fingerprints."""
    files: dict[str, FileRecord]
    """By path relative to the folder."""


def record_manifest(folder: Path, step: int, info: Mapping[str, Any]) -> Manifest:
    """Reads and hashes every file below `folder`."""
    paths = list(files_below(folder))
    names = [path.relative_to(folder).as_posix() for path in paths]
    with ThreadPoolExecutor(_THREADS) as pool:  # hashing releases the interpreter lock
        records = list(pool.map(lambda path: FileRecord(path.stat().st_size, _sha256(path)), paths))
    return Manifest(step, dict(info), dict(zip(names, records, strict=True)))


def manifest_text(manifest: Manifest) -> str:
    """The one spelling of a manifest; its last member is the digest of all the others.

    Raises:
        TypeError: `info` is not JSON.
    """
    body: dict[str, Any] = {
        "format": _FORMAT,
        "step": manifest.step,
        "info": manifest.info,
        "files": {name: {"size": r.size, "sha256": r.sha256} for name, r in manifest.files.items()},
    }
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps(body | {"manifest_sha256": digest}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        ValueError: it is damaged, of another format, or names a file outside of the folder.
        OSError: it cannot be read.
    """
    path = folder / MANIFEST_NAME
    if path.is_symlink() or path.stat().st_size > MAX_MANIFEST_BYTES:
        raise ValueError("not a manifest: a link, or too large")
    return parse_manifest(path.read_bytes())


def parse_manifest(raw: bytes) -> Manifest:
    """The manifest in a file's content.

    Raises:
        ValueError: it is damaged, of another format, or names a file outside of the folder.
    """
    try:
        manifest = _parse(json.loads(raw))
        text = manifest_text(manifest)
    except (KeyError, TypeError, AttributeError, UnicodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not a manifest: {error!r:.200}") from error
    if text.encode() != raw:
        raise ValueError("its own checksum does not match")
    return manifest


def check_files(folder: Path, manifest: Manifest, *, contents: bool) -> list[str]:
    """One sentence per file that is not as recorded. Without `contents` only presence and size are compared."""
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda item: _check_file(folder, *item, contents=contents), manifest.files.items())
        return [problem for problem in found if problem]


def _parse(body: Any) -> Manifest:
    if body["format"] != _FORMAT:
        raise ValueError(f"format {body['format']!r:.20}; this version reads format {_FORMAT}")
    files = {_inside(name): FileRecord(_size(r["size"]), _digest(r["sha256"])) for name, r in body["files"].items()}
    if not files:
        raise ValueError("it names no files")
    return Manifest(_size(body["step"]), dict(body["info"]), files)


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if name != str(path) or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or name == ".":
        raise ValueError(f"it names a file outside of its folder: {name!r:.100}")
    return name


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} is not a count")
    return value


def _digest(value: Any) -> str:
    if type(value) is not str or len(value) != 64:
        raise TypeError(f"{value!r:.40} is not a digest")
    return value


def _check_file(folder: Path, name: str, expected: FileRecord, *, contents: bool) -> str | None:
    path = folder / name
    try:
        if os.path.realpath(path) != os.path.join(os.path.realpath(folder), name):
            return f"{name} is a link"
        size = path.stat().st_size
        if size != expected.size:
            return f"{name} has {size:,} bytes, {expected.size:,} were written"
        if contents and _sha256(path) != expected.sha256:
            return f"{name} has changed since it was written (SHA-256 differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


log = get_logger(__name__)

_PARTIAL = ".partial"
_SAVED_STEP_FILE = "saved_step"
"""File in the run folder: optimizer steps of the last checkpoint."""
_SEALED_NAME = re.compile(r"step=(\d+)", re.ASCII)
_DAMAGED_NAME = re.compile(r"step=\d+\.damaged(-\d+)?", re.ASCII)
_LEFTOVER_NAME = re.compile(r"step=\d+\.(partial|deleting)(-\d+)?", re.ASCII)


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


def write_sealed(root: Path, step: int, write: Callable[[Path], None], info: Mapping[str, Any]) -> Path:
    """Writes `root/step=N` so that it either exists whole or not at all. Other checkpoints are not touched.

    A `step=N` that is there and verifies is kept and nothing is written: replacing it would put it at risk.

    Args:
        root: the run's folder of checkpoints; made when missing.
        step: optimizer steps completed.
        write: puts the files into the empty folder it is given.
        info: JSON that travels in the manifest, see `read_info`.

    Returns:
        The sealed folder.

    Raises:
        OSError: disk full, no permission, or not read back as written; names the folder and the free space. Nothing
            is left behind. Any other error of `write` passes through, also with nothing left behind.
    """
    try:
        partial = begin_partial(root, step)
        if partial is not None:
            write(partial)
            seal_partial(partial, info)
    except OSError as error:
        raise remove_partial_after(root, step, error) from error
    except BaseException:
        remove_partial(root, step)
        raise
    return root / folder_name(step)


def begin_partial(root: Path, step: int, needed_bytes: int = 0, run_lock: RunLock = NO_LOCK) -> Path | None:
    """An empty folder to write a checkpoint into, for `seal_partial`; None when `step=N` is there and verifies.

    The pieces of `write_sealed`, for a checkpoint that several processes write; one of them calls these functions.

    Args:
        root: the run's folder of checkpoints; made when missing.
        step: optimizer steps completed.
        needed_bytes: what will be written.
        run_lock: of this start of the run, here and in the functions below.

    Raises:
        OSError: it cannot be made, or there is less space than that.
        TakenOverError: another start has the run.
    """
    run_lock.check()
    final = root / folder_name(step)
    if _is_sealed_already(final):
        return None
    require_free_space(root, needed_bytes)
    partial = root / f"{folder_name(step)}{_PARTIAL}{run_lock.suffix}"
    make_empty_folder(partial)
    return partial


def seal_partial(partial: Path, info: Mapping[str, Any], run_lock: RunLock = NO_LOCK) -> Path:
    """Seals what was written into the folder that `begin_partial` gave; returns the checkpoint.

    Raises:
        OSError: not read back as it was written.
        TakenOverError: another start has the run.
    """
    _seal(partial, step_of(_final(partial)), info)
    return _publish(partial, run_lock)


def adopt_partial(partial: Path, run_lock: RunLock = NO_LOCK) -> Path:
    """Seals a copy of a checkpoint, its manifest included, in the folder of `begin_partial`; returns the checkpoint.

    Raises:
        ValueError: it is not what its manifest says.
        TakenOverError: another start has the run.
    """
    flush_tree(partial)
    for path in files_below(partial):
        forget_cached(path)
    problems = verify_checkpoint(partial)
    if not problems and read_manifest(partial).step != step_of(_final(partial)):
        problems = [f"{MANIFEST_NAME} belongs to another step"]
    if problems:
        raise ValueError("; ".join(problems))
    return _publish(partial, run_lock)


def remove_partial(root: Path, step: int, run_lock: RunLock = NO_LOCK) -> None:
    """Removes what was written since `begin_partial`."""
    remove_quietly(root / f"{folder_name(step)}{_PARTIAL}{run_lock.suffix}")


def remove_partial_after(root: Path, step: int, error: OSError, run_lock: RunLock = NO_LOCK) -> OSError:
    """`remove_partial`, and the error to raise: it names the folder, the cause and the free space."""
    remove_partial(root, step, run_lock)
    return write_failure(f"checkpoint {folder_name(step)}", root, error)


def verify_checkpoint(folder: Path, *, contents: bool = True) -> list[str]:
    """Problems of a sealed folder, one sentence each; empty when it is whole.

    Args:
        folder: `step=N`.
        contents: also read every file and compare its checksum; without it only names and sizes are compared.
    """
    if folder.is_symlink() and not folder.is_dir():
        return [f"it is a link to {os.readlink(folder)}, where no folder is"]
    try:
        recorded = read_manifest(folder)
    except FileNotFoundError:
        return [f"{MANIFEST_NAME} is missing"]
    except (OSError, ValueError) as error:
        return [f"{MANIFEST_NAME} cannot be used: {error}"]
    problems = check_files(folder, recorded, contents=contents)
    if _SEALED_NAME.fullmatch(folder.name) and step_of(folder) != recorded.step:
        problems.append(f"{MANIFEST_NAME} belongs to step {recorded.step:,}")
    return problems


def read_info(folder: Path) -> dict[str, Any]:
    """The `info` that `write_sealed` was given.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    try:
        return read_manifest(folder).info
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST_NAME} cannot be used: {error}") from error


def sealed_checkpoints(root: Path) -> list[Path]:
    """Folders `step=N` of `root`, oldest first by number. Not verified."""
    return sorted(_folders(root, _SEALED_NAME), key=step_of)


def has_ever_saved(root: Path) -> bool:
    """Whether a checkpoint was ever finished, good or damaged: then a fresh start would lose a run.

    The answer is the same before, during and after `remove_leftovers`, so ranks that ask at different moments agree.

    Raises:
        DamagedCheckpointsError: `root` is a link that leads nowhere, so that nobody can tell.
    """
    if root.is_symlink() and not root.is_dir():
        raise DamagedCheckpointsError(
            f"{root} is a link to {os.readlink(root)}, where no folder is: bring that one back (is its disk mounted?), "
            "or take another experiment.name to train from the beginning"
        )
    return bool(sealed_checkpoints(root) or _folders(root, _DAMAGED_NAME))


def last_saved_step(run_dir: Path) -> int | None:
    """Optimizer steps of the last checkpoint that was sealed for this run, whether or not it is still there; None when
    none was, as far as the folder tells."""
    try:
        text = (run_dir / _SAVED_STEP_FILE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None


def newest_apparent(root: Path) -> Path | None:
    """The newest checkpoint whose files are there in their sizes, or None when none was ever finished. No content is
    read, and nothing is renamed.

    Raises:
        CheckpointError: as `newest_verified`.
    """
    return _newest(root, contents=False)[0]


def newest_verified(root: Path) -> Path | None:
    """The newest checkpoint that verifies, or None when none was ever finished.

    Newer ones that do not verify are renamed `step=N.damaged`, with the reason in the log.

    Raises:
        CheckpointError: checkpoints exist, or were set aside before, and none verifies. Nothing is renamed then.
    """
    newest, damaged = _newest(root, contents=True)
    for bad, reasons in damaged.items():
        _set_aside(bad, reasons)
    return newest


def remove_leftovers(root: Path) -> list[Path]:
    """Removes what killed processes left half written or half deleted; returns the names. Call it once at start."""
    leftovers = _folders(root, _LEFTOVER_NAME)
    for folder in leftovers:
        log.info("removing %s, left by a process that was stopped", folder)
        doomed = folder.with_name(f"{folder.name.partition('.')[0]}.deleting")
        if folder != doomed:  # a process that is about to publish it after all finds it gone at once
            remove_quietly(doomed)
            os.rename(folder, doomed)
        remove_quietly(doomed)
    return leftovers


def _newest(root: Path, *, contents: bool) -> tuple[Path | None, dict[Path, list[str]]]:
    """The newest checkpoint without a problem, and those after it with theirs."""
    damaged: dict[Path, list[str]] = {}
    for folder in reversed(sealed_checkpoints(root)):
        problems = verify_checkpoint(folder, contents=contents)
        if not problems:
            return folder, damaged
        damaged[folder] = problems
    set_aside = _folders(root, _DAMAGED_NAME)
    if damaged or set_aside:
        raise DamagedCheckpointsError(_nothing_usable(root, damaged, set_aside))
    return None, {}


def _final(partial: Path) -> Path:
    return partial.with_name(partial.name.partition(_PARTIAL)[0])


def _publish(partial: Path, run_lock: RunLock) -> Path:
    final = _final(partial)
    run_lock.check()
    os.rename(partial, final)
    flush_folder(final.parent)
    _note_saved(run_lock.run_dir, step_of(final))
    return final


def _note_saved(run_dir: Path | None, step: int) -> None:
    """For `last_saved_step`. The checkpoint is good without it."""
    if run_dir is None:
        return
    try:
        replace_text(run_dir / _SAVED_STEP_FILE, f"{step}\n")
    except OSError as error:
        log.warning(f"{run_dir / _SAVED_STEP_FILE} cannot be written: {error.strerror}")


def _is_sealed_already(final: Path) -> bool:
    if not os.path.lexists(final):
        return False
    problems = verify_checkpoint(final)
    if problems:
        _set_aside(final, problems)
    return not problems


def _seal(partial: Path, step: int, info: Mapping[str, Any]) -> None:
    flush_tree(partial)
    text = manifest_text(record_manifest(partial, step, info))
    (partial / MANIFEST_NAME).write_text(text, encoding="utf-8")
    flush_tree(partial)
    for path in files_below(partial):
        forget_cached(path)
    problems = verify_checkpoint(partial)
    if problems:
        raise OSError(errno.EIO, f"not read back as it was written: {'; '.join(problems)}")


def _folders(root: Path, name: re.Pattern[str]) -> list[Path]:
    if not root.is_dir():
        return []
    return [p for p in sorted(root.iterdir()) if name.fullmatch(p.name) and (p.is_dir() or p.is_symlink())]


def _set_aside(folder: Path, reasons: list[str]) -> None:
    target = folder.with_name(f"{folder.name}.damaged")
    count = 1
    while os.path.lexists(target):
        count += 1
        target = folder.with_name(f"{folder.name}.damaged-{count}")
    log.error("checkpoint %s is damaged and is set aside as %s: %s", folder, target.name, "; ".join(reasons))
    try:
        os.rename(folder, target)
    except OSError as error:
        log.error("%s could not be renamed: %s", folder, error)


def _nothing_usable(root: Path, damaged: dict[Path, list[str]], set_aside: list[Path]) -> str:
    lines = [f"{root} holds checkpoints, but none of them can be used:"]
    lines += [f"  {folder.name}: {'; '.join(reasons)}" for folder, reasons in damaged.items()]
    lines += [f"  {folder.name}: set aside earlier" for folder in set_aside]
    lines.append("Put a good copy of one back, or take another experiment.name to train from the beginning.")
    return "\n".join(lines)
