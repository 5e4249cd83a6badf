"""Images in files of their own: the file source, and the rows that a folder of images with captions gives.

Tables and tag files are further row readers of the same source (`table`, `tags`).
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

from sd_training.data.index.columns import Scalar, read_metadata
from sd_training.data.sources.base import (
    IMAGE_EXTENSIONS,
    MAX_TEXT_BYTES,
    ImageInfo,
    IndexedReader,
    IndexedShards,
    Report,
    Row,
    Shard,
    ShardScan,
    collect,
    join,
    measure,
)
from sd_training.data.storage.byte_file import Access
from sd_training.data.storage.locations import entries_of, folders_below, is_remote, local_path, shown, unreadable
from sd_training.errors import ConfigError, DataError

IMAGE_SUFFIXES = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)
_OTHER_IMAGE_SUFFIXES = (".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".jxl")
"""Images that training cannot read; they are reported."""
_PARTNERS = {"images": "captions", "img": "txt"}
"""A folder of images → the folder beside it that holds their captions."""
_CAPTION, _METADATA = ".txt", ".json"
_SUFFIXES = (*IMAGE_SUFFIXES, *_OTHER_IMAGE_SUFFIXES, _CAPTION, _METADATA)
_MEASURED_AT_ONCE = 4096
T = TypeVar("T")


class FileSource:
    """A source whose samples are image files. A kind of it gives the shards and `rows`."""

    def __init__(self, access: Access) -> None:
        self.access = access

    def base(self, shard: Shard) -> str:
        """The folder that paths of a shard's rows start from."""
        return shard.location

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """The samples of a shard; reports what is left out."""
        raise NotImplementedError

    def scan(self, shard: Shard) -> ShardScan:
        """As `Source.scan`."""
        return collect(shown(shard.location), partial(self.rows, shard))

    def reader(self, index: IndexedShards) -> IndexedReader:
        """As `Source.reader`."""
        return IndexedReader(index, self.access, [self.base(shard) for shard in index.shards])

    def measured(self, shard: Shard, found: Iterable[tuple[T, str]]) -> Iterator[tuple[T, str, ImageInfo | None]]:
        """Adds to (anything, image path) what the header of the image shows, None where it is missing."""
        base, pairs = self.base(shard), iter(found)
        while part := list(islice(pairs, _MEASURED_AT_ONCE)):
            infos = measure([join(base, path) for _, path in part], self.access)
            yield from ((item, path, info) for (item, path), info in zip(part, infos, strict=True))


def local_folders(paths: Sequence[str]) -> list[str]:
    """Absolute paths of folders of loose files.

    Raises:
        ConfigError: one is remote; a listing and a request per image would be slower than the training.
    """
    if remote := [path for path in paths if is_remote(path)]:
        raise ConfigError(
            f"dataset.params.path: '{shown(remote[0])}' is remote, and folders of loose files are read from local "
            "disks only; pack the folder with scripts/make_webdataset.py and use dataset.type=WebDataset"
        )
    return [local_path(path) for path in paths]


class FolderSource(FileSource):
    """The source of image folders at any depth; one shard per folder that holds images.

    The caption of `x.jpg` is `x.txt` and its metadata `x.json`: beside it, or in the partner folder, where a folder
    `images` of the path is replaced by `captions`, or `img` by `txt`. Hidden files and folders are left out. Only files
    found below `paths` are read; links are followed, each folder once.

    Args:
        paths: local folders.
    """

    identity = "folder"

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(Access())
        self.paths = list(paths)

    def shards(self) -> list[Shard]:
        """As `Source.shards`."""
        shards: dict[str, Shard] = {}
        for root in self._roots():
            listings = {folder: _list_files(folder) for folder in folders_below(root)}
            for folder, files in listings.items():
                if folder not in shards and any(file.suffix in IMAGE_SUFFIXES for file in files):
                    partner = next((listings[p] for p in _partner_folders(root, folder) if p in listings), None)
                    version = " ".join(_digest(listing) for listing in (files, partner) if listing is not None)
                    shards[folder] = Shard(folder, sum(file.size for file in [*files, *(partner or ())]), version)
        if not shards:
            names = ", ".join(sorted(IMAGE_SUFFIXES))
            raise DataError(f"dataset.params.path: no image file ({names}) in or below {', '.join(self.paths)}")
        return list(shards.values())

    def _roots(self) -> list[str]:
        roots = local_folders(self.paths)
        if missing := [path for path, root in zip(self.paths, roots, strict=True) if not os.path.isdir(root)]:
            raise DataError(f"dataset.params.path: '{missing[0]}' is no folder; ImageFolder reads folders")
        return roots

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """As `FileSource.rows`."""
        folder = shard.location
        root = next(root for root in self._roots() if f"{folder}/".startswith(root.rstrip("/") + "/"))
        images = ((image, image.file.name) for image in _images_in(root, folder, report))
        for image, name, info in self.measured(shard, images):
            if info is None:
                report(name, "image file missing")
                continue
            caption, length = (None, -1) if image.caption is None else image.caption[:2]
            if length > MAX_TEXT_BYTES:
                report(name, f"caption file has too many bytes: {length}")
                caption, length = None, -1
            metadata: dict[str, Scalar] = {}
            try:
                if image.metadata is not None:
                    if image.metadata.size > MAX_TEXT_BYTES:
                        raise ValueError("too long")
                    with open(join(folder, image.metadata.name), "rb") as opened:
                        metadata = read_metadata(opened.read().decode("utf-8-sig", "replace"))
            except (ValueError, RecursionError):
                report(name, "metadata is not a JSON object")
            yield Row(name, info, metadata, name, caption_file=caption, caption_length=length)


