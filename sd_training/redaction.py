"""Secrets out of everything that is printed or written: messages, tracebacks, the dumped configuration, commands.

Known secrets are what the configuration holds as one, and every variable of the environment whose name says so. What
cannot be known is told by its place: user, password and query of a URL, and values of `token=` and the like.
"""

import os
import re
import sys
import threading
import traceback
from types import TracebackType
from typing import Any

HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_MIN_CHARACTERS = 8
"""A shorter variable of the environment is no secret; hiding `1` or `true` everywhere would hide the message."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(?:[^\s/'\"<>@]*@)?([^\s'\"<>?]*)(\?[^\s'\"<>]*)?")
_WITHOUT_QUERY = ("s3://", "gs://")
"""There `?` is a part of a name, or a wildcard."""
_ASSIGNED = re.compile(
    r"(?i)((?<![A-Za-z])(?:api_?key|access_?key(?:_?id)?|secret_?key|token|secret|password|passwd|signature|sig)"
    r"(?:\s*=\s*|\"\s*:\s*)[\"']?|\bbearer\s+|\bbasic\s+(?=[A-Za-z0-9+/=]{8}))([^\s&'\",;(][^\s&'\",;]*)"
)
_NO_VALUES = ("null", "None", "…")
_SHAPED = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|AKIA[0-9A-Z]{16}|ghp_[A-Za-z0-9]{20,})\b")
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_noted: set[str] = set()


def note_secret(text: str | None) -> None:
    """Hides this text from now on, in this process."""
    if text:
        _noted.add(text)


def redacted(text: str) -> str:
    """`text` without secrets."""
    for secret in _secrets():
        text = text.replace(secret, HIDDEN)
    text = _SHAPED.sub(HIDDEN, _URL.sub(_plain_url, text))
    return _ASSIGNED.sub(lambda found: found[1] + (found[2] if found[2] in _NO_VALUES else HIDDEN), text)


def redacted_values(value: Any) -> Any:
    """Containers whose keys and texts are `redacted`."""
    if isinstance(value, dict):
        return {redacted(key) if isinstance(key, str) else key: redacted_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted_values(item) for item in value]
    return redacted(value) if isinstance(value, str) else value


def for_terminal(text: str) -> str:
    """`redacted`, with control characters and marks of writing direction escaped; lines and tabs stay."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", redacted(text))


def hide_in_tracebacks() -> None:
    """From now on tracebacks of this process, and of its threads, are printed without secrets."""
    sys.excepthook = _print_traceback
    threading.excepthook = lambda found: _print_traceback(
        found.exc_type, found.exc_value or found.exc_type(), found.exc_traceback
    )


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(for_terminal("".join(traceback.format_exception(kind, error, trace))))


def _secrets() -> list[str]:
    """Longest first: one may be a part of another."""
    named = (value for name, value in os.environ.items() if _SECRET_NAME.search(name))
    found = {*_noted, *(value for value in named if len(value) >= _MIN_CHARACTERS)}
    return sorted(found, key=len, reverse=True)


def _plain_url(found: re.Match[str]) -> str:
    scheme, rest, query = found[1], found[2], found[3] or ""
    if query and not scheme.lower().startswith(_WITHOUT_QUERY):
        query = f"?{HIDDEN}"
    return f"{scheme}{rest}{query}"
