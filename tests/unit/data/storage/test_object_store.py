"""Keys of `~/.aws`."""

from datetime import timedelta
from pathlib import Path

import pytest

from sd_training.data.storage.object_store import _profile
from sd_training.errors import ConfigError


@pytest.fixture(autouse=True)
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "keys").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    (tmp_path / "config").write_text("[default]\nregion = eu-west-1\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


def test_keys_are_asked_for_again_before_a_role_ends() -> None:
    provider = _profile()["credential_provider"]
    assert provider()["access_key_id"] == "a"
    assert provider.ttl <= timedelta(minutes=10)  # from when on botocore itself must renew them


def test_the_region_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _profile()["credential_provider"].config == {"region": "eu-west-1"}
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert _profile()["credential_provider"].config == {}


def test_a_profile_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match="nobody"):
        _profile()
