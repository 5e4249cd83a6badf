"""Where a login of W&B is found, and what is said where there is none."""

import subprocess
import sys
from pathlib import Path

import pytest

from sd_training.build.wandb_login import missing_login
from sd_training.config.schema import WandbConfig
from tests.integration.commands import ROOT

KEY = "0123456789abcdef0123456789abcdef01234567"
ASKED = """
from sd_training.build.wandb_login import missing_login
from sd_training.config.schema import WandbConfig
print(missing_login(WandbConfig()))
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DIR", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb"))
    return tmp_path


def netrc(home: Path, key: str, machine: str = "api.wandb.ai") -> None:
    (home / ".netrc").write_text(f"machine {machine}\n  login user\n  password {key}\n")
    (home / ".netrc").chmod(0o600)


def test_a_login_in_netrc_is_found(home: Path) -> None:
    netrc(home, KEY)
    assert missing_login(WandbConfig()) is None


def test_what_wandb_itself_stores_is_found(home: Path) -> None:
    (home / "wandb").mkdir()
    (home / "wandb" / "settings").write_text(f"[default]\napi_key = {KEY}\n")
    # W&B reads this file once per process.
    asked = subprocess.run([sys.executable, "-c", ASKED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert asked.stdout == "None\n" and KEY not in asked.stderr


@pytest.mark.parametrize("machine", [None, "example.com"])
def test_without_one_the_remedies_are_named(home: Path, machine: str | None) -> None:
    if machine is not None:
        netrc(home, KEY, machine)
    reason = missing_login(WandbConfig())
    assert reason is not None and reason.startswith("there is no key")
    assert reason.endswith("; set WANDB_API_KEY, run `wandb login`, or choose wandb.mode=offline")


def test_a_key_that_wandb_refuses_is_not_shown(home: Path) -> None:
    netrc(home, "tooshortasecret")
    reason = missing_login(WandbConfig())
    assert reason is not None and "wandb login" in reason and "tooshortasecret" not in reason


def test_a_key_of_the_options_or_the_environment_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_login(WandbConfig(api_key=KEY)) is None
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert missing_login(WandbConfig()) is None
