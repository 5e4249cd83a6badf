"""Folders of images with captions in text files."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sd_training.data.index.columns import Scalar, read_metadata
from sd_training.data.index.store import DatasetIndex
from sd_training.data.problems import Problems
from sd_training.data.sources.base import Shard, ShardScan
from sd_training.data.sources.files import (
    MAX_TEXT_BYTES,
    ROWS_AT_ONCE,
    FileReader,
    FileSample,
    SampleColumns,
    join,
    measure,
)
from sd_training.data.storage.files import Access
from sd_training.data.storage.locations import entries_of, folders_below, local_folders, unreadable
from sd_training.errors import DataError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})
OTHER_IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".jxl"})
"""Images that training cannot read; they are named."""
PARTNERS = {"images": "captions", "img": "txt"}
"""A folder of images → the folder beside it that holds their captions."""
_CAPTION, _METADATA = ".txt", ".json"
_SUFFIXES = IMAGE_SUFFIXES | OTHER_IMAGE_SUFFIXES | {_CAPTION, _METADATA}


class FolderSource:
    """The source of image folders at any depth; one unit per folder that holds images.

    The caption of `x.jpg` is `x.txt` and its metadata `x.json`: beside it, or in the partner folder, where a folder
    `images` of the path is replaced by `captions`, or `img` by `txt`. Hidden files and folders are left out. Only files
    found below `paths` are read; links are followed, each folder once.

    Args:
        paths: local folders.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)

    @property
    def identity(self) -> str:
        return "folder"

    def shards(self) -> list[Shard]:
        """As `Source.units`."""
        units: dict[str, Shard] = {}
        for root in self._roots():
            listings = {folder: _digest(_list(folder)) for folder in folders_below(root)}
            for folder, listing in listings.items():
                if listing.has_images and folder not in units:
                    partner = next((listings[p] for p in partner_folders(root, folder) if p in listings), _NO_FILES)
                    size, version = listing.size + partner.size, f"{listing.version} {partner.version}".strip()
                    units[folder] = Shard(folder, size, version)
        if not units:
            names = ", ".join(sorted(IMAGE_SUFFIXES))
            raise DataError(f"dataset.params.path: no image file ({names}) in or below {', '.join(self.paths)}")
        return list(units.values())

    def _roots(self) -> list[str]:
        roots = local_folders(self.paths)
        for path, root in zip(self.paths, roots, strict=True):
            if not os.path.isdir(root):
                state = "is no folder" if os.path.exists(root) else "does not exist"
                raise DataError(f"dataset.params.path: '{path}' {state}; ImageFolder reads folders")
        return roots

    def scan(self, unit: Shard) -> ShardScan:
        """As `Source.scan`."""
        problems = Problems()
        columns = SampleColumns(unit.location, problems)
        root = next(root for root in self._roots() if _is_below(unit.location, root))
        partner = next(filter(os.path.isdir, partner_folders(root, unit.location)), None)
        scan = _FolderScan(unit.location, partner, columns)
        images = scan.images()
        for start in range(0, len(images), ROWS_AT_ONCE):
            columns.add(list(scan.samples(images[start : start + ROWS_AT_ONCE])))
        return ShardScan(columns.columns(), problems)

    def reader(self, index: DatasetIndex) -> FileReader:
        return FileReader(index, Access(), [unit.location for unit in index.shards], named_by=None)


class _File(NamedTuple):
    name: str
    size: int
    """[bytes]."""
    time: int
    """Of its last change [ns]."""


class _Listing(NamedTuple):
    version: str
    size: int
    """Of all files [bytes]."""
    has_images: bool


_NO_FILES = _Listing("", 0, False)


def _is_below(folder: str, root: str) -> bool:
    return folder == root or folder.startswith(root.rstrip("/") + "/")


def _list(folder: str) -> list[_File]:
    """Images, captions and metadata in a folder, by name."""
    try:
        return [_File(entry.name, *_state(entry)) for entry in entries_of(folder) if _is_meant(entry)]
    except OSError as error:
        raise unreadable(error) from error


