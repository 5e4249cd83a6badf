"""Where a login of W&B is found, and what is said where there is none."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sd_training.build.preflight import chosen_mode, missing_login, wandb_problems
from sd_training.config.schema import WandbConfig
from tests.integration.commands import ROOT

KEY = "0123456789abcdef0123456789abcdef01234567"
ASKED = """
from sd_training.build.preflight import missing_login
from sd_training.config.schema import WandbConfig
print(missing_login(WandbConfig()))
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_DIR", "WANDB_BASE_URL", "WANDB_MODE"):
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


def test_a_key_of_the_options_or_the_environment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_login(WandbConfig(api_key=KEY)) is None
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert missing_login(WandbConfig()) is None


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_a_given_key_that_wandb_refuses_is_a_problem(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = wandb_problems(WandbConfig(api_key="tooshortasecret", mode=mode))
    assert problem.startswith("wandb.") and "must have 40+ characters, has 15; set WANDB_API_KEY" in problem
    monkeypatch.setenv("WANDB_API_KEY", "tooshortasecret")
    (other,) = wandb_problems(WandbConfig(mode=mode))
    assert "WANDB_API_KEY invalid: API key must have 40+ characters" in other and "tooshort" not in problem + other
    assert wandb_problems(WandbConfig(api_key="tooshortasecret", mode="disabled")) == []


def test_the_environment_chooses_the_mode_that_the_options_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (chosen_mode(WandbConfig()), wandb_problems(WandbConfig())) == ("auto", [])
    for said, mode in (("offline", "offline"), ("dryrun", "offline"), ("disabled", "disabled"), ("", "auto")):
        monkeypatch.setenv("WANDB_MODE", said)
        assert (chosen_mode(WandbConfig()), wandb_problems(WandbConfig())) == (mode, [])
        assert chosen_mode(WandbConfig(mode="online")) == "online"
    monkeypatch.setenv("WANDB_MODE", "online")
    (problem,) = wandb_problems(WandbConfig())
    assert problem.startswith("WANDB_MODE=online in the environment, but there is no key; set WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    (problem,) = wandb_problems(WandbConfig())
    assert problem.startswith("WANDB_MODE: 'sometimes' is none of online, offline and disabled")
    assert wandb_problems(WandbConfig(mode="disabled")) == []
