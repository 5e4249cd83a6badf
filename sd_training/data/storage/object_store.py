"""Object stores and web servers, through obstore (Rust's object_store): `s3://`, `gs://`, `http(s)://` and `file://`.

obstore pages through listings, and takes keys, endpoints and proxies from the environment. Its threads do not survive a
fork, so processes that use it are started by spawn or by a fork server that has not used it (`data/loader.py`).
"""

import os
import re
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from obstore import exceptions
from obstore.store import GCSStore, HTTPStore, LocalStore, ObjectStore, S3Store

from sd_training.errors import ConfigError
from sd_training.log import redacted

_TRANSIENT_STATUS = frozenset({408, 425, 429, *range(500, 600)} - {501, 505})
_STATUS = re.compile(r"status code: (\d{3})")
_METADATA_SERVICES = ("/latest/api/token", "metadata.google.internal")
"""Where a cloud's machines get the keys of their role; tried last, when there are no others."""
_KEYS_KEPT = timedelta(minutes=10)
"""A role's keys are requested again after this; botocore renews them 15 to 10 minutes before they expire."""


def open_store(url: str, num_retries: int, timeout_s: float) -> tuple[ObjectStore, str]:
    """The store of a URL and the path in it; one client serves all paths of a bucket or host.

    Args:
        url: `s3://bucket/key`, `gs://bucket/key`, `http(s)://host/path`, or `file:///folder` (the store is then that
            folder, which is made and whose empty folders are removed, and the path is empty).
        num_retries: attempts after the first, by obstore [count].
        timeout_s: longest wait for a connection, and between two pieces of an answer [s].

    Raises:
        ConfigError: the store cannot be used with this environment.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme == "file":
        return LocalStore(Path(unquote(rest)), mkdir=True, automatic_cleanup=True), ""
    parts = urlsplit(url)
    if scheme in ("s3", "gs"):
        bucket, _, path = rest.partition("/")
        root, path = f"{scheme}://{bucket}", path.rstrip("/")
    elif parts.query or "//" in parts.path:  # such a URL must reach the server as it is written
        root, path = url, ""
    else:
        root, path = f"{scheme}://{parts.netloc}", unquote(parts.path).strip("/")
    return _client(root, num_retries, timeout_s, os.getpid()), path


@lru_cache(maxsize=256)
def _client(root: str, num_retries: int, timeout_s: float, pid: int) -> Any:
    """Cached by process: a forked one must not use its parent's."""
    wait, transfer = timedelta(seconds=timeout_s), timedelta(days=1)  # of a whole one; a slow one is no failure
    settings: dict[str, Any] = {
        "client_options": {"allow_http": True, "connect_timeout": wait, "read_timeout": wait, "timeout": transfer},
        "retry_config": {"max_retries": num_retries, "retry_timeout": transfer},
    }
    scheme, _, bucket = root.partition("://")
    try:
        if scheme == "s3":
            return S3Store(bucket, **settings, **_profile())
        if scheme == "gs":
            return GCSStore(bucket, **settings)
        return HTTPStore(root, **settings)
    except exceptions.BaseError as error:
        raise ConfigError(f"{redacted(root)} cannot be used: {reason_of(error)}") from None


def _profile() -> dict[str, Any]:
    """Keys of `~/.aws` and of a profile, which obstore does not read, by boto3 where the environment has no keys."""
    names = (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config"))
    files = [os.path.expanduser(os.environ.get(variable) or default) for variable, default in names]
    has_keys = os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_SKIP_SIGNATURE")
    if has_keys or not any(map(os.path.exists, files)):
        return {}
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        provider = Boto3CredentialProvider(ttl=_KEYS_KEPT)
    except (ImportError, ValueError):  # no boto3, or no keys in these files
        return {}
    except Exception as error:  # botocore's, which is an optional package
        raise ConfigError(f"the keys of {' or '.join(files)} cannot be used: {redacted(str(error))}") from None
    if os.environ.get("AWS_REGION"):
        provider.config.pop("region", None)  # the file's region would win over the environment's
    return {"credential_provider": provider}


def reason_of(error: BaseException) -> str:
    """One line about a failure, without secrets and without obstore's dump of its own state."""
    text = str(error).partition("Debug source")[0]
    if any(service in text for service in _METADATA_SERVICES):
        where = "the environment, the provider's files (~/.aws is read where boto3 is installed) or this machine's role"
        return f"no credentials were found in {where}"
    return redacted(" ".join(text.split()))[:400] or type(error).__name__


def is_outage(error: BaseException) -> bool:
    """Whether a server cannot be reached or is not well, after all retries: another start may succeed."""
    text = str(error)
    if any(service in text for service in _METADATA_SERVICES):
        return False
    if found := _STATUS.search(text):
        return int(found[1]) in _TRANSIENT_STATUS
    return "HTTP error" in text and "certificate" not in text.lower()
