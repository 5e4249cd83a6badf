"""Options → sources: which class reads which `dataset.type`, and which files `dataset.params.path` names: files,
folders, globs, braces, URLs, commands."""

import glob
import os
from collections.abc import Sequence
from itertools import islice

import braceexpand

from sd_training.config.data_schema import RemoteConfig, SourceParams, SourceType
from sd_training.data.sources.arrow import ArrowSource
from sd_training.data.sources.base import Source
from sd_training.data.sources.files import IMAGE_SUFFIXES, TABLE_EXTENSIONS, FolderSource, TableSource, TagSource
from sd_training.data.sources.synthetic import SyntheticSource
from sd_training.data.sources.tar import TarSource
from sd_training.data.storage.files import HUB, PIPE, expand, is_remote, list_folder, local_path, protocol_of, shown
from sd_training.errors import ConfigError, DataError, UserError

_NAMES_BELOW = 1000
"""Names searched in the folders of a folder."""
_FOLDERS = ("ImageFolder", "TagFolder", "HuggingFace")
"""Types whose paths are folders."""
_TYPICAL_SUFFIXES = {
    "HuggingFace": ("state.json", "dataset_dict.json"),
    "WebDataset": (".tar",),
    "Parquet": (".parquet",),
    "Table": TABLE_EXTENSIONS,
    "ImageFolder": IMAGE_SUFFIXES,
}
"""`dataset.type` → typical file name suffixes, the most specific first (images beside a table belong to it)."""


def make_source(kind: SourceType, params: SourceParams, access: RemoteConfig) -> Source:
    """The source that `dataset.type` names.

    Raises:
        ConfigError, DataError: `dataset.params.path` cannot be expanded, or another option has no meaning.
    """
    if kind == "Synthetic":
        return SyntheticSource(params.synthetic)
    columns, paths = (params.image_column, params.caption_column), _entries(params.path)
    if not paths or not all(paths):
        raise DataError("dataset.params.path: is empty; name at least one file or folder")
    if kind in _FOLDERS:
        paths = [_folder(kind, path) for path in paths]
    match kind:
        case "Parquet":
            return ArrowSource(expand_shards(paths, access, extensions=(".parquet",)), access, columns)
        case "HuggingFace":
            return ArrowSource(paths, access, columns, saved=True)
        case "Table":
            return TableSource(expand_shards(paths, access, extensions=TABLE_EXTENSIONS), access, columns)
        case "ImageFolder":
            return FolderSource(paths)
        case "TagFolder":
            return TagSource(paths, params.tags)
        case "WebDataset" | "ClassificationWebDataset":
            return TarSource(expand_shards(paths, access, allow_pipe=params.allow_pipe), access)


def path_problems(kind: SourceType, params: SourceParams, access: RemoteConfig) -> list[str]:
    """Local paths that do not exist or hold nothing of their kind, one sentence each; no file is opened. Remote paths
    and commands are left to the index."""
    problems = []
    for path in _entries(params.path) if kind != "Synthetic" else ():
        try:
            if not path.startswith((PIPE, HUB)) and not is_remote(path):
                make_source(kind, params.replace(path=path), access)
                if os.path.isfile(local_path(path)) and (hint := _fitting_type(kind, path)):
                    problems.append(f"dataset.params.path: '{path}' is no {kind} data{hint}")
        except UserError as error:
            problems.append(f"{error}{_fitting_type(kind, path)}")
    return problems


def _fitting_type(kind: str, path: str) -> str:
    """The end of an error about data that is read as `kind`: which `dataset.type` a local file or folder looks like;
    empty when it looks like `kind` or like none."""
    if not path:
        return ""
    root = local_path(path)
    names = [os.path.basename(root)] if os.path.isfile(root) else sorted(glob.glob("*", root_dir=root))
    names += sorted(islice(glob.iglob("*/*", root_dir=root), _NAMES_BELOW))
    for fitting, ends in _TYPICAL_SUFFIXES.items():
        if name := next((name for name in names if name.lower().endswith(ends)), None):
            is_read = fitting == kind or (fitting, kind) == ("WebDataset", "ClassificationWebDataset")
            return "" if is_read else f"; '{path}' holds {name}, which dataset.type={fitting} reads"
    return ""


def _entries(path: str | Sequence[str]) -> list[str]:
    return [path] if isinstance(path, str) else list(path)