class _File(NamedTuple):
    """A file of a folder."""

    name: str
    size: int
    """[bytes]."""
    time: int
    """Of its last change [ns]."""

    @property
    def suffix(self) -> str:
        """In lower case."""
        return os.path.splitext(self.name)[1].lower()

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return os.path.splitext(self.name)[0]


class _DescribedImage(NamedTuple):
    """An image with the files that describe it; their names are paths from the image's folder."""

    file: _File
    caption: _File | None
    metadata: _File | None


def _list_files(folder: str) -> list[_File]:
    """Images, captions and metadata in a folder, by name. Raises DataError when it cannot be read."""
    try:
        entries = [entry for entry in entries_of(folder) if entry.name.lower().endswith(_SUFFIXES)]
        states = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError as error:
        raise unreadable(error) from error
    return [_File(name, state.st_size, state.st_mtime_ns) for name, state in states]


def _images_in(root: str, folder: str, report: Report) -> list[_DescribedImage]:
    """The images directly in a folder below `root`; reports those of other formats, and captions without an image."""
    files = _list_files(folder)
    partner = next(filter(os.path.isdir, _partner_folders(root, folder)), None)
    prefix = "" if partner is None else os.path.relpath(partner, folder) + "/"
    described: dict[str, _File] = {}
    for where, listing in ((prefix, [] if partner is None else _list_files(partner)), ("", files)):  # beside wins
        for file in listing:
            if file.suffix in (_CAPTION, _METADATA) and _is_storable(file.name, report):
                described[file.stem + file.suffix] = file._replace(name=where + file.name)
    for file in files:
        if file.suffix in _OTHER_IMAGE_SUFFIXES:
            report(file.name, f"image format is not read: {file.suffix}")
    images = [file for file in files if file.suffix in IMAGE_SUFFIXES and _is_storable(file.name, report)]
    stems = {file.stem for file in files if file.suffix not in (_CAPTION, _METADATA)}
    for name, file in described.items():
        if name.endswith(_CAPTION) and name.removesuffix(_CAPTION) not in stems:
            report(file.name, "image missing")
    return [_DescribedImage(i, described.get(i.stem + _CAPTION), described.get(i.stem + _METADATA)) for i in images]


def _partner_folders(root: str, folder: str) -> Iterator[str]:
    """Where captions may be: `root/images/a` → `root/captions/a`; the innermost `images` first, none above the root."""
    parts = os.path.relpath(folder, root).split("/")
    for i in reversed(range(len(parts))):
        if parts[i] in _PARTNERS:
            yield os.path.join(root, *parts[:i], _PARTNERS[parts[i]], *parts[i + 1 :])


def _digest(files: Sequence[_File]) -> str:
    lines = "".join(f"{file.name}\0{file.size}\0{file.time}\n" for file in files)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _is_storable(name: str, report: Report) -> bool:
    """The index holds paths as UTF-8 text."""
    if is_text := not any("\ud800" <= character <= "\udfff" for character in name):
        return is_text
    report(name, "file name is not UTF-8")
    return False
