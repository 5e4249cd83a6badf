"""Folders and files that a run or a script writes: local paths, with `~` and `$NAME` expanded once, here.

Nothing else expands them: libraries that do so on their own would put a part of a run elsewhere. A configuration file
may come from somebody else, so a variable whose name says that it holds a secret is never read.
"""

import argparse
import os
import re
from pathlib import Path

from sd_training.log import is_secret_name

_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})", re.ASCII)
"""As `os.path.expandvars` finds them."""
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:/|://")
"""Also with one slash, as `Path` would write it, and after a folder that was put before it."""


def output_problem(text: str) -> str:
    """Why `text` cannot be a local path to write to, for a sentence that names the option; empty when it can."""
    for name in (first or second for first, second in _VARIABLE.findall(text)):
        if is_secret_name(name):
            return f"{text!r} names ${name}, which may hold a secret; no path may be made of it"
        if not os.environ.get(name):
            return f"{text!r} names ${name}, which is not set in the environment"
    expanded = os.path.expandvars(text)
    if "$" in expanded:
        return f"{text!r} is {expanded!r} with its variables; a path here cannot have a $"
    if is_url(expanded):
        remedy = "; write the path without file:" if expanded.startswith("file:") else ""
        return f"{text!r} is a URL, and files are written to local or mounted folders only{remedy}"
    try:
        Path(expanded).expanduser()
    except RuntimeError:
        return f"{text!r} begins with ~ and a user that this machine does not know"
    return ""


def is_url(text: str) -> bool:
    """Whether a path to write to, with its variables expanded, is the URL of another place."""
    return _URL.search(os.path.expandvars(text)) is not None


def output_path(text: str) -> Path:
    """The path that an option names, after `output_problem` found nothing."""
    return Path(os.path.expandvars(text)).expanduser()


def path_argument(text: str) -> Path:
    """Type of a command's argument that names a file or folder to write.

    Raises:
        argparse.ArgumentTypeError: it is no local path.
    """
    if problem := output_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return output_path(text)
