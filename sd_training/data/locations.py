"""Where a file is: a local path or a URL, and how it may be shown in a message."""

import os
import re
from collections.abc import Sequence
from urllib.parse import unquote

from sd_training.errors import ConfigError

REMOTE = ("s3", "gs", "http", "https")
"""Protocols that are read besides local paths and `file://`."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")
_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")


def protocol_of(location: str) -> str:
    """One of `REMOTE`, or an empty string for a local file.

    Raises:
        ConfigError: any other protocol, also chains such as `simplecache::s3://`.
    """
    found = _SCHEME.match(location)
    name = found[1].lower() if found else "file"
    if name in REMOTE:
        return name
    if name == "file":
        return ""
    raise ConfigError(
        f"dataset.params.path: '{shown(location)}' has the protocol '{name}', which is not read; "
        "use a local path, s3://, gs://, http:// or https://"
    )


def is_remote(location: str) -> bool:
    """Whether a file is read over the network. Raises ConfigError as `protocol_of` does."""
    return protocol_of(location) != ""


def is_listable(location: str) -> bool:
    """Whether a remote place can be asked for its files; web servers cannot."""
    return protocol_of(location) in ("s3", "gs")


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


def local_path(location: str) -> str:
    """Absolute path of a local file, which may be written as `file:///path`."""
    if location[:7].lower() == "file://":
        location = unquote(location[7:])
    return os.path.abspath(os.path.expanduser(location))


def shown(location: str) -> str:
    """A location for messages: without user, password and query, where secrets are (signed links)."""
    scheme, separator, rest = location.partition("://")
    if not separator:
        return location
    if scheme not in ("s3", "gs"):  # there `?` and `#` are part of a key
        rest = re.split("[?#]", rest, maxsplit=1)[0]
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def without_secrets(text: str) -> str:
    """A library's message with every URL in it as `shown` gives it."""
    return _URL_IN_TEXT.sub(lambda found: shown(found[0]), text)
