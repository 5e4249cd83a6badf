"""Options → sources: which class reads which `dataset.type`.

A source is imported when it is asked for: some stand on large libraries.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import braceexpand

from sd_training.config.data_schema import RemoteConfig, SourceParams
from sd_training.config.local_paths import output_path
from sd_training.data.byte_files import Access
from sd_training.data.folder_source import IMAGE_SUFFIXES
from sd_training.data.locations import is_remote, local_path
from sd_training.data.shards import PIPE, expand_shards
from sd_training.data.source import Source
from sd_training.data.table_rows import TABLE_EXTENSIONS
from sd_training.data.tag_rules import tag_rules
from sd_training.data.tar_source import TarSource
from sd_training.errors import UserError

UNITS = {
    "WebDataset": "shard",
    "ClassificationWebDataset": "shard",
    "Parquet": "file",
    "Table": "table",
    "ImageFolder": "folder",
    "TagFolder": "folder",
    "HuggingFace": "file",
}
"""`dataset.type` → what its units are called in reports."""
_TARS = ("WebDataset", "ClassificationWebDataset")
_LOOSE = ("ImageFolder", "TagFolder", "HuggingFace")
"""Types whose paths are folders."""
_ENTRIES_LOOKED_AT, _FOLDERS_LOOKED_AT, _NAMES_LOOKED_FOR = 1_000, 20, 1_000
"""A glance before anything is indexed; the index looks at all of them."""


def access_of(remote: RemoteConfig) -> Access:
    """How remote files are read."""
    return Access(
        mode=remote.mode,
        cache_dir=None if remote.cache_dir is None else output_path(remote.cache_dir),
        cache_gib=remote.cache_gib,
        num_retries=remote.num_retries,
        timeout_s=remote.timeout_s,
    )


def make_source(kind: str, params: SourceParams, access: Access) -> Source:
    """The source that `dataset.type` names.

    Raises:
        ConfigError, DataError: `dataset.params.path` cannot be expanded.
    """
    columns = (params.image_column, params.caption_column)
    match kind:
        case _ if kind in _TARS:
            return TarSource(expand_shards(params.path, access, allow_pipe=params.allow_pipe), access)
        case "Parquet":
            from sd_training.data.parquet_source import ParquetSource

            return ParquetSource(expand_shards(params.path, access, extensions=(".parquet",)), access, *columns)
        case "Table":
            from sd_training.data.table_source import TableSource

            files = expand_shards(params.path, access, extensions=TABLE_EXTENSIONS)
            return TableSource(files, access, *columns)
        case "ImageFolder":
            from sd_training.data.folder_source import FolderSource

            return FolderSource(_folders(params.path))
        case "TagFolder":
            from sd_training.data.tag_source import TagSource

            return TagSource(_folders(params.path), access, tag_rules(params.tags))
        case _:
            from sd_training.data.huggingface_source import HuggingFaceSource

            return HuggingFaceSource(_folders(params.path), access, *columns)


def _folders(path: str | list[str]) -> list[str]:
    return [path] if isinstance(path, str) else list(path)


def path_problems(kind: str, params: SourceParams, access: Access) -> list[str]:
    """Local paths that do not exist or hold nothing of their kind, one sentence each; no file is opened.

    Remote paths, commands and patterns of very many names are left to the index.
    """
    problems = []
    for path in _folders(params.path):
        try:
            if path.startswith(PIPE) or is_remote(path) or _is_long(path):
                continue
            local = local_path(path)
            if _is_run_folder(local):
                problems.append(
                    f"dataset.params.path: '{path}' is the folder of a run, which holds no training data; give the "
                    "folder of the data that the run reads"
                )
                continue
            if kind not in _LOOSE:
                make_source(kind, replace(params, path=path), access)
            elif not os.path.isdir(local):
                state = "is no folder" if os.path.exists(local) else "does not exist"
                problems.append(
                    f"dataset.params.path: '{path}' {state}; {kind} reads folders{fitting_type(kind, path)}"
                )
                continue
            if os.path.isfile(local) and (hint := fitting_type(kind, path)):
                problems.append(f"dataset.params.path: '{path}' is no {kind} data{hint}")
        except UserError as error:
            problems.append(f"{error}{fitting_type(kind, path)}")
    return problems


def _is_run_folder(path: str) -> bool:
    return os.path.isfile(f"{path}/config.yaml") and os.path.isdir(f"{path}/checkpoints")


def _is_long(path: str) -> bool:
    try:
        return sum(1 for _ in islice(braceexpand.braceexpand(path), _NAMES_LOOKED_FOR + 1)) > _NAMES_LOOKED_FOR
    except ValueError:  # the error is raised, and named, where the pattern is expanded
        return False


def fitting_type(kind: str, path: str | list[str]) -> str:
    """The end of an error about data that is read as `kind`: which `dataset.type` the local files look like; empty when
    they look like `kind` or like none."""
    for entry in _folders(path):
        if entry.startswith(PIPE) or is_remote(entry) or not os.path.exists(local := local_path(entry)):
            continue
        types = dict(_types_of(local))
        if types and not ({kind} if kind not in _TARS else set(_TARS)) & types.keys():
            fitting, name = next(iter(types.items()))
            return f"; '{entry}' holds {name}, which dataset.type={fitting} reads"
    return ""


def _types_of(path: str) -> Iterator[tuple[str, str]]:
    """(`dataset.type`, a file that tells it) of a file, or of what lies in a folder and the first folders below it."""
    if os.path.isfile(path):
        yield from _types_of_names([os.path.basename(path)])
        return
    try:
        names, below = _glance(path)
        yield from _types_of_names(names)
        for folder in below[:_FOLDERS_LOOKED_AT]:
            yield from _types_of_names([f"{os.path.basename(folder)}/{name}" for name in _glance(folder)[0]])
    except OSError:
        return


def _glance(folder: str) -> tuple[list[str], list[str]]:
    """Names of files and paths of folders, some of many, without hidden ones."""
    with os.scandir(folder) as entries:
        found = [entry for entry in islice(entries, _ENTRIES_LOOKED_AT) if not entry.name.startswith(".")]
    files = sorted(entry.name for entry in found if not entry.is_dir())
    return files, sorted(entry.path for entry in found if entry.is_dir())


def _types_of_names(names: list[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        if os.path.basename(name) in ("state.json", "dataset_dict.json"):
            yield "HuggingFace", name
        elif name.startswith("metadata/") and name.endswith(".json"):
            yield "TagFolder", name
    ends = {".tar": "WebDataset", ".parquet": "Parquet", **dict.fromkeys(TABLE_EXTENSIONS, "Table")}
    found = {kind: name for name in reversed(names) for end, kind in ends.items() if name.lower().endswith(end)}
    yield from found.items()
    # Images beside a table are those that it names, unless they have captions of their own.
    has_captions = any(name.endswith(".txt") for name in names)
    images = [name for name in names if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES]
    if images and (has_captions or "Table" not in found):
        yield "ImageFolder", images[0]
