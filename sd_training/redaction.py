"""Secrets out of everything that is printed or written: messages, tracebacks, the dumped configuration, commands.

Known secrets are what the configuration holds as one, and every variable of the environment whose name says so. What
cannot be known is told by its place: user, password and query of a URL, values of `token=`, `password:` and so on.

Secrets out of shell commands, wherever one is quoted: options, headers, variables. A part of `redaction`.
"""

import os
import re
import sys
import threading
import traceback
from types import TracebackType
from typing import Any

KEYS = (
    r"(?:api|access|account|secret|auth|private|shared|storage|subscription|signing|encryption|master|client|service|"
    r"functions)[-_]?key(?:[-_]?id)?"
)
"""A key alone is no secret: samples and tables have keys as well."""
_VALUE = r"(?:(\\?[\"'])[^\n]{0,4000}?(?<!\\)\2|(?:[^\s'\"\\]|\\[^'\"\n])+|\S+)"
"""A word of a command, or a quoted one, which may itself be a part of JSON."""
_NAMES = (
    rf"(?:password|passwd|passphrase|(?:^|(?<=[^a-z]))(?:pass|pwd|auth|sas|authorization|bearer|cookies?|signature)|"
    rf"token|secret|credentials?|connection[-_]?string|{KEYS})"
)
_OPTION = re.compile(
    rf"(?i)((?<![\w-])--?(?=[a-z])[\w.-]{{0,60}}?{_NAMES}(?:=|\s{{1,9}}(?!--[a-z]|-[a-z](?:\s|$)|[|<>&;])))(?![\s=]){_VALUE}"
)
"""`--db-password x`, `--api-key=x`; not an option that is followed by another one, or by the end of the command."""
_GIVEN = r"(?:[^\n|;]{0,200}?\s)??"
_OPTION_OF_TOOL = re.compile(
    rf"(\b(?:sshpass\s{_GIVEN}-p\s*|(?:mysql|mariadb)[\w-]{{0,20}}\s{_GIVEN}-p|7z[ar]?\s{_GIVEN}-p|unzip\s{_GIVEN}-P\s*|"
    rf"openssl\s{_GIVEN}-[kK]\s+|curl\s{_GIVEN}-b\s+(?=[^\s=]{{1,100}}=)))(?=\S){_VALUE}"
)
_PASS_OF_OPENSSL = re.compile(rf"((?<![\w-])-pass(?:in|out)\s+(?=\\?[\"']?pass:)){_VALUE}")
_USER = re.compile(
    r"(\s(?:-[A-Za-z]{0,20}[uU]\s+|-[uU](?=[^\s:]{0,99}:)|--(?:proxy-)?user[\s=]+))"
    r"(?:(\\?[\"'])[^\n]{0,300}?\2|[^\s'\"\\]+|\S+)"
)
"""How curl is given a user and a password."""
_TOOLS_WITH_USERS = ("curl", "lftp", "smbclient")
_HEADER = re.compile(
    r"(?i)((?<![\w-])(?:-H|--header)[\s=]{0,9}(\\?[\"'])?[\w-]{0,60}?(?:key|token|secret|auth|cookie|pass|sign|session|"
    r"credential)[\w-]{0,60}\s{0,9}:\s{0,9}(?:(?:bearer|basic|token|api-?key|negotiate)\s+)?)"
    r"((?(2)[^\n]{1,4000}?(?=\2|$)|[^\s'\"]+))",
    re.MULTILINE,
)
_COOKIE = re.compile(r"(?i)(\bcookie\\?[\"']?\s{0,9}:\s{0,9}\\?[\"']?)([^\s=;'\"\\]{1,100}=[^'\"\n\\]*)")
_VARIABLE = re.compile(
    r"((?<![A-Za-z0-9_])[A-Z0-9_]{0,60}(?:(?<![A-Z0-9])(?:KEY|PWD|PASS|TOKEN)|PASSWORD|PASSWD|PASSPHRASE|[A-Z]TOKEN|"
    r"SECRET|CREDENTIALS?)=)(?:(\\?[\"'])[^\n]{0,4000}?(?<!\\)\2|[^\s'\"\\;&|]+)"
)


def hide_in_commands(text: str, hidden: str) -> str:
    """`text` with `hidden` in place of what commands are told in secret."""
    text = _HEADER.sub(rf"\1{hidden}", text)
    if any(tool in text for tool in _TOOLS_WITH_USERS):
        text = _USER.sub(rf"\1{hidden}", text)
    for pattern in (_OPTION, _OPTION_OF_TOOL, _PASS_OF_OPENSSL, _COOKIE, _VARIABLE):
        text = pattern.sub(rf"\1{hidden}", text)
    return text


HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_MIN_CHARACTERS = 8
"""A shorter variable of the environment is no secret; hiding `1` or `true` everywhere would hide the message."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}://)(?:[^\s/'\"<>]*@)?([^\s'\"<>?]*)(\?[^\s'\"<>]*)?")
"""A password may hold an `@`: all before the last one is user and password."""
_WITHOUT_QUERY = ("s3://", "gs://")
"""There `?` is a part of a name, or a wildcard."""
_NAME = (
    rf"(?:{KEYS}|password|passwd|passphrase|authorization|"
    r"(?<![A-Za-z])(?:security|auth|access|refresh|private|session|id|api|hf|hub|github|gitlab)[-_]?token)"
)
"""What stands after such a name and a colon is a secret."""
_WORD_NAME = r"(?<![A-Za-z])(?:token|secret)"
"""Words of ordinary sentences, too."""
_WORD_START = r"(?:(?<![A-Za-z])|(?-i:(?<=[a-z0-9])(?=[A-Z])))"
"""Also `clientSecret`."""
_COLON = r"\\?[\"']?[ \t]{0,9}:[ \t]{0,9}"
_WORD = r"[^\s&'\",;(){}\[\]\\]"
_QUOTED = re.compile(
    rf"(?i)((?:{_NAME}{_COLON}|{_WORD_NAME}\\?[\"'][ \t]{{0,9}}:[ \t]{{0,9}})\\?[\"'])([^\"'\\\n(][^\"'\\\n]*)"
)
_LAST_WORD = re.compile(rf"(?i)({_NAME}{_COLON})({_WORD}+)(?=[ \t]{{0,9}}(?:$|[\r\n&'\",;)\]}}\\]))")
"""`password: x` and then an end; `api_key: is required` goes on."""
_RANDOM_WORD = re.compile(
    rf"(?i)((?:{_NAME}|{_WORD_NAME}){_COLON})((?={_WORD}{{0,99}}\d)(?={_WORD}{{0,99}}[a-z]){_WORD}{{8,}})"
)
_ASSIGNED = re.compile(
    rf"(?i)((?:{KEYS}|password|passwd|passphrase|signature|{_WORD_START}(?:token|secret|sig|j?session[-_]?id))"
    r"(?:\s*=\s*|\\?[\"']\s*:\s*)\\?[\"']?|\bbearer\s+|\bbasic\s+(?=[A-Za-z0-9+/=]{8})|"
    r"\bauthorization\\?[\"']?\s*[:=]\s*\\?[\"']?(?:token|api-?key|negotiate)\s+)([^\s&'\",;(][^\s&'\",;]*)"
)
_SECRET_KEY = re.compile(rf"(?i).*(?:{_NAME}|{_WORD_NAME}|(?<![A-Za-z])cookie)")
_NO_VALUES = ("null", "None", "…", "true", "false", "True", "False")
_COUNT = re.compile(r"token.*:.*", re.IGNORECASE | re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d{1,3}(?:[\d.,]{0,8}\d)?")
"""`token: 77` counts tokens."""
_SHAPED = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|A[KS]IA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|"
    r"glpat-[A-Za-z0-9_-]{20,})\b"
)
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
    text = hide_in_commands(text, HIDDEN)
    for pattern in (_QUOTED, _LAST_WORD, _RANDOM_WORD, _ASSIGNED):
        text = pattern.sub(_without_value, text)
    return text


def is_secret(key: Any, value: Any) -> bool:
    """Whether an entry of a container has the name of a secret, and a text that may be one."""
    if not (isinstance(key, str) and isinstance(value, str)):
        return False
    return bool(value) and value not in _NO_VALUES and _SECRET_KEY.fullmatch(key) is not None


def redacted_values(value: Any) -> Any:
    """Containers whose keys and texts are `redacted`. A text that becomes JSON is redacted before: JSON escapes."""
    if isinstance(value, dict):
        return {
            redacted(key) if isinstance(key, str) else key: HIDDEN if is_secret(key, item) else redacted_values(item)
            for key, item in value.items()
        }
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


def is_secret_name(name: str) -> bool:
    """Whether a variable of the environment is named like a secret."""
    return _SECRET_NAME.search(name) is not None


def _secrets() -> list[str]:
    """Longest first: one may be a part of another."""
    named = (value for name, value in os.environ.items() if is_secret_name(name))
    found = {*_noted, *(value for value in named if len(value) >= _MIN_CHARACTERS)}
    return sorted(found, key=len, reverse=True)


def _without_value(found: re.Match[str]) -> str:
    name, value = found[1], found[2]
    is_count = _COUNT.search(name) and _NUMBER.fullmatch(value)
    return found[0] if value in _NO_VALUES or is_count else name + HIDDEN


def _plain_url(found: re.Match[str]) -> str:
    scheme, rest, query = found[1], found[2], found[3] or ""
    if query and not scheme.lower().startswith(_WITHOUT_QUERY):
        query = f"?{HIDDEN}"
    return f"{scheme}{rest}{query}"
