"""Object stores and web servers, through obstore (Rust's object_store): `s3://`, `gs://`, `http(s)://` and `file://`.

obstore pages through listings, and takes keys, endpoints and proxies from the environment. Its threads do not survive a
fork, so processes that use it are started by spawn or by a fork server that has not used it (`data/loader.py`).

Length and version of every file are compared with the indexed file. A transient failure is retried
`dataset.params.remote.num_retries` times. The retries are written here and obstore's are off, because its own do not
cover answers of a wrong length and would multiply with these.
"""

import os
import random
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore import exceptions
from obstore.store import GCSStore, HTTPStore, LocalStore, ObjectStore, S3Store

from sd_training.data.storage.locations import Access, FileMissing, FileState, has_changed, shown
from sd_training.errors import ConfigError, DataError, OutageError
from sd_training.log import redacted

FIRST_WAIT_S = 0.2
"""Wait after the first failure of a request; every further one is twice as long."""
LONGEST_WAIT_S = 20.0
_CHUNK_BYTES = 1 << 20
_TRANSIENT_STATUS = frozenset({408, 425, 429, *range(500, 600)} - {501, 505})
_STATUS = re.compile(r"status code: (\d{3})")
_METADATA_SERVICES = ("/latest/api/token", "metadata.google.internal")
"""Where a cloud's machines get the keys of their role; asked last, when there are no others."""
_KEYS_KEPT = timedelta(minutes=10)
"""A role's keys are asked for again after this; botocore renews them 15 to 10 minutes before they expire."""
T = TypeVar("T")


def open_store(url: str, num_retries: int, timeout_s: float) -> tuple[ObjectStore, str]:
    """The store of a URL and the path in it; one client serves all paths of a bucket or host.

    Args:
        url: `s3://bucket/key`, `gs://bucket/key`, `http(s)://host/path`, or `file:///folder` (the store is then that
            folder, which is made and whose empty folders are removed, and the path is empty).
        num_retries: attempts after the first, by obstore [count].
        timeout_s: longest wait for a connection, and between two pieces of an answer [s].

    Raises:
        ConfigError: the store cannot be used with this environment.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme == "file":
        return LocalStore(Path(unquote(rest)), mkdir=True, automatic_cleanup=True), ""
    parts = urlsplit(url)
    if scheme in ("s3", "gs"):
        bucket, _, path = rest.partition("/")
        root, path = f"{scheme}://{bucket}", path.rstrip("/")
    elif parts.query or "//" in parts.path:  # such a URL must reach the server as it is written
        root, path = url, ""
    else:
        root, path = f"{scheme}://{parts.netloc}", unquote(parts.path).strip("/")
    return _client(root, num_retries, timeout_s, os.getpid()), path


@lru_cache(maxsize=256)
def _client(root: str, num_retries: int, timeout_s: float, pid: int) -> Any:
    """Cached by process: a forked one must not use its parent's."""
    wait, transfer = timedelta(seconds=timeout_s), timedelta(days=1)  # of a whole one; a slow one is no failure
    settings: dict[str, Any] = {
        "client_options": {"allow_http": True, "connect_timeout": wait, "read_timeout": wait, "timeout": transfer},
        "retry_config": {"max_retries": num_retries, "retry_timeout": transfer},
    }
    scheme, _, bucket = root.partition("://")
    try:
        if scheme == "s3":
            return S3Store(bucket, **settings, **_profile())
        if scheme == "gs":
            return GCSStore(bucket, **settings)
        return HTTPStore(root, **settings)
    except exceptions.BaseError as error:
        raise ConfigError(f"{redacted(root)} cannot be used: {reason_of(error)}") from None


def _profile() -> dict[str, Any]:
    """Keys of `~/.aws` and of a profile, which obstore does not read, by boto3 where the environment has no keys."""
    names = (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config"))
    files = [os.path.expanduser(os.environ.get(variable) or default) for variable, default in names]
    has_keys = os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE")
    if has_keys or not any(map(os.path.exists, files)):
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        provider = Boto3CredentialProvider(ttl=_KEYS_KEPT)
    except (ImportError, ValueError):  # no boto3, or no keys in these files
        return {}
    except Exception as error:  # botocore's, which is an optional package
        raise ConfigError(f"the keys of {' or '.join(files)} cannot be used: {redacted(str(error))}") from None
    if os.environ.get("AWS_REGION"):
        provider.config.pop("region", None)  # the file's region would win over the environment's
    return {"credential_provider": provider}


# --- Files of the training data ---


def download(state: FileState, access: Access, path: Path) -> None:
    """Writes a whole remote file to `path`. Raises as `remote_state` does."""

    def write() -> None:
        store, key = open_store(state.location, 0, access.timeout_s)
        answer = obstore.get(store, key)
        size, version = answer.meta["size"], _version(answer.meta)
        if version != state.version or (size != state.size and not version):
            raise has_changed(state.location)
        with path.open("wb") as target:
            written = sum(target.write(bytes(chunk)) for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES))
        if written != state.size:
            raise _WrongLength(f"the answer has {written} bytes instead of {state.size}")

    _retrying(state.location, access, write)