def _is_meant(entry: os.DirEntry[str]) -> bool:
    return _suffix(entry.name) in _SUFFIXES and entry.is_file()


def _state(entry: os.DirEntry[str]) -> tuple[int, int]:
    status = entry.stat()
    return status.st_size, status.st_mtime_ns


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _digest(files: Sequence[_File]) -> _Listing:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.size}\0{file.time}\n".encode("utf-8", "surrogateescape"))
    has_images = any(_suffix(file.name) in IMAGE_SUFFIXES for file in files)
    return _Listing(digest.hexdigest()[:32], sum(file.size for file in files), has_images)


def partner_folders(root: str, folder: str) -> Iterator[str]:
    """Where captions may be: `root/images/a` → `root/captions/a`; the innermost `images` first, none above the root."""
    parts = os.path.relpath(folder, root).split("/")
    for i in reversed(range(len(parts))):
        if parts[i] in PARTNERS:
            yield os.path.join(root, *parts[:i], PARTNERS[parts[i]], *parts[i + 1 :])


class _FolderScan:
    def __init__(self, folder: str, partner: str | None, columns: SampleColumns) -> None:
        self.folder, self.columns = folder, columns
        self.files = _list(folder)
        self.described: dict[str, tuple[str, int]] = {}
        """`x.txt` → the path of the file from the folder, and its size [bytes]; beside wins."""
        if partner is not None:
            self._describe(os.path.relpath(partner, folder) + "/", _list(partner))
        self._describe("", self.files)

    def _describe(self, prefix: str, files: Sequence[_File]) -> None:
        for file in files:
            if _suffix(file.name) in (_CAPTION, _METADATA) and self._is_storable(file.name):
                stem, suffix = os.path.splitext(file.name)
                self.described[stem + suffix.lower()] = (prefix + file.name, file.size)

    def _is_storable(self, name: str) -> bool:
        """The index holds paths as UTF-8 text."""
        try:
            name.encode()
        except UnicodeEncodeError:
            self.columns.name(name, "file name is not UTF-8")
            return False
        return True

    def images(self) -> list[_File]:
        """The images of the folder; what has no image is named."""
        for file in self.files:
            if _suffix(file.name) in OTHER_IMAGE_SUFFIXES:
                self.columns.name(file.name, f"image format is not read: {_suffix(file.name)}")
        images = [file for file in self.files if _suffix(file.name) in IMAGE_SUFFIXES and self._is_storable(file.name)]
        stems = {os.path.splitext(file.name)[0] for file in self.files if _suffix(file.name) not in (".txt", ".json")}
        for name, (path, _) in self.described.items():
            if name.endswith(_CAPTION) and name.removesuffix(_CAPTION) not in stems:
                self.columns.name(path, "image missing")
        return images

    def samples(self, images: Sequence[_File]) -> Iterator[FileSample]:
        """Samples of these images. One that vanished since it was listed is named."""
        infos = measure([join(self.folder, image.name) for image in images], Access())
        for image, info in zip(images, infos, strict=True):
            if info is None:
                self.columns.name(image.name, "image file missing")
                continue
            path, length = self._caption(image.name)
            metadata = self._metadata(image)
            yield FileSample(image.name, image.name, info, caption_file=path, caption_length=length, metadata=metadata)

    def _caption(self, name: str) -> tuple[str | None, int]:
        path, length = self.described.get(os.path.splitext(name)[0] + _CAPTION, (None, -1))
        if length > MAX_TEXT_BYTES:
            self.columns.name(name, f"caption file has too many bytes: {length}")
            return None, -1
        return path, length

    def _metadata(self, image: _File) -> dict[str, Scalar]:
        path, length = self.described.get(os.path.splitext(image.name)[0] + _METADATA, (None, 0))
        if path is None:
            return {}
        try:
            if length > MAX_TEXT_BYTES:
                raise ValueError("too long")
            with open(join(self.folder, path), "rb") as file:
                return read_metadata(file.read().decode("utf-8-sig", "replace"))
        except (ValueError, RecursionError):
            self.columns.name(image.name, "metadata is not a JSON object")
            return {}
