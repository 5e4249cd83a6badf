"""Options → sources: which class reads which `dataset.type`, which files `dataset.params.path` names (files, folders,
globs, braces, URLs, commands), and which type local files look like."""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import braceexpand

from sd_training.config.data_schema import RemoteConfig, SourceParams
from sd_training.config.paths import output_path
from sd_training.data.sources.arrow import ArrowSource
from sd_training.data.sources.base import Source
from sd_training.data.sources.files import IMAGE_SUFFIXES, FolderSource
from sd_training.data.sources.table import TABLE_EXTENSIONS, TableSource
from sd_training.data.sources.tags import TagSource
from sd_training.data.sources.tar import TarSource
from sd_training.data.storage.byte_file import Access
from sd_training.data.storage.files import expand, list_folder
from sd_training.data.storage.locations import (
    HUB,
    PIPE,
    exists,
    is_remote,
    local_path,
    protocol_of,
    shown,
)
from sd_training.errors import DataError, UserError

SHARD_NOUNS = {
    "Parquet": "file",
    "HuggingFace": "file",
    "Table": "table",
    "ImageFolder": "folder",
    "TagFolder": "folder",
}
"""`dataset.type` → what its shards are called in reports, where that is not `shard`."""
MAX_SHARDS = 1_000_000
_TARS = ("WebDataset", "ClassificationWebDataset")
_FOLDERS = ("ImageFolder", "TagFolder", "HuggingFace")
"""Types whose paths are folders."""
_ENTRIES_SEARCHED, _FOLDERS_SEARCHED, _NAMES_SEARCHED = 1_000, 20, 1_000
"""Limits of the check before anything is indexed; the index reads all of them."""


def access_of(remote: RemoteConfig) -> Access:
    """How remote files are read."""
    folder = None if remote.cache_dir is None else output_path(remote.cache_dir)
    return Access(remote.mode, folder, remote.cache_gib, remote.num_retries, remote.timeout_s)


def make_source(kind: str, params: SourceParams, access: Access) -> Source:
    """The source that `dataset.type` names.

    Raises:
        ConfigError, DataError: `dataset.params.path` cannot be expanded, or another option has no meaning.
    """
    columns, paths = (params.image_column, params.caption_column), _entries(params.path)
    match kind:
        case "Parquet":
            return ArrowSource(expand_shards(paths, access, extensions=(".parquet",)), access, *columns)
        case "HuggingFace":
            return ArrowSource(paths, access, *columns, saved=True)
        case "Table":
            return TableSource(expand_shards(paths, access, extensions=TABLE_EXTENSIONS), access, *columns)
        case "ImageFolder":
            return FolderSource(paths)
        case "TagFolder":
            return TagSource(paths, access, params.tags)
        case "WebDataset" | "ClassificationWebDataset":
            return TarSource(expand_shards(paths, access, allow_pipe=params.allow_pipe), access)
        case _:
            raise ValueError(f"dataset.type {kind!r} has no source")


def _entries(path: str | Sequence[str]) -> list[str]:
    return [path] if isinstance(path, str) else list(path)


# --- Which files a path names ---


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
    if not path:
        raise DataError("dataset.params.path: is empty; name at least one shard")
    found: list[str] = []
    for entry in _entries(path):
        if not entry.startswith(PIPE):
            found += _shards_of(entry, access, tuple(extensions))
        elif allow_pipe:
            found += _braces(entry, entry)
        else:
            raise DataError(
                f"dataset.params.path: '{shown(entry)}' is a shell command; such entries are run only with "
                "dataset.params.allow_pipe=true, and only if you trust them"
            )
    return list(dict.fromkeys(found))


def _shards_of(entry: str, access: Access, extensions: tuple[str, ...]) -> list[str]:
    remote = is_remote(entry)
    path = entry if remote else local_path(entry)
    shards, missing = list[str](), list[str]()
    for name in [path] if not remote and exists(path) else _braces(entry, path):
        if _has_magic(name) and (remote or not exists(name)):
            matches = expand(name, access)
        else:
            matches = [name] if remote or exists(name) else []
        shards += [shard for match in matches for shard in _files_of(match, access, extensions)]
        missing += [] if matches else [name]
    if missing:
        state = "matches no file" if _has_magic(missing[0]) else "does not exist"
        more = f", nor do {len(missing) - 1:,} more files of the pattern" if len(missing) > 1 else ""
        first = "" if missing[0] == path else f": {shown(missing[0])}"
        raise DataError(f"dataset.params.path: '{shown(entry)}'{first} {state}{more}")
    return shards


