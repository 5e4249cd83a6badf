"""Secrets are hidden wherever text leaves the program."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sd_training import log as sd_log
from sd_training.config.changes import to_plain
from sd_training.config.load import load_config
from sd_training.log import for_terminal, get_logger, redacted, redacted_values
from tests.unit.config.loading import BASE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("https://user:pw@host:80/a.tar?X-Amz-Signature=abc&x=1 end", "https://host:80/a.tar?(hidden) end"),
        ("'https://tok@host/x' and http://a/b?sig=1", "'https://host/x' and http://a/b?(hidden)"),
        ("s3://bucket/a?b*.tar", "s3://bucket/a?b*.tar"),
        ("s3://key:secret@bucket/a.tar", "s3://bucket/a.tar"),
        ("pipe:curl https://u:pw@h/x?t=1 | cat", "pipe:curl https://h/x?(hidden) | cat"),
        ("s3://u:p@ssword123@host/x", "s3://host/x"),
        ("'s3://u:p?a@b@host/x' a@b", "'s3://host/x' a@b"),
    ],
)
def test_credentials_and_signatures_of_urls(text: str, wanted: str) -> None:
    assert redacted(text) == wanted
    assert redacted(wanted) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "dataset.params.path=data/{000..999}.tar",
        "tcp://first:80",
        "a red fox; secret garden; token: 77 per caption",
        "someone@host:80/a and s3://bucket/a@b/c",
        "optimizer.params.learning_rate=1e-4 num_tokens=77 tokenizer=openai/clip",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


def test_hostile_text_takes_no_time() -> None:
    for part in ("a", "a://", "a1+", "'", "A=", "a@", "a://@", "?"):
        start = time.process_time()
        redacted(part * (200_000 // len(part)))
        assert time.process_time() - start < 2.0, part


def test_the_environment_and_noted_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sd_log, "_noted", set())
    monkeypatch.setenv("MY_API_KEY", "abcdefgh")
    monkeypatch.setenv("OTHER_TOKEN", "abcdefghijkl")
    monkeypatch.setenv("SHORT_TOKEN", "true")
    sd_log.note_secret("12")
    sd_log.note_secret(None)
    assert redacted("abcdefghijkl abcdefgh true 3123") == "(hidden) (hidden) true 3(hidden)3"
    assert redacted_values({"abcdefgh": ["xabcdefghx", 12, None]}) == {"(hidden)": ["x(hidden)x", 12, None]}


def test_the_dump_and_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sd_log, "_noted", set())
    argv = [item for item in BASE if "path" not in item]
    url = "https://user:canary-1@host/{0..3}.tar?X-Amz-Signature=canary-2"
    config = load_config([*argv, f"dataset.params.path={url}", "wandb.api_key=canary-3"])
    plain = json.dumps(to_plain(config))
    assert "canary" not in plain and "https://host/{0..3}.tar?(hidden)" in plain
    assert config.dataset.params.path == url
    logger = get_logger("test_redaction")
    handler = logging.getLogger("sd_training").handlers[0]
    record = logger.makeRecord("x", logging.INFO, "f", 1, "\x1b[2J\u202e%s %s", (url, "canary-3"), None)
    _, _, line = handler.format(record).split(" ", 2)  # after date and time
    assert line == "\\u001b[2J\\u202ehttps://host/{0..3}.tar?(hidden) (hidden)"


def test_marks_that_move_a_cursor_are_escaped() -> None:
    assert for_terminal("a\tb\nc\rd\x9be\u2028f") == "a\tb\nc\\u000dd\\u009be\\u2028f"


FAILING = """
import os, sys, threading
from sd_training.cli import run_cli
from sd_training.log import note_secret

def main():
    note_secret("canary-0")
    secret = "canary-0"
    def fail():
        raise RuntimeError(f"{secret} {os.environ['SOME_TOKEN']} https://u:canary-2@h/x?sig=canary-3")
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    open("file", "w").close()
    fail()

run_cli(main)
"""


def test_tracebacks_and_modes(tmp_path: Path) -> None:
    environment = {**os.environ, "SOME_TOKEN": "canary-1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"import os; os.umask(0)\n{FAILING}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("RuntimeError: (hidden) (hidden) https://h/x?(hidden)") == 2
    assert "canary" not in done.stderr
    assert (tmp_path / "file").stat().st_mode & 0o002 == 0
