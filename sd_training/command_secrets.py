"""Secrets out of shell commands, wherever one is quoted: options, headers, variables. A part of `redaction`."""

import re

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
