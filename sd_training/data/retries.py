"""Which failures of a network are worth another attempt, and when."""

import asyncio
import errno
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from sd_training.data.byte_files import Access, FileMissing
from sd_training.data.locations import shown, without_secrets
from sd_training.errors import DataError, OutageError, UserError
from sd_training.rank_log import get_logger

log = get_logger(__name__)

FIRST_WAIT_S = 0.2
"""Wait after the first failure; every further one is twice as long."""
LONGEST_WAIT_S = 20.0
_UNMENTIONED = 2
"""Failures in a row that are too common to be worth a line."""
_TRANSIENT_STATUS = frozenset({408, 425, 429, *range(500, 600)} - {501, 505})
_MISSING_STATUS = {401: "not allowed (401)", 403: "not allowed (403)", 404: "does not exist", 410: "does not exist"}
_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
_BOTOCORE_TRANSIENT = {
    "HTTPClientError",
    "ConnectionError",
    "IncompleteReadError",
    "ResponseStreamingError",
    "ChecksumError",
    "FlexibleChecksumError",
}
_UNREACHABLE = {"TimeoutError", "ConnectionError", "ClientConnectionError", "ClientPayloadError", "HTTPClientError"}
"""Names of classes, also of libraries that are not installed."""
_DISTRUSTED = {"SSLError", "ClientSSLError", "ClientConnectorCertificateError"}
_LIBRARIES = ("aiohttp", "google", "requests", "urllib3", "gcsfs")
_jitter = random.SystemRandom()  # forked processes do not share it, so they do not come back all at once
T = TypeVar("T")


class ShortAnswer(OSError):
    """A server sent fewer or more bytes than were asked for."""


class StatusError(OSError):
    """A server answered with an HTTP status that is an error."""

    def __init__(self, status: int, reason: str | None) -> None:
        super().__init__(f"HTTP {status} {reason or ''}".strip())
        self.status = status


def retrying(location: str, access: Access, attempt: Callable[[], T]) -> T:
    """What `attempt` returns, called again while it fails for reasons that can pass.

    Raises:
        FileMissing: the file does not exist or may not be read.
        OutageError: all attempts failed, because the server cannot be reached or is not well.
        DataError: another failure that will not pass, or all attempts failed; names the file and the reason.
    """
    for failures in range(1, access.num_retries + 2):
        try:
            return attempt()
        except UserError:
            raise
        except Exception as error:
            _raise_if_permanent(location, error)
            reason, kind = reason_of(error), OutageError if is_outage(error) else DataError
        if failures > _UNMENTIONED and failures <= access.num_retries:
            log.warning("'%s': attempt %d of %d failed: %s", shown(location), failures, access.num_retries + 1, reason)
        if failures <= access.num_retries:
            time.sleep(wait_s(failures))
    raise kind(f"'{shown(location)}' cannot be read: {failures} attempts failed, the last one with: {reason}")


def wait_s(failures: int) -> float:
    """Time between the failure with this number, from 1 on, and the next attempt [s]: exponential, random by half."""
    longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (failures - 1))
    return longest * _jitter.uniform(0.5, 1.0)


def reason_of(error: BaseException) -> str:
    """One line about a failure, without secrets."""
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return "no answer in time"
    text = without_secrets(" ".join(str(error).split()))[:300]
    name = type(error).__name__
    return text if isinstance(error, (ShortAnswer, StatusError)) else f"{name}: {text}" if text else name


def _raise_if_permanent(location: str, error: Exception) -> None:
    """Errors are raised without their cause: libraries put whole URLs, secrets and all, into theirs."""
    status = status_of(error)
    if status in (412, 416):
        raise DataError(f"'{shown(location)}' has changed since it was indexed; start again to index it anew") from None
    said = _MISSING_STATUS.get(status or 0)
    if status is None and isinstance(error, FileNotFoundError):
        said = "does not exist"
    if status is None and (isinstance(error, PermissionError) or str(error).startswith("Forbidden")):  # gcsfs
        said = "not allowed"
    if said:
        details = "" if said == "does not exist" else f": {reason_of(error)}; are the credentials right?"
        raise FileMissing(f"'{shown(location)}' cannot be read: {said}{details}") from None
    if not is_transient(error, status):
        raise DataError(f"'{shown(location)}' cannot be read: {reason_of(error)}") from None


def is_transient(error: Exception, status: int | None) -> bool:
    """Whether the same request may succeed later. Errors that are nobody's network, such as TypeError, are not."""
    if status is not None:
        return status in _TRANSIENT_STATUS or isinstance(error, TimeoutError)  # S3 sends RequestTimeout with 400
    if isinstance(error, OSError):
        return error.errno not in _DISK
    if isinstance(error, (asyncio.TimeoutError, EOFError)):
        return True
    kinds = type(error).__mro__
    if kinds[0].__module__.startswith(("botocore", "aiobotocore")):
        return any(kind.__name__ in _BOTOCORE_TRANSIENT for kind in kinds)
    return kinds[0].__module__.split(".")[0] in _LIBRARIES


def is_outage(error: BaseException) -> bool:
    """Whether the server cannot be reached or is not well, so that another start may succeed. Of the other failures
    that are tried again (short answers, commands that fail) nobody knows."""
    status = status_of(error)
    if status is not None:
        return status in _TRANSIENT_STATUS
    kinds = {kind.__name__ for one in _chain(error) for kind in type(one).__mro__}
    return bool(kinds & _UNREACHABLE) and not kinds & _DISTRUSTED


def status_of(error: BaseException) -> int | None:
    """HTTP status of a failure, from whichever library it comes; None when no server answered."""
    for one in _chain(error):
        kinds = {kind.__name__ for kind in type(one).__mro__}
        status: Any = None  # by name: aiohttp also gives statuses to its own complaints about broken answers
        if kinds & {"StatusError", "ClientResponseError"}:
            status = getattr(one, "status", None)
        elif "HttpError" in kinds:  # gcsfs
            status = getattr(one, "code", None)
        elif isinstance(response := getattr(one, "response", None), dict):  # botocore; s3fs makes it a cause
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if str(status).isdigit() and 100 <= int(status) < 600:
            return int(status)
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
