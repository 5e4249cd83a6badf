"""Reads the samples of an index: images and captions inside shards, or in files of their own.

Which paths of a table are followed is decided when the data is indexed (`checked_path`); an index from a folder names
only files that were found in it.
"""

import os
import posixpath
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from sd_training.data.problems import BadSample
from sd_training.data.samples.image import image_size
from sd_training.data.sources.base import MAX_IMAGE_BYTES, MAX_TEXT_BYTES, ImageInfo, IndexedShards
from sd_training.data.storage.byte_file import Access, ByteFile, FileMissing, FileState, seekable
from sd_training.data.storage.files import open_bytes
from sd_training.data.storage.locations import is_remote, local_path, shown
from sd_training.errors import DataError

MAX_OPEN_FILES = 64
"""Shards kept open per process."""
VERSION_SEPARATOR = "\n"
"""Between the version of a shard's file and that of the metadata table beside it."""
_THREADS = 8
_HEADER_BUFFER = 4096
"""Bytes read at once where an image's size is looked up; the sizes of most files are in the first block."""
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def folder_of(location: str) -> str:
    """The folder, or its URL, of a table; without links, so that `..` has the meaning of the file system."""
    if location.startswith(("http://", "https://")):
        location = location.partition("?")[0]
    folder = location.rpartition("/")[0]
    return folder if is_remote(location) else os.path.realpath(folder)


def join(base: str, path: str) -> str:
    """Location of a file of the index. `base` is a folder; `path` is relative to it, absolute, or a URL."""
    if "://" in path or path.startswith("/"):
        return path
    if not is_remote(base):
        return os.path.normpath(f"{base}/{path}")  # not by the file system: `..` goes back through a linked folder
    return f"{base}/{quote(path) if base.startswith('http') else path}"


def checked_path(base: str, path: str) -> str:
    """An image path of a table as `join` takes it.

    Args:
        base: folder of the table.
        path: as it is written.

    Raises:
        BadSample: the path of a remote table leads out of its folder, or it is not a path.
        DataError: a URL of another place.
    """
    if not path or _UNSTORABLE.search(path):
        raise BadSample("image path is not a file name" if path else "image path is empty")
    if "://" in path:
        if path.lower().startswith("file://") and not is_remote(base):
            return local_path(path)
        store = "/".join(base.split("/")[:3]) + "/"
        if is_remote(base) and path.startswith(store) and ".." not in path.split("/"):
            return path
        place = f"paths relative to it, or URLs below {shown(store)}" if is_remote(base) else "local paths"
        raise DataError(
            f"the table in '{shown(base)}' names the image '{shown(path)}'; images are not downloaded from other "
            f"places: only {place} are read. Download the images first and name the files"
        )
    if path.startswith("/"):
        if is_remote(base):
            raise BadSample(f"image path is absolute in a remote table: {path}")
        return path
    plain = posixpath.normpath(path)
    if posixpath.basename(plain) == "..":
        raise BadSample(f"image path is a folder: {path}")
    if plain.startswith("../") and is_remote(base):
        raise BadSample(f"image path leads out of the folder of its remote table: {path}")
    return plain


def measure(locations: Sequence[str], access: Access) -> list[ImageInfo | None]:
    """Reads the headers of image files, several at once; None where there is no such file. DataError is passed on."""

    def one(location: str) -> ImageInfo | None:
        try:
            file = open_bytes(location, access)
        except FileMissing:
            return None
        try:
            return image_info(file, 0, file.size)
        finally:
            file.close()

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(one, locations))


def image_info(file: ByteFile, offset: int, length: int) -> ImageInfo:
    """Length and size of an image that lies in `file`."""
    return ImageInfo(length, *image_size(seekable(file, offset, length, _HEADER_BUFFER)))


def utf8(caption: bytes) -> str:
    """The text of a caption file. Raises BadSample: other encodings would train on wrong letters."""
    try:
        return caption.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample("caption is not UTF-8 text") from error


def tidy(caption: str) -> str:
    """The text of a caption file in one line: every run of white space becomes one space."""
    return " ".join(caption.split())


class IndexedReader:
    """The `SampleReader` of every source.

    A file that was removed or changed after it was indexed makes its sample a bad one.

    Args:
        index: made from the source.
        access: how remote files are read.
        bases: per shard, the folder that relative paths start from; empty where no sample is in a file of its own.
        named_by: what names the image files and is watched for changes, such as `table`; None where they are watched.
        unpack: opens the row group of a sample in which `at:image_offset` counts; None: offsets are those of the shard.
    """

    def __init__(
        self,
        index: IndexedShards,
        access: Access,
        bases: Sequence[str] = (),
        named_by: str | None = "table",
        unpack: Callable[[IndexedShards, int], ByteFile] | None = None,
    ) -> None:
        self.index, self.access, self.bases, self.unpack = index, access, bases, unpack
        self.has_caption_members = "at:caption_offset" in index.columns.column_names
        first = f"touch the {named_by} that names it and " if named_by else ""
        self.remedy = f"{first}start again to index it anew"
        self._open: OrderedDict[int, ByteFile] = OrderedDict()

    def image(self, sample: int) -> bytes:
        """As `SampleReader.image`."""
        length = int(self.index.numbers("at:image_length")[sample])
        if length > MAX_IMAGE_BYTES:
            raise BadSample(f"image has too many bytes: {length}")
        path = self.index.text("at:image", sample)
        if path is not None:
            return self._read_file(sample, path, length, "image")
        return self._container(sample).pread(length, int(self.index.numbers("at:image_offset")[sample]))

    def caption(self, sample: int) -> str:
        """As `SampleReader.caption`: the index's text, else the text file or member."""
        text = self.index.text("caption", sample)
        if text is not None:
            return text
        length = int(self.index.numbers("caption_length")[sample])
        if length > MAX_TEXT_BYTES:
            raise BadSample(f"caption has too many bytes: {length}")
        if self.has_caption_members and (offset := int(self.index.numbers("at:caption_offset")[sample])) >= 0:
            return utf8(self._container(sample).pread(length, offset)).strip()
        path = self.index.text("at:caption", sample)
        if path is None:
            raise BadSample("caption missing")
        return tidy(utf8(self._read_file(sample, path, length, "caption")))

    def _read_file(self, sample: int, path: str, length: int, what: str) -> bytes:
        try:
            file = open_bytes(join(self.bases[self.index.numbers("unit")[sample]], path), self.access)
        except FileMissing as error:
            raise BadSample(f"{what} file missing: {shown(path)}") from error
        try:
            if file.size != length:
                raise BadSample(f"{what} file has changed since it was indexed: {shown(path)}; {self.remedy}")
            return file.pread(length, 0)
        finally:
            file.close()

    def _container(self, sample: int) -> ByteFile:
        """The shard or row group that holds a sample; the last few stay open."""
        number = int(self.index.numbers("unit" if self.unpack is None else "block")[sample])
        if number not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            if self.unpack is None:
                shard = self.index.shards[number]
                state = FileState(shard.location, shard.size, shard.version.partition(VERSION_SEPARATOR)[0])
                self._open[number] = open_bytes(state, self.access)
            else:
                self._open[number] = self.unpack(self.index, sample)
        self._open.move_to_end(number)
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def __del__(self) -> None:
        for file in self.__dict__.get("_open", {}).values():
            file.close()
