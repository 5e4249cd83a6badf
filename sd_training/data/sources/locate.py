"""`dataset.params.path` → the list of shard files: files, folders, globs, braces, URLs, commands."""

import glob
import os
import re
from collections.abc import Sequence
from itertools import islice

import braceexpand

from sd_training.config.plan import counted
from sd_training.data.storage.byte_file import Access
from sd_training.data.storage.locations import (
    PIPE,
    entries_of,
    exists,
    expand,
    is_remote,
    local_path,
    protocol_of,
    shown,
)
from sd_training.data.storage.remote import list_folder, list_matches
from sd_training.errors import DataError
from sd_training.log import get_logger

log = get_logger(__name__)

MAX_SHARDS = 1_000_000
_FOLDERS_SEARCHED, _FILES_SEARCHED = 100, 1_000


def expand_shards(
    path: str | Sequence[str], access: Access, allow_pipe: bool = False, extensions: Sequence[str] = (".tar",)
) -> list[str]:
    """Expands a file, folder, glob, brace pattern such as `{000..999}`, or a list of these, local or remote.

    Local files must exist. Remote ones are listed only for globs and folders; whether the files that a URL or its
    braces name exist is found when they are first read.

    Args:
        path: one entry or several.
        access: how remote storage is read.
        allow_pipe: whether `pipe:` entries are returned, one per command that their braces stand for; otherwise they
            are an error.
        extensions: which files of a folder are taken.

    Returns:
        Absolute paths and URLs in the order written, folders and globs sorted, each once.

    Raises:
        DataError: a file is missing, or a pattern matches nothing.
        ConfigError: a protocol is not known.
    """
    entries = [path] if isinstance(path, str) else list(path)
    if not entries:
        raise DataError("dataset.params.path: the list is empty; name at least one shard")
    found: list[str] = []
    for entry in entries:
        if entry.startswith(PIPE):
            if not allow_pipe:
                raise DataError(
                    f"dataset.params.path: '{shown(entry)}' is a shell command; such entries are run only with "
                    "dataset.params.allow_pipe=true, and only if you trust them"
                )
            found += _braces(entry, entry)
        elif is_remote(entry):
            found += [shard for name in _braces(entry, entry) for shard in _remote(name, access, tuple(extensions))]
        else:
            found += _local(entry, tuple(extensions))
    unique = list(dict.fromkeys(found))
    if len(unique) < len(found):
        log.info("dataset.params.path names %d shards more than once; each is read once", len(found) - len(unique))
    return unique


def _local(entry: str, extensions: tuple[str, ...]) -> list[str]:
    path = local_path(entry)
    if exists(path):
        return _files_of(path, extensions)
    shards, missing = list[str](), list[str]()
    for name in _braces(entry, path):
        matches = expand(name) if glob.has_magic(name) and not exists(name) else [name]
        if matches and exists(matches[0]):
            shards += [shard for match in matches for shard in _files_of(match, extensions)]
        else:
            missing.append(name)
    if not missing:
        return shards
    first = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
    if shards:
        verb = "is" if len(missing) == 1 else "are"
        what = f"{counted(len(missing), 'file')} of the pattern '{entry}' {verb} missing: {first}"
    elif len(missing) > 1:
        what = f"the pattern '{entry}' stands for {len(missing):,} files and none exists: {first}"
    else:
        state = "matches no file" if glob.has_magic(missing[0]) else "does not exist"
        what = f"'{entry}' {state} (looked for {first})"
    raise DataError(f"dataset.params.path: {what}")


def _files_of(path: str, extensions: tuple[str, ...]) -> list[str]:
    """The file, or the files directly in a folder; hidden ones are left out (macOS writes `._0.tar`)."""
    if not os.path.isdir(path):
        return [path]

    def is_shard(entry: os.DirEntry[str]) -> bool:
        return not entry.name.startswith(".") and entry.name.lower().endswith(extensions) and not entry.is_dir()

    entries = entries_of(path)
    # Only some of them are searched, because there may be a million images beside a table.
    for folder in islice(filter(os.DirEntry.is_dir, entries), _FOLDERS_SEARCHED):
        try:
            with os.scandir(folder.path) as below:
                has_shards = any(map(is_shard, islice(below, _FILES_SEARCHED)))
        except OSError:  # not part of what was asked for: `lost+found`
            continue
        if has_shards:
            raise DataError(
                f"dataset.params.path: '{path}' has {_kinds(extensions)} files in folders below it, such as "
                f"'{folder.path}'; only files directly in a folder are read. Write '{path}/*{extensions[0]}', "
                f"'{path}/*/*{extensions[0]}', or a list of both"
            )
    return _filled(path, [entry.path for entry in entries if is_shard(entry)], extensions)


def _remote(url: str, access: Access, extensions: tuple[str, ...]) -> list[str]:
    if _has_magic(url):
        if not (matches := list_matches(url, access)):
            raise DataError(f"dataset.params.path: '{shown(url)}' matches no file")
        return matches
    if url.lower().endswith(extensions):
        return [url]
    files = list_folder(url, access, extensions)
    if files is None and url.endswith("/"):
        raise DataError(f"dataset.params.path: the folder '{shown(url)}' does not exist")
    return [url] if files is None else _filled(shown(url), files, extensions)


def _has_magic(url: str) -> bool:
    """The query of a web address begins with `?`, and an address in brackets is a host."""
    if protocol_of(url) in ("http", "https"):
        return re.search(r"[*\[]", url.partition("://")[2].partition("/")[2].partition("?")[0]) is not None
    return glob.has_magic(url)


def _filled(folder: str, files: list[str], extensions: tuple[str, ...]) -> list[str]:
    if not files:
        raise DataError(f"dataset.params.path: the folder '{folder}' holds no {_kinds(extensions)} file")
    return files


def _kinds(extensions: tuple[str, ...]) -> str:
    return f"*{' or *'.join(extensions)}"


def _braces(entry: str, pattern: str) -> list[str]:
    try:
        is_command = entry.startswith(PIPE)  # where a backslash is the shell's
        names = list(islice(braceexpand.braceexpand(pattern, escape=not is_command), MAX_SHARDS + 1))
    except ValueError:
        raise DataError(
            f"dataset.params.path: the braces of '{shown(entry)}' cannot be expanded; is one missing?"
        ) from None
    if len(names) > MAX_SHARDS:
        raise DataError(f"dataset.params.path: '{shown(entry)}' stands for more than {MAX_SHARDS:,} files")
    return names
