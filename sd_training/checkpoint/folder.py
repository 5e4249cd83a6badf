"""Everything that must survive a crash: sealed checkpoint folders (write, verify, find the newest intact one, delete
old ones), the lock of a run folder, durable files. Needs no torch.

A folder `step=N` exists only after every file in it was flushed to disk and read back equal to `MANIFEST.json` (sizes,
SHA-256 sums, and a sum of the manifest itself). A process killed at any moment leaves at most a `step=N.partial-…`,
`step=N.download-…` or `step=N.deleting` behind, which `remove_leftovers` removes. One process of a run calls these
functions; the run lock is checked before anything is published or deleted.

A `step=N` may be a link to a folder, as after a move to another disk. It is read like a folder; a rename or removal
affects the link. A dangling link is a damaged checkpoint: its disk may be mounted again later.

Files are hashed after they were written, not while: the sums must be compared with what the disk holds in any case, so
files are read again, and the first of the two readings comes from the page cache.

One process writes in a run folder: a file lock for starts on one machine, a claim for those on several.

RUN/writer.json          the newest start, which owns the folder; replaced by each start
RUN/writer-BOOT.lock     locked by the process of one machine (its boot id) that writes, as long as it lives: a second
                         start on the machine is refused. Other machines, some of which may be lost but still hold a
                         lock on a network file system, have files of their own.

A process that a scheduler gave up but that is still running (stopped, or cut off) finds a claim other than its own
before it publishes or deletes anything, and ends. The claim may change between that check and the rename. Therefore
names of half-written folders carry the start's token, and a start removes those of other starts after it took the
folder: the rename then fails. On network file systems a check may be as old as the client's cache of folders (NFS: up
to 60 s by default); schedulers wait longer before they give a node up.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from sd_training.data.storage.files import sha256_of
from sd_training.errors import ConfigError, DamagedCheckpointsError, TakenOverError
from sd_training.log import get_logger

log = get_logger(__name__)

MANIFEST_NAME = "MANIFEST.json"
MIN_KEPT = 2
"""`rotate` always keeps this many verified checkpoints, because the newest may turn out damaged [count]."""
_FORMAT = 1
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
_NOT_EXECUTABLE = 0o666
_SYSTEM_ERROR = re.compile(r"\bos error (\d+)|\bcode: (\d+)")
CLAIM = "writer.json"
_held_locks: dict[str, int] = {}
"""Descriptor of the lock by run folder, of this process: a later run in it takes over from an earlier one."""


@dataclass(frozen=True)
class RunLock:
    """The right to write in a run folder, until another start takes it.

    Attributes:
        run_dir: the run folder; None for folders that no other process writes in.
        token: distinguishes this start from any other one.
    """

    run_dir: Path | None = None
    token: int = 0

    @property
    def suffix(self) -> str:
        """Ends the names of what this start has half written."""
        return f"-{self.token}" if self.token else ""

    def check(self) -> None:
        """To be called before anything is published or deleted.

        Raises:
            TakenOverError: naming the start that owns the folder now.
            OSError: the folder cannot be read.
        """
        if self.run_dir is None:
            return
        owner = _owner(self.run_dir)
        if owner.get("token") != self.token:
            raise TakenOverError(
                f"{self.run_dir}: {_described(owner)} has taken this run over; this process ends without writing "
                "anything more"
            )

    def release(self) -> None:
        """Releases the folder for another start on this machine."""
        if self.run_dir is not None and (handle := _held_locks.pop(os.path.realpath(self.run_dir), None)) is not None:
            os.close(handle)


NO_LOCK = RunLock()
"""For folders that no other process writes in."""


def acquire_run_lock(run_dir: Path) -> RunLock:
    """Takes the folder over from the previous start.

    Args:
        run_dir: exists.

    Raises:
        ConfigError: a process of this machine writes there; names it.
        OSError: the folder cannot be written.
    """
    run_lock, boot = RunLock(run_dir, secrets.randbits(48) + 1), _boot_id()
    run_lock.release()
    handle = os.open(run_dir / f"writer-{boot}.lock", os.O_RDWR | os.O_CREAT, 0o644)  # closed in programs started here
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _held_locks[os.path.realpath(run_dir)] = handle
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ConfigError(
                f"experiment.name: {_described(_owner(run_dir))} writes in {run_dir} and is still running; end it "
                "first (it may be stopped), or choose another experiment.name"
            ) from error
        log.info(f"{run_dir}: the file system has no locks ({error.strerror}); a second start will take this run over")
    claim = {"token": run_lock.token, "host": socket.gethostname(), "pid": os.getpid()}
    replace_text(run_dir / CLAIM, json.dumps(claim | {"job_id": os.environ.get("SLURM_JOB_ID")}) + "\n")
    return run_lock


def _boot_id() -> str:
    """Distinguishes machines, and the boots of one; containers of one machine share it. The host name where the
    system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _owner(run_dir: Path) -> dict[str, Any]:
    """The record of the newest start; empty if there is none or it is damaged."""
    try:
        owner = json.loads((run_dir / CLAIM).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _described(owner: dict[str, Any]) -> str:
    job = f", SLURM job {owner['job_id']}" if owner.get("job_id") else ""
    return f"another start (process {owner['pid']} on {owner['host']}{job})" if "pid" in owner else "another start"


class ReadBackError(OSError):
    """Files on disk do not match their manifest."""


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
    for path in partial.iterdir() if hasattr(os, "posix_fadvise") else ():
        with path.open("rb") as stream:  # the system drops its copy, so that verifying reads the disk
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
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
    flush(final.parent)
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


def source_checkpoint(path: Path, *, contents: bool = True) -> Path:
    """The checkpoint that a new run of another name begins with. Nothing is renamed: the folder may be another user's.

    Args:
        path: `step=N`, or a run folder: its newest that verifies.
        contents: as in `verify_checkpoint`.

    Raises:
        ConfigError: there is none, or none verifies.
    """
    try:
        folders = [path] if _SEALED_NAME.fullmatch(path.name) else sealed_checkpoints(path / "checkpoints")[::-1]
    except OSError as error:
        raise ConfigError(f"experiment.start_from: {path} cannot be read: {error}") from error
    kept = ", ".join(f"{step_of(own)}" for own in sealed_checkpoints(path.parent))
    others = f"; there are the steps {kept} (checkpoint.keep)" if kept else ""
    problems = [f"{folder} is no folder{others}" for folder in folders if not folder.is_dir()]
    for folder in folders if not problems else ():
        if not (found := verify_checkpoint(folder, contents=contents)):
            return folder
        problems.append(f"{folder} cannot be used: {'; '.join(found)}")
    wanted = f"{path} is neither a checkpoint (RUN/checkpoints/step=N) nor a run folder that has one"
    raise ConfigError([f"experiment.start_from: {problem}" for problem in problems or [wanted]])


def remove_leftovers(root: Path) -> list[Path]:
    """Removes partially written and partially deleted folders of killed processes; returns the names. Call it
    once at start."""
    if last_saved_step(root.parent) is None and not sealed_checkpoints(root):  # before the evidence for it is removed
        (root.parent / _SAVED_STEP_FILE).unlink(missing_ok=True)
    leftovers = _folders(root, _LEFTOVER_NAME)
    for folder in leftovers:
        log.info(f"removing {folder}, left by a process that was stopped")
        doomed = folder.with_name(f"{folder.name.partition('.')[0]}.deleting")
        if folder != doomed:  # a former start that is about to publish it finds it missing at once
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
        raise ValueError("it names no files, or has values other than counts where counts are required")
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
        return sha256_of(stream)


def make_empty_folder(folder: Path) -> None:
    """Creates an empty folder; anything of that name is removed before."""
    remove_durably(folder)
    folder.mkdir(parents=True)


def flush(path: Path) -> None:
    """Makes the content of a file durable; of a folder renames, creations and removals in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def flush_file(path: Path) -> None:
    """Makes a file durable, and as accessible as its folder is.

    Writers disagree about permissions: safetensors creates files that only the owner can read, others follow the umask.
    """
    path.chmod(stat.S_IMODE(path.parent.stat().st_mode) & _NOT_EXECUTABLE)
    flush(path)


def flush_tree(folder: Path) -> None:
    """Makes everything below `folder` durable, and files as accessible as their folders are."""
    for path in [*sorted(folder.rglob("*"), reverse=True), folder]:  # a folder after its contents
        (flush if path.is_dir() else flush_file)(path)


def remove_durably(path: Path) -> None:
    """Removes a file, a link (not what it points to) or a folder; nothing happens when it does not exist.

    Raises:
        OSError: it could not be removed.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def remove_quietly(path: Path) -> None:
    """`remove_durably` while another error is on its way up: that one is the one to report."""
    try:
        remove_durably(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def whole_file(path: Path, writer: object = "") -> Iterator[Path]:
    """A file to write beside `path`, which is flushed and takes that name at the end: after a kill or on a full disk
    `path` is whole, the new one or the one before. After an error nothing is left beside; after a kill the next writer
    of the same name begins anew.

    Args:
        writer: name of one of several processes that may write `path` at once; the last whole file stays.
    """
    beside = path.with_name(f"{path.name}.{writer}.partial" if writer else f"{path.name}.partial")
    try:
        yield beside
        flush(beside)
        os.replace(beside, path)
    except BaseException:
        remove_quietly(beside)
        raise


def replace_text(path: Path, text: str) -> None:
    """Writes a small `whole_file`. Links are followed; a device or a pipe is written to, as a rename would put an end
    to it."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def system_error(error: Exception) -> OSError | None:
    """The system's error inside one of safetensors or tokenizers, which have it in their text only; None for others."""
    found = _SYSTEM_ERROR.search(str(error))
    return None if found is None else OSError(int(found[1] or found[2]), str(error))


def write_failure(what: str, folder: Path, error: BaseException) -> OSError:
    """The error to raise when `what` could not be written: names the folder, the cause and the free space [GiB]."""
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
        free = f"{shutil.disk_usage(existing).free / 2**30:.2f} GiB are free there"
    except OSError as unknown:
        free = f"free space unknown ({unknown})"
    return OSError(number, f"{what} could not be written to {folder}: {cause}; {free}")
