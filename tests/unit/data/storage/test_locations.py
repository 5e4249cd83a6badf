import pytest

from sd_training.data.storage.files import local_path, protocol_of, shown
from sd_training.errors import ConfigError


@pytest.mark.parametrize(
    ("location", "protocol"),
    [
        ("/a/b.tar", ""),
        ("a:b.tar", ""),
        ("file:///a", ""),
        ("S3://bucket/key", "s3"),
        ("gs://bucket/key", "gs"),
        ("http://host/a", "http"),
        ("https://host/a", "https"),
    ],
)
def test_protocols(location: str, protocol: str) -> None:
    assert protocol_of(location) == protocol


@pytest.mark.parametrize("location", ["ftp://h/a", "simplecache::s3://b/k", "filecache::file:///a", "gcs://b/k"])
def test_no_other_protocol(location: str) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.params\.path.*which is not read"):
        protocol_of(location)


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ("/a/b?c@d", "/a/b?c@d"),
        ("https://user:word@host:81/a/b.tar?Signature=xyz#part", "https://host:81/a/b.tar"),
        ("https://host?token=1", "https://host"),
        ("s3://bucket/a?b#c@d.tar", "s3://bucket/a?b#c@d.tar"),
        ("s3://id:word@bucket/key", "s3://bucket/key"),
    ],
)
def test_secrets_are_not_shown(location: str, text: str) -> None:
    assert shown(location) == text


def test_local_paths() -> None:
    assert local_path("file:///a/b%20c/../d") == "/a/d"
    assert local_path("/a//b") == "/a/b"
    assert local_path("~/x").startswith("/")
