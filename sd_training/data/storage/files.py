"""The one place that chooses by location how a file is read: a local file, a URL, or the output of a command."""

from sd_training.data.storage.byte_file import (
    Access,
    ByteFile,
    FileMissing,
    FileState,
    LocalFile,
    has_changed,
    local_state,
)
from sd_training.data.storage.locations import PIPE, is_remote, local_path
from sd_training.data.storage.pipe import open_pipe, pipe_state
from sd_training.data.storage.remote import open_remote, remote_state


def file_state(location: str, access: Access) -> FileState:
    """Size and version of a file.

    Raises:
        FileMissing: it does not exist, is not a file, or may not be read.
        DataError: it cannot be reached, after all retries.
        ConfigError: its protocol is unknown.
    """
    if location.startswith(PIPE):
        return pipe_state(location, access)
    return remote_state(location, access) if is_remote(location) else local_state(location)


def find_state(location: str, access: Access) -> FileState | None:
    """As `file_state`, for a file that need not be there: None when it is missing or forbidden. (S3 answers
    "forbidden" for missing files to those who may not list the bucket.)"""
    try:
        return file_state(location, access)
    except FileMissing:
        return None


def open_bytes(file: str | FileState, access: Access) -> ByteFile:
    """Opens a file.

    Args:
        file: path or URL; or its state, which saves a request for remote files and is compared with the content.
        access: how remote files are read.

    Raises:
        FileMissing, DataError, ConfigError: as `file_state`; DataError also when the file is not in the given state.
    """
    location = file if isinstance(file, str) else file.location
    if location.startswith(PIPE):
        return open_pipe(pipe_state(location, access) if isinstance(file, str) else file, access)
    if is_remote(location):
        return open_remote(remote_state(location, access) if isinstance(file, str) else file, access)
    opened = LocalFile(local_path(location), location)
    if isinstance(file, FileState) and (opened.size, opened.version) != (file.size, file.version):
        opened.close()
        raise has_changed(location)
    return opened
