"""`dataset.params.path` → the list of shard files."""

import glob
import os
import re
from collections.abc import Sequence
from itertools import islice

import braceexpand

from sd_training.config.batch_plan import counted
from sd_training.data.byte_files import Access
from sd_training.data.local_listings import entries_of, exists, expand
from sd_training.data.locations import is_remote, local_path, protocol_of, shown
from sd_training.errors import DataError
from sd_training.rank_log import get_logger

log = get_logger(__name__)

MAX_SHARDS = 1_000_000
_FOLDERS_LOOKED_AT, _FILES_LOOKED_AT = 100, 1_000
PIPE = "pipe:"
"""Start of an entry that is a shell command."""


def expand_shards(
    path: str | Sequence[str], access: Access, allow_pipe: bool = False, extensions: Sequence[str] = (".tar",)
) -> list[str]:
    """Expands a file, folder, glob, brace pattern such as `{000..999}`, or a list of these, local or remote.

    Local files are looked for. Remote ones are listed only for globs and folders; whether the files that a URL or its
    braces name exist is found when they are first looked at.

    Args:
        path: one entry or several.
        access: how remote storage is asked.
        allow_pipe: whether `pipe:` entries are returned, one per command that their braces stand for; otherwise they
            are an error.
        extensions: which files of a folder are taken.

    Returns:
        Absolute paths and URLs in the order written, folders and globs sorted, each once.

    Raises:
        DataError: a file is missing, or a pattern matches nothing.
        ConfigError: a protocol is not known, or not installed.
    """
    written = [path] if isinstance(path, str) else list(path)
    if not written:
        raise DataError("dataset.params.path: the list is empty; name at least one shard")
    found = [shard for entry in written for shard in _expand(entry, access, allow_pipe, tuple(extensions))]
    unique = list(dict.fromkeys(found))
    if len(unique) < len(found):
        log.info("dataset.params.path names %d shards more than once; each is read once", len(found) - len(unique))
    return unique


def _expand(entry: str, access: Access, allow_pipe: bool, extensions: tuple[str, ...]) -> list[str]:
    if entry.startswith(PIPE):
        if allow_pipe:
            return _braces(entry, entry)
        raise DataError(
            f"dataset.params.path: '{shown(entry)}' is a shell command; such entries are run only with "
            "dataset.params.allow_pipe=true, and only if you trust them"
        )
    return _expand_remote(entry, access, extensions) if is_remote(entry) else _expand_local(entry, extensions)


def _expand_local(entry: str, extensions: tuple[str, ...]) -> list[str]:
    local = local_path(entry)
    if exists(local):
        return _existing(local, extensions)
    shards: list[str] = []
    missing: list[str] = []
    for name in _braces(entry, local):
        matches = expand(name) if glob.has_magic(name) and not exists(name) else [name]
        if not matches or not exists(matches[0]):
            missing.append(name)
            continue
        shards.extend(shard for match in matches for shard in _existing(match, extensions))
    if missing:
        raise DataError(_missing_message(entry, missing, len(shards)))
    return shards


def _existing(path: str, extensions: tuple[str, ...]) -> list[str]:
    """The file, or the files directly in a folder; hidden ones are not meant (macOS leaves `._0.tar`)."""
    if not os.path.isdir(path):
        return [path]
    entries = entries_of(path)
    files = [entry.path for entry in entries if _is_shard(entry, extensions)]
    if deeper := _folder_with_shards(entries, extensions):
        raise DataError(
            f"dataset.params.path: '{path}' has {_kinds(extensions)} files in folders below it, such as '{deeper}'; "
            f"only files directly in a folder are read. Write '{path}/*{extensions[0]}', '{path}/*/*{extensions[0]}', "
            "or a list of both"
        )
    return _filled(path, files, extensions)


def _is_shard(entry: os.DirEntry[str], extensions: tuple[str, ...]) -> bool:
    return not entry.name.startswith(".") and entry.name.lower().endswith(extensions) and not entry.is_dir()


def _folder_with_shards(entries: Sequence[os.DirEntry[str]], extensions: tuple[str, ...]) -> str | None:
    """The first of some folders that holds shards: a glance, because there may be a million images beside a table."""
    for folder in islice(filter(os.DirEntry.is_dir, entries), _FOLDERS_LOOKED_AT):
        try:
            with os.scandir(folder.path) as below:
                if any(_is_shard(entry, extensions) for entry in islice(below, _FILES_LOOKED_AT)):
                    return folder.path
        except OSError:  # not what is asked for: `lost+found`
            continue
    return None


def _expand_remote(entry: str, access: Access, extensions: tuple[str, ...]) -> list[str]:
    return [shard for name in _braces(entry, entry) for shard in _remote(name, access, extensions)]


def _remote(url: str, access: Access, extensions: tuple[str, ...]) -> list[str]:
    from sd_training.data.remote_files import list_folder, list_matches  # local runs need no network libraries

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


def _missing_message(entry: str, missing: list[str], num_found: int) -> str:
    first = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
    if len(missing) == 1 and not num_found:
        what = "matches no file" if glob.has_magic(missing[0]) else "does not exist"
        return f"dataset.params.path: '{entry}' {what} (looked for {first})"
    if not num_found:
        return f"dataset.params.path: the pattern '{entry}' stands for {len(missing):,} files and none exists: {first}"
    what = f"{counted(len(missing), 'file')} of the pattern '{entry}' {'is' if len(missing) == 1 else 'are'} missing"
    return f"dataset.params.path: {what}: {first}"
