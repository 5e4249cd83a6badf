"""The three kinds of remote storage: how each is asked for a file's state, for bytes and for names.

All methods run on fsspec's event loop and raise what the libraries raise; `retries` tells what that means.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import fsspec

from sd_training.data.byte_files import Access, FileState, has_changed
from sd_training.data.locations import shown
from sd_training.data.remote_globs import expand
from sd_training.data.retries import StatusError
from sd_training.errors import ConfigError, DataError

_INSTALL = {"s3": "s3fs", "gs": "gcsfs"}


class NoParts(DataError):
    """A server only sends whole files."""


class Store(Protocol):
    """One kind of storage."""

    file_system: Any
    """fsspec's."""

    async def state(self, location: str) -> tuple[int, str]:
        """Size [bytes] and version, as in `FileState`."""

    async def read(self, state: FileState, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop`, of the known version. The length is not checked."""

    async def listing(self, location: str) -> list[str] | None:
        """URLs of the files in a folder, in any order; None when it is no folder."""

    async def matches(self, pattern: str) -> list[str]:
        """URLs that match, in any order."""


class _KeyStore:
    """What S3 and GCS have in common."""

    def __init__(self, protocol: str, **options: Any) -> None:
        self.protocol = protocol
        try:
            make = fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            raise ConfigError(
                f"dataset.params.path: {protocol}:// needs a package: pip install {_INSTALL[protocol]}"
            ) from error
        # Kept by process, not by fsspec; listings are not kept because others write to the storage.
        self.file_system = make(skip_instance_cache=True, use_listings_cache=False, **options)

    def path(self, location: str) -> str:
        return location.partition("://")[2]

    async def info(self, location: str) -> dict[str, Any]:
        """Raises FileNotFoundError for what is not a file."""
        info: dict[str, Any] = await self.file_system._info(self.path(location))
        if info["type"] != "file":
            raise FileNotFoundError(location)
        return info

    async def listing(self, location: str) -> list[str] | None:
        """As `Store.listing`."""
        path = self.path(location).rstrip("/")
        try:
            entries = await self.file_system._ls(path, detail=True)
        except FileNotFoundError:
            return None
        files = [entry["name"] for entry in entries if entry["type"] == "file"]
        if files == [path]:
            return None
        return [f"{self.protocol}://{name}" for name in files]

    async def matches(self, pattern: str) -> list[str]:
        return [f"{self.protocol}://{name}" for name in await expand(self.file_system, self.path(pattern))]


class S3Store(_KeyStore):
    """`s3://bucket/key`, also of servers that speak S3's protocol (`AWS_ENDPOINT_URL`)."""

    def __init__(self, access: Access) -> None:
        config = {
            "connect_timeout": access.timeout_s,
            "read_timeout": access.timeout_s,
            "retries": {"total_max_attempts": 1},
        }
        super().__init__("s3", config_kwargs=config)
        self.file_system.retries = 1

    async def state(self, location: str) -> tuple[int, str]:
        info = await self.info(location)
        return int(info["size"]), str(info.get("ETag") or info.get("LastModified") or "")

    async def read(self, state: FileState, start: int, stop: int) -> bytes:
        """As `Store.read`."""
        bucket, key, _ = self.file_system.split_path(self.path(state.location))
        is_tag = state.version.startswith(('"', "W/"))
        answer = await self.file_system._call_s3(
            "get_object",
            Bucket=bucket,
            Key=key,
            Range=f"bytes={start}-{stop - 1}",
            **({"IfMatch": state.version} if is_tag else {}),
        )
        try:
            if is_tag and answer.get("ETag") != state.version:  # for servers that do not know IfMatch
                raise has_changed(state.location)
            data: bytes = await answer["Body"].read()
            return data
        finally:
            answer["Body"].close()


class GsStore(_KeyStore):
    """`gs://bucket/object`. gcsfs has retries of its own, within the time of one of our attempts."""

    def __init__(self, access: Access) -> None:
        super().__init__("gs", requests_timeout=_timeout(access))

    async def state(self, location: str) -> tuple[int, str]:
        info = await self.info(location)
        return int(info["size"]), str(info.get("generation") or info.get("etag") or info.get("mtime") or "")

    async def read(self, state: FileState, start: int, stop: int) -> bytes:
        """As `Store.read`."""
        generation = {"generation": state.version} if state.version.isdigit() else {}
        path = self.path(state.location)
        try:
            data: bytes = await self.file_system._cat_file(path, start=start, end=stop, **generation)
        except FileNotFoundError:
            if generation:  # that generation is gone: the object was replaced or deleted
                raise has_changed(state.location) from None
            raise
        return data


class HttpStore:
    """`http(s)://`. Proxies and `.netrc` are used as the environment says."""

    def __init__(self, access: Access) -> None:
        client = {"timeout": _timeout(access), "trust_env": True}
        self.file_system = fsspec.filesystem("http", skip_instance_cache=True, client_kwargs=client)

    async def state(self, location: str) -> tuple[int, str]:
        """From the answer to a request for one byte: many servers and all signed links refuse HEAD."""
        async with await self._get(location, 0, 1) as answer:
            if answer.status == 416:  # an empty file has no first byte
                return 0, _version(answer)
            _raise_for_status(answer)
            return _total_size(answer, location), _version(answer)

    async def read(self, state: FileState, start: int, stop: int) -> bytes:
        """As `Store.read`."""
        async with await self._get(state.location, start, stop) as answer:
            _raise_for_status(answer)
            _check_state(answer, state)
            if answer.status != 206 and (start, stop) != (0, state.size):
                raise NoParts(
                    f"the server of '{shown(state.location)}' sends no parts of files; "
                    "set dataset.params.remote.mode=cache"
                )
            return await answer.read()

    async def write_whole(self, state: FileState, path: Path) -> int:
        """Writes the whole file to `path`. Returns how many bytes came."""
        session = await self.file_system.set_session()
        url, length = self.file_system.encode_url(state.location), 0
        async with session.get(url, headers={"Accept-Encoding": "identity"}) as answer:
            _raise_for_status(answer)
            _check_state(answer, state)
            with path.open("r+b") as target:
                async for piece in answer.content.iter_chunked(1 << 20):
                    length += target.write(piece)
        return length

    async def listing(self, location: str) -> list[str] | None:
        return await self.file_system._ls(location, detail=False) if location.endswith("/") else None

    async def matches(self, pattern: str) -> list[str]:
        return await expand(self.file_system, pattern)

    async def _get(self, location: str, start: int, stop: int) -> aiohttp.ClientResponse:
        session = await self.file_system.set_session()
        # Compressed answers have no ranges that mean anything.
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        answer: aiohttp.ClientResponse = await session.get(self.file_system.encode_url(location), headers=headers)
        return answer


def _timeout(access: Access) -> aiohttp.ClientTimeout:
    """Waits for a connection and between two pieces of an answer; the whole may take longer."""
    return aiohttp.ClientTimeout(total=None, sock_connect=access.timeout_s, sock_read=access.timeout_s)


def _raise_for_status(answer: aiohttp.ClientResponse) -> None:
    if answer.status >= 400:
        raise StatusError(answer.status, answer.reason)


def _total_size(answer: aiohttp.ClientResponse, location: str) -> int:
    total = answer.headers.get("Content-Range", "").rpartition("/")[2]
    if answer.status == 200:
        total = answer.headers.get("Content-Length", "")
    if not total.isdigit():
        raise DataError(f"the server of '{shown(location)}' does not tell the file's size")
    return int(total)


def _check_state(answer: aiohttp.ClientResponse, state: FileState) -> None:
    if _version(answer) != state.version or _total_size(answer, state.location) != state.size:
        raise has_changed(state.location)


def _version(answer: aiohttp.ClientResponse) -> str:
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


STORES: dict[str, Callable[[Access], Store]] = {"s3": S3Store, "gs": GsStore, "http": HttpStore}
"""By protocol; `https` is `http`."""
