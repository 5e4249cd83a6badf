"""Reads samples whose image, and perhaps caption, is a file of its own.

Where a path may lead is decided when the data is indexed: the entries of a table are checked by `checked_path`, and a
folder's samples are files that were found in it.
"""

import os
import posixpath
import re
from collections.abc import Sequence
from urllib.parse import quote

from sd_training.data.byte_files import Access, FileMissing, open_bytes
from sd_training.data.index import DatasetIndex
from sd_training.data.locations import is_remote, local_path, shown
from sd_training.data.problems import BadSample
from sd_training.errors import DataError

MAX_IMAGE_BYTES = 1 << 28
"""Larger image files are skipped without reading them."""
MAX_TEXT_BYTES = 1 << 20
"""Larger caption and metadata files are refused."""
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def folder_of(location: str) -> str:
    """The folder, or its URL, that a table is in; without links, so that `..` means what the file system means."""
    if location.startswith(("http://", "https://")):
        location = location.partition("?")[0]
    folder = location.rpartition("/")[0]
    return folder if is_remote(location) else os.path.realpath(folder)


def join(base: str, path: str) -> str:
    """Where a file of the index is. `base` is a folder; `path` is relative to it, absolute, or a URL."""
    if "://" in path or path.startswith("/"):
        return path
    if not is_remote(base):
        return os.path.normpath(f"{base}/{path}")  # not by the file system: `..` goes back through a linked folder
    return f"{base}/{quote(path) if base.startswith('http') else path}"


def checked_path(base: str, path: str) -> str:
    """The path of a file that a table names, as `join` takes it.

    A local table may name any local file, by an absolute path or by `..`: its folder could as well hold links, and only
    images are read. A remote table must not name files of this machine: its relative paths stay below its folder, and
    URLs must lead to its own store.

    Args:
        base: folder of the table.
        path: as it is written.

    Raises:
        BadSample: the path of a remote table leads out of its folder, or the path is none.
        DataError: a URL of another place.
    """
    if not path or _UNSTORABLE.search(path):
        raise BadSample("image path is not a file name" if path else "image path is empty")
    if "://" in path:
        is_local = path.lower().startswith("file://") and not is_remote(base)
        return local_path(path) if is_local else _checked_url(base, path)
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


def _checked_url(base: str, url: str) -> str:
    store = "/".join(base.split("/")[:3]) + "/"
    if is_remote(base) and url.startswith(store) and ".." not in url.split("/"):
        return url
    place = f"paths relative to it, or URLs below {shown(store)}" if is_remote(base) else "local paths"
    raise DataError(
        f"the table in '{shown(base)}' names the image '{shown(url)}'; images are not downloaded from other places: "
        f"only {place} are read. Download the images first and name the files"
    )


def utf8(caption: bytes) -> str:
    """A caption file's text. Raises BadSample: other encodings would train on wrong letters."""
    try:
        return caption.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample("caption is not UTF-8 text") from error


def tidy(caption: str) -> str:
    """A caption file's text in one line: every run of white space becomes one space."""
    return " ".join(caption.split())


class FileReader:
    """The `SampleReader` of samples in files of their own.

    The index has `at:image` and `at:image_length`, and captions in `caption`, or in the text files `at:caption`. A file
    that was removed or changed after it was indexed makes its sample a bad one.

    Args:
        index: made from files.
        access: how remote files are read.
        bases: per unit, the folder that relative paths start from.
        named_by: what names the images and is itself watched for changes, such as `table`; None where they are.
    """

    def __init__(
        self, index: DatasetIndex, access: Access, bases: Sequence[str], named_by: str | None = "table"
    ) -> None:
        self.index, self.access, self.bases = index, access, list(bases)
        first = f"touch the {named_by} that names it and " if named_by else ""
        self.remedy = f"{first}start again to index it anew"

    def image(self, sample: int) -> bytes:
        path = self.index.text("at:image", sample)
        if path is None:
            raise BadSample("image missing")
        return self._read(sample, path, int(self.index.numbers("at:image_length")[sample]), "image", MAX_IMAGE_BYTES)

    def caption(self, sample: int) -> str:
        """As `SampleReader.caption`."""
        text = self.index.text("caption", sample)
        if text is not None:
            return text
        path = self.index.text("at:caption", sample)
        if path is None:
            raise BadSample("caption missing")
        length = int(self.index.numbers("caption_length")[sample])
        return tidy(utf8(self._read(sample, path, length, "caption", MAX_TEXT_BYTES)))

    def _read(self, sample: int, path: str, length: int, what: str, limit: int) -> bytes:
        if length > limit:
            raise BadSample(f"{what} file has too many bytes: {length}")
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