def _files_of(location: str, access: Access, extensions: tuple[str, ...]) -> list[str]:
    """The file, or the files directly in a folder; hidden ones are left out (macOS writes `._0.tar`)."""
    if is_remote(location):
        is_web = protocol_of(location) in ("http", "https")
        if location.lower().endswith(extensions) or (is_web and not location.endswith("/")):
            return [location]
        files, folders = list_folder(location, access)
        if not files and not folders:
            if location.endswith("/"):
                raise DataError(f"dataset.params.path: the folder '{shown(location)}' does not exist")
            return [location]
    elif os.path.isdir(location):
        files, _ = list_folder(location, access)
    else:
        return [location]
    if shards := [file for file in files if file.lower().endswith(extensions)]:
        return shards
    kinds = " or *".join(extensions)
    raise DataError(
        f"dataset.params.path: the folder '{shown(location)}' holds no *{kinds} file (of folders below it, write "
        f"'{shown(location)}/*/*{extensions[0]}')"
    )


def _has_magic(url: str) -> bool:
    """The query of a web address begins with `?`, and an address in brackets is a host."""
    if protocol_of(url) in ("http", "https"):
        return re.search(r"[*\[]", url.partition("://")[2].partition("/")[2].partition("?")[0]) is not None
    return glob.has_magic(url)


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


# --- What local files look like ---


def path_problems(kind: str, params: SourceParams, access: Access) -> list[str]:
    """Local paths that do not exist or hold nothing of their kind, one sentence each; no file is opened.

    Remote paths, commands and patterns of very many names are left to the index.
    """
    problems = []
    for path in _entries(params.path):
        try:
            if not _is_local(path) or _is_long(path):
                continue
            local = local_path(path)
            if kind in _FOLDERS and not os.path.isdir(local):
                state = "is no folder" if os.path.exists(local) else "does not exist"
                hint = fitting_type(kind, path)
                problems.append(f"dataset.params.path: '{path}' {state}; {kind} reads folders{hint}")
            elif kind not in _FOLDERS:
                make_source(kind, replace(params, path=path), access)
                if os.path.isfile(local) and (hint := fitting_type(kind, path)):
                    problems.append(f"dataset.params.path: '{path}' is no {kind} data{hint}")
        except UserError as error:
            problems.append(f"{error}{fitting_type(kind, path)}")
    return problems


def _is_local(path: str) -> bool:
    return not path.startswith((PIPE, HUB)) and not is_remote(path)


def _is_long(path: str) -> bool:
    try:
        return len(list(islice(braceexpand.braceexpand(path), _NAMES_SEARCHED + 1))) > _NAMES_SEARCHED
    except ValueError:  # reported where the pattern is expanded
        return False


def fitting_type(kind: str, path: str | list[str]) -> str:
    """The end of an error about data that is read as `kind`: which `dataset.type` the local files look like; empty when
    they look like `kind` or like none."""
    for entry in _entries(path):
        if not _is_local(entry) or not os.path.exists(local := local_path(entry)):
            continue
        types = _types_of([os.path.basename(local)] if os.path.isfile(local) else _some_names(local))
        if types and not ({kind} if kind not in _TARS else set(_TARS)) & types.keys():
            fitting, name = next(iter(types.items()))
            return f"; '{entry}' holds {name}, which dataset.type={fitting} reads"
    return ""


def _some_names(root: str) -> list[str]:
    """Paths of files in a folder and the first folders directly below it, some of many, without hidden ones."""
    names: list[str] = []
    for folder, below, files in islice(os.walk(root), _FOLDERS_SEARCHED):
        visible = sorted(name for name in files if not name.startswith("."))[:_ENTRIES_SEARCHED]
        names += [os.path.relpath(os.path.join(folder, name), root) for name in visible]
        below[:] = sorted(name for name in below if not name.startswith(".")) if folder == root else []
    return names


def _types_of(names: list[str]) -> dict[str, str]:
    """`dataset.type` → a file that shows it, the most telling first."""
    types: dict[str, str] = {}
    for name in names:
        if os.path.basename(name) in ("state.json", "dataset_dict.json"):
            types.setdefault("HuggingFace", name)
        elif name.startswith("metadata/") and name.endswith(".json"):
            types.setdefault("TagFolder", name)
    for kind, ends in {"WebDataset": (".tar",), "Parquet": (".parquet",), "Table": TABLE_EXTENSIONS}.items():
        if found := [name for name in names if name.lower().endswith(ends)]:
            types[kind] = found[0]
    images = [name for name in names if name.lower().endswith(IMAGE_SUFFIXES)]
    # Images beside a table are those that it names, unless they have captions of their own.
    if images and ("Table" not in types or any(name.endswith(".txt") for name in names)):
        types["ImageFolder"] = images[0]
    return types
