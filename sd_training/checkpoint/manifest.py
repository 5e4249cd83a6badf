"""MANIFEST.json: what a sealed folder holds, with sizes and SHA-256 sums, and the sum of the manifest itself."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sd_training.checkpoint.durable import files_below

NAME = "MANIFEST.json"
_FORMAT = 1
MAX_BYTES = 16 * 2**20
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


def record(folder: Path, step: int, info: Mapping[str, Any]) -> Manifest:
    """Reads and hashes every file below `folder`."""
    paths = list(files_below(folder))
    names = [path.relative_to(folder).as_posix() for path in paths]
    with ThreadPoolExecutor(_THREADS) as pool:  # hashing releases the interpreter lock
        records = list(pool.map(lambda path: FileRecord(path.stat().st_size, _sha256(path)), paths))
    return Manifest(step, dict(info), dict(zip(names, records, strict=True)))


def to_text(manifest: Manifest) -> str:
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


def read(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        ValueError: it is damaged, of another format, or names a file outside of the folder.
        OSError: it cannot be read.
    """
    path = folder / NAME
    if path.is_symlink() or path.stat().st_size > MAX_BYTES:
        raise ValueError("not a manifest: a link, or too large")
    return parse(path.read_bytes())


def parse(raw: bytes) -> Manifest:
    """The manifest in a file's content.

    Raises:
        ValueError: it is damaged, of another format, or names a file outside of the folder.
    """
    try:
        manifest = _parse(json.loads(raw))
        text = to_text(manifest)
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