def _folder(kind: str, path: str) -> str:
    """A folder as a source takes it."""
    if kind == "HuggingFace" and (path.startswith(HUB) or is_remote(path)):
        return path
    if is_remote(path):
        raise ConfigError(  # a listing and a request per image would be slower than the training
            f"dataset.params.path: '{shown(path)}' is remote, and {kind} reads folders of local disks only; pack the "
            "folder with scripts/make_webdataset.py and use dataset.type=WebDataset"
        )
    if not os.path.isdir(local_path(path)):
        state = "is no folder" if os.path.exists(local_path(path)) else "does not exist"
        raise DataError(f"dataset.params.path: '{path}' {state}; dataset.type={kind} reads folders")
    return local_path(path)


def expand_shards(
    path: str | Sequence[str], access: RemoteConfig, allow_pipe: bool = False, extensions: Sequence[str] = (".tar",)
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
        DataError: a file is missing, a pattern matches nothing, or a folder has such files also in folders below it.
        ConfigError: a protocol is not known.
    """
    found: list[str] = []
    for entry in _entries(path):
        is_command = entry.startswith(PIPE)
        if is_command and not allow_pipe:
            raise DataError(
                f"dataset.params.path: '{shown(entry)}' is a shell command; such entries are run only with "
                "dataset.params.allow_pipe=true, and only if you trust them"
            )
        try:
            pattern = entry if is_command or is_remote(entry) else local_path(entry)
            names = list(braceexpand.braceexpand(pattern, escape=not is_command))  # its backslash is the shell's
        except ValueError:
            problem = "the braces cannot be expanded; is one missing?"
            raise DataError(f"dataset.params.path: '{shown(entry)}': {problem}") from None
        for name in names:
            found += [name] if is_command else _shards_of(entry, name, access, tuple(extensions))
    return list(dict.fromkeys(found))


def _shards_of(entry: str, name: str, access: RemoteConfig, extensions: tuple[str, ...]) -> list[str]:
    """What a name that `entry` stands for means: a file, the files directly in a folder but hidden ones (macOS writes
    `._0.tar`), or those that match a pattern."""
    pattern = f"'{shown(entry)}': " if "{" in entry else ""
    where = f"dataset.params.path: {pattern}'{shown(name)}'"
    if protocol_of(name) in ("http", "https"):
        if name.endswith("/") or "*" in name.partition("?")[0]:  # `?` begins a query
            raise DataError(
                f"{where}: web servers do not list files; name them by braces, such as shards/{{000..099}}.tar, or by "
                "a list"
            )
        return [name]
    if glob.has_magic(name) and (is_remote(name) or not os.path.exists(name)):
        files, folders = expand(name, access)
        if not files and not folders:
            raise DataError(f"{where} matches no file")
    elif not is_remote(name) and not os.path.exists(name):
        raise DataError(f"{where} does not exist")
    else:
        is_file = name.lower().endswith(extensions) if is_remote(name) else not os.path.isdir(name)
        files, folders = ([name], []) if is_file else ([], [name])
    shards, is_folder = list[str](), set(folders)
    for match in sorted(files + folders):
        shards += _shards_in(match, access, extensions) if match in is_folder else [match]
    return shards


def _shards_in(folder: str, access: RemoteConfig, extensions: tuple[str, ...]) -> list[str]:
    """The shards directly in a folder. DataError where there are none, or some in folders below it, which would be left
    out."""
    files, folders = list_folder(folder.rstrip("/"), access)
    shards = [file for file in files if file.lower().endswith(extensions)]
    below = [file for inner in folders for file in _readable(inner, access) if file.lower().endswith(extensions)]
    if below or not shards:
        kinds = " or ".join(f"*{extension}" for extension in extensions)
        here, more, remedy = f"{len(shards)} files of {kinds}" if shards else f"no {kinds} file", "", ""
        if below:
            more = f"; folders below it hold {len(below)}, such as '{shown(min(below))}'"
            ends = f"*{extensions[0]}"
            remedy = f"; write '{shown(folder)}/{ends}' or '{shown(folder)}/*/{ends}', or both"
        raise DataError(f"dataset.params.path: the folder '{shown(folder)}' holds {here}{more}{remedy}")
    return shards


def _readable(folder: str, access: RemoteConfig) -> list[str]:
    """The files of a folder; none of one that may not be read, such as `lost+found`, if it is local."""
    if not is_remote(folder) and not os.access(folder, os.R_OK | os.X_OK):
        return []
    return list_folder(folder, access)[0]
