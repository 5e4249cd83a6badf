import errno
from collections.abc import Callable

import aiohttp
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, FlexibleChecksumError, NoCredentialsError
from s3fs.errors import translate_boto_error

from sd_training.data import retries
from sd_training.data.byte_files import Access, FileMissing
from sd_training.data.retries import ShortAnswer, StatusError, retrying, wait_s
from sd_training.errors import ConfigError, DataError
from sd_training.exit_status import MISTAKE, STOPPED

LOCATION = "https://me:word@host/a.tar?sig=xyz"


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.001)


def failing(error: Exception, times: int) -> tuple[Callable[[], str], list[int]]:
    calls: list[int] = []

    def attempt() -> str:
        calls.append(len(calls))
        if len(calls) <= times:
            raise error
        return "answer"

    return attempt, calls


def of_s3(code: str, status: int) -> Exception:
    answer = {"Error": {"Code": code, "Message": "said"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate_boto_error(ClientError(answer, "GetObject"))


TRANSIENT = [
    ShortAnswer("3 bytes"),
    StatusError(503, "Busy"),
    StatusError(429, "Too Many"),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    TimeoutError(),
    aiohttp.ClientPayloadError("ended early"),
    aiohttp.ServerDisconnectedError(),
    EndpointConnectionError(endpoint_url="http://x"),
    FlexibleChecksumError(error_msg="expected a, got b"),
    of_s3("SlowDown", 503),
    of_s3("InternalError", 500),
    of_s3("RequestTimeout", 400),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_what_can_pass_is_tried_again(error: Exception) -> None:
    attempt, calls = failing(error, 3)
    assert retrying(LOCATION, Access(num_retries=3), attempt) == "answer"
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("error", "is_away"),
    [
        (StatusError(503, "Busy"), True),
        (of_s3("SlowDown", 503), True),
        (TimeoutError(), True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (aiohttp.ServerDisconnectedError(), True),
        (EndpointConnectionError(endpoint_url="http://x"), True),
        (ShortAnswer("3 bytes"), False),
        (OSError("exit status 1"), False),  # of a command
        (OSError(errno.EIO, "Input/output error"), False),
    ],
    ids=repr,
)
def test_an_outage_asks_for_another_start(error: Exception, is_away: bool) -> None:
    attempt, _ = failing(error, 99)
    with pytest.raises(DataError, match="2 attempts failed") as raised:
        retrying(LOCATION, Access(num_retries=1), attempt)
    assert raised.value.exit_status == (STOPPED if is_away else MISTAKE)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (FileNotFoundError("x"), FileMissing, "does not exist"),
        (StatusError(404, "Not Found"), FileMissing, "does not exist"),
        (StatusError(403, "Forbidden"), FileMissing, "not allowed"),
        (PermissionError("x"), FileMissing, "not allowed"),
        (of_s3("NoSuchKey", 404), FileMissing, "does not exist"),
        (of_s3("AccessDenied", 403), FileMissing, "credentials"),
        (of_s3("PreconditionFailed", 412), DataError, "has changed since it was indexed"),
        (StatusError(416, "Range"), DataError, "has changed since it was indexed"),
        (StatusError(400, "Bad Request"), DataError, "HTTP 400 Bad Request"),
        (NoCredentialsError(), DataError, "Unable to locate credentials"),
        (OSError(errno.ENOSPC, "No space left"), DataError, "No space left"),
        (TypeError("a mistake"), DataError, "TypeError: a mistake"),
        (ConfigError("as it is"), ConfigError, "as it is"),
    ],
    ids=repr,
)
def test_what_cannot_pass_is_told_at_once(error: Exception, kind: type[Exception], said: str) -> None:
    attempt, calls = failing(error, 1)
    with pytest.raises(kind, match=said) as raised:
        retrying(LOCATION, Access(), attempt)
    assert type(raised.value) is kind and len(calls) == 1
    if kind is not ConfigError:
        assert "https://host/a.tar" in str(raised.value)


def test_the_last_reason_is_told_without_secrets() -> None:
    attempt, calls = failing(aiohttp.ClientConnectionError(f"no way to {LOCATION}"), 99)
    with pytest.raises(
        DataError, match=r"'https://host/a\.tar'.*3 attempts failed.*no way to https://host/a\.tar$"
    ) as e:
        retrying(LOCATION, Access(num_retries=2), attempt)
    assert len(calls) == 3 and "word" not in str(e.value) and "xyz" not in str(e.value)
    assert e.value.__suppress_context__ or e.value.__context__ is None


def test_waits_double_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_WAIT_S", 0.2)
    for failures, longest in [(1, 0.2), (2, 0.4), (5, 3.2), (60, 20.0)]:
        waits = [wait_s(failures) for _ in range(50)]
        assert longest / 2 <= min(waits) < max(waits) <= longest
