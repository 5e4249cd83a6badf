"""Masks secrets in everything that is printed or written: log lines, tracebacks, the dumped configuration, commands.

Four kinds of secrets are known: values of environment variables whose name looks like a secret's, texts registered
with `note_secret` (`wandb.api_key`), user, password and query of URLs, and what an HTTP `Authorization` header holds.
Anything else is shown as it stands.
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
"""A shorter value of the environment is not masked; masking `1` or `true` everywhere would hide the message."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}://)(?:[^\s/'\"<>]*@)?([^\s'\"<>?]*)(\?[^\s'\"<>]*)?")
"""A password may contain an `@`: everything before the last one is user and password."""
_AUTHORIZATION = re.compile(r"(?i)(\bauthorization[ \t]{0,9}:[ \t]{0,9})(?:[a-z]+[ \t]+)?[^\s'\"]+")
_WITHOUT_QUERY = ("s3://", "gs://")
"""In these `?` is part of a name, or a wildcard."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_noted: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether an environment variable is named like a secret."""
    return _SECRET_NAME.search(name) is not None


def note_secret(text: str | None) -> None:
    """Masks this text from now on, in this process."""
    if text:
        _noted.add(text)


def redacted(text: str) -> str:
    """`text` without secrets."""
    named = (value for name, value in os.environ.items() if is_secret_name(name))
    secrets = {*_noted, *(value for value in named if len(value) >= _MIN_CHARACTERS)}
    for secret in sorted(secrets, key=len, reverse=True):  # one may be part of another
        text = text.replace(secret, HIDDEN)
    return _AUTHORIZATION.sub(rf"\1{HIDDEN}", _URL.sub(_without_credentials, text))


def _without_credentials(url: re.Match[str]) -> str:
    scheme, rest, query = url[1], url[2], url[3] or ""
    return f"{scheme}{rest}{f'?{HIDDEN}' if query and not scheme.lower().startswith(_WITHOUT_QUERY) else query}"


def redacted_values(value: Any) -> Any:
    """Containers with `redacted` keys and texts. JSON is redacted before it is encoded: encoding escapes characters."""
    if isinstance(value, dict):
        return {redacted_values(key): redacted_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted_values(item) for item in value]
    return redacted(value) if isinstance(value, str) else value


def for_terminal(text: str) -> str:
    """`redacted`, with control characters and marks of writing direction escaped; newlines and tabs stay."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", redacted(text))


def hide_in_tracebacks() -> None:
    """From now on tracebacks of this process, and of its threads, are printed without secrets."""
    sys.excepthook = _print_traceback
    threading.excepthook = lambda found: _print_traceback(
        found.exc_type, found.exc_value or found.exc_type(), found.exc_traceback
    )


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(for_terminal("".join(traceback.format_exception(kind, error, trace))))
