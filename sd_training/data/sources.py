"""Options → sources: which class reads which `dataset.type`.

A source is imported when it is asked for: some stand on large libraries.
"""

from pathlib import Path

from sd_training.config.data_schema import RemoteConfig, SourceParams
from sd_training.data.byte_files import Access
from sd_training.data.shards import expand_shards
from sd_training.data.source import Source
from sd_training.data.tag_rules import tag_rules
from sd_training.data.tar_source import TarSource


def access_of(remote: RemoteConfig) -> Access:
    """How remote files are read."""
    return Access(
        mode=remote.mode,
        cache_dir=None if remote.cache_dir is None else Path(remote.cache_dir).expanduser(),
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
        case "WebDataset" | "ClassificationWebDataset":
            return TarSource(expand_shards(params.path, access, allow_pipe=params.allow_pipe), access)
        case "Parquet":
            from sd_training.data.parquet_source import ParquetSource

            return ParquetSource(expand_shards(params.path, access, extensions=(".parquet",)), access, *columns)
        case "Table":
            from sd_training.data.table_rows import TABLE_EXTENSIONS
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
