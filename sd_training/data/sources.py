"""Options → sources: which class reads which `dataset.type`.

A source is imported when it is asked for: some stand on large libraries.
"""

from pathlib import Path

from sd_training.config.data_schema import RemoteConfig, SourceParams
from sd_training.data.byte_files import Access
from sd_training.data.shards import expand_shards
from sd_training.data.source import Source
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
    return TarSource(expand_shards(params.path, access, allow_pipe=params.allow_pipe), access)