def remote_state(location: str, access: Access) -> FileState:
    """Size and version of a remote file. One byte is requested: many web servers and all signed links refuse HEAD.

    Raises:
        FileMissing: it does not exist or may not be read.
        OutageError: its server cannot be reached or fails, after all retries.
        DataError: another failure.
    """

    def look() -> FileState:
        store, path = open_store(location, 0, access.timeout_s)
        try:
            meta = obstore.get(store, path, options={"range": (0, 1)}).meta
        except exceptions.NotSupportedError:  # no ranges: the answer is the whole file, and its beginning is enough
            meta = obstore.get(store, path).meta
        return FileState(location, meta["size"], _version(meta))

    return _retrying(location, access, look)


def list_bucket(folder: str, access: Access) -> tuple[list[str], list[str]]:
    """URLs of the files and of the folders directly in a folder of a bucket; none where there is no such folder. Raises
    as `remote_state` does: a failed listing is never taken for an empty one."""
    scheme, _, rest = folder.partition("://")
    bucket, _, path = rest.partition("/")
    store, _ = open_store(folder, 0, access.timeout_s)
    found = _retrying(folder, access, lambda: obstore.list_with_delimiter(store, path.strip("/") or None))
    files = [f"{scheme}://{bucket}/{meta['path']}" for meta in found["objects"]]
    return files, [f"{scheme}://{bucket}/{prefix.rstrip('/')}" for prefix in found["common_prefixes"]]


def _version(meta: Any) -> str:
    """ETag or modification time; empty where the server sends neither (obstore then gives the epoch)."""
    modified = meta["last_modified"]
    return meta.get("e_tag") or (str(modified) if modified.timestamp() else "")


# --- Failures ---


class _WrongLength(Exception):
    """A server sent fewer or more bytes than the file has."""


def _retrying(location: str, access: Access, attempt: Callable[[], T]) -> T:
    """The result of `attempt`, called again after growing waits while its failures may be transient.

    Raises:
        FileMissing, OutageError, DataError: as `remote_state`. Without their cause, which holds URLs with secrets.
        OSError: of the local disk.
    """
    failures = 0
    while True:
        try:
            return attempt()
        except (OSError, exceptions.BaseError, _WrongLength) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk; obstore's errors have no number
            failures += 1
            transient = is_outage(error) or isinstance(error, _WrongLength) or "invalid list response" in str(error)
            if not transient or failures > access.num_retries:
                raise _explained(location, error, failures) from None
        time.sleep(random.uniform(0.5, 1.0) * min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (failures - 1)))


def _explained(location: str, error: Exception, failures: int) -> DataError:
    name, reason = shown(location), reason_of(error)
    if isinstance(error, FileNotFoundError):
        return FileMissing(f"'{name}' cannot be read: does not exist")
    if isinstance(error, (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        return FileMissing(f"'{name}' cannot be read: not allowed: {reason}; are the credentials right?")
    attempts = f" after {failures} attempts" if failures > 1 else ""
    return (OutageError if is_outage(error) else DataError)(f"'{name}' cannot be read{attempts}: {reason}")


def reason_of(error: BaseException) -> str:
    """One line about a failure, without secrets and without obstore's dump of its own state."""
    text = str(error).partition("Debug source")[0]
    if any(service in text for service in _METADATA_SERVICES):
        where = "the environment, the provider's files (~/.aws is read where boto3 is installed) or this machine's role"
        return f"no credentials were found in {where}"
    return redacted(" ".join(text.split()))[:400] or type(error).__name__


def is_outage(error: BaseException) -> bool:
    """Whether a server cannot be reached or is not well, after all retries: another start may succeed."""
    text = str(error)
    if any(service in text for service in _METADATA_SERVICES):
        return False
    if found := _STATUS.search(text):
        return int(found[1]) in _TRANSIENT_STATUS
    return "HTTP error" in text and "certificate" not in text.lower()
