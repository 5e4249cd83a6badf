"""Secrets are hidden wherever text leaves the program."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sd_training import redaction
from sd_training.config.changes import to_plain
from sd_training.config.load import load_config
from sd_training.log import get_logger
from sd_training.redaction import for_terminal, redacted, redacted_values
from tests.unit.config.loading import BASE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("https://user:pw@host:80/a.tar?X-Amz-Signature=abc&x=1 end", "https://host:80/a.tar?(hidden) end"),
        ("'https://tok@host/x' and http://a/b?sig=1", "'https://host/x' and http://a/b?(hidden)"),
        ("s3://bucket/a?b*.tar", "s3://bucket/a?b*.tar"),
        ("s3://key:secret@bucket/a.tar", "s3://bucket/a.tar"),
        (
            "pipe:curl -H 'Authorization: Bearer ab.c' https://h/x?t=1 | cat",
            "pipe:curl -H 'Authorization: Bearer (hidden)' https://h/x?(hidden) | cat",
        ),
        ("wandb.api_key=12345", "wandb.api_key=(hidden)"),
        ('{"token": "xyz", "a": 1}', '{"token": "(hidden)", "a": 1}'),
        ("AWS_SECRET_ACCESS_KEY=abc/def+1", "AWS_SECRET_ACCESS_KEY=(hidden)"),
        ("seen hf_abcdefghijklmnopqrstuv.", "seen (hidden)."),
        ("s3://u:p@ssword123@host/x", "s3://host/x"),
        ("'s3://u:p?a@b@host/x' a@b", "'s3://host/x' a@b"),
        ("api_key: x", "api_key: (hidden)"),
        ("  password: x\n  user: me", "  password: (hidden)\n  user: me"),
        ("password: 12345678", "password: (hidden)"),
        ("{'password': 'two words', 'a': 1}", "{'password': '(hidden)', 'a': 1}"),
        (
            "curl -H 'x-amz-security-token: x' -H \"X-API-Key: y\" u",
            "curl -H 'x-amz-security-token: (hidden)' -H \"X-API-Key: (hidden)\" u",
        ),
        ("Authorization: token ghs_abc", "Authorization: token (hidden)"),
        ("Authorization: abc", "Authorization: (hidden)"),
        ("token: 12ab34cd56 was refused", "token: (hidden) was refused"),
        ("x ghs_abcdefghijklmnopqrstuv y", "x (hidden) y"),
        ("github_pat_11ABCDEFG0abcdefghij_klmnop", "(hidden)"),
        ("curl -u user:pw http://h/x", "curl -u (hidden) http://h/x"),
        ("curl -sSu 'user:p w' --proxy-user=a:b h", "curl -sSu (hidden) --proxy-user=(hidden) h"),
        ('["curl -uuser:pw", "curl --user \\"a:b\\" h"]', '["curl -u(hidden)", "curl --user (hidden) h"]'),
        ("pipe:tool --password hunter22 get x", "pipe:tool --password (hidden) get x"),
        ("pipe:tool --db-password='two words' x", "pipe:tool --db-password=(hidden) x"),
        ("pipe:tool --pass 'it\"s' -token a\\ b x", "pipe:tool --pass (hidden) -token (hidden) x"),
        ("['tool --api-key s3cr3t', 'x']", "['tool --api-key (hidden)', 'x']"),
        ('{"path": "pipe:tool --secret \\"a b\\" x"}', '{"path": "pipe:tool --secret (hidden) x"}'),
        ("az --account-key ab12+/== -f -", "az --account-key (hidden) -f -"),
        ("gcloud storage cat --access-token -ab x", "gcloud storage cat --access-token (hidden) x"),
        ("mc --token 123456 | tool --accessToken=x", "mc --token (hidden) | tool --accessToken=(hidden)"),
        ("az --connection-string 'A=b;AccountKey=c' x", "az --connection-string (hidden) x"),
        ("curl --oauth2-bearer abc --cookie sid=x u", "curl --oauth2-bearer (hidden) --cookie (hidden) u"),
        ("A=https;AccountName=x;AccountKey=ab12==;B=c", "A=https;AccountName=x;AccountKey=(hidden);B=c"),
        ("PGPASSWORD=x psql", "PGPASSWORD=(hidden) psql"),
        ("PGPASSWORD='two words' psql", "PGPASSWORD=(hidden) psql"),
        ("MYSQL_PWD=x MYTOKEN=y SOME_KEY=z a", "MYSQL_PWD=(hidden) MYTOKEN=(hidden) SOME_KEY=(hidden) a"),
        ("clientSecret=x&authToken=y", "clientSecret=(hidden)&authToken=(hidden)"),
        ("https://h/x;jsessionid=ab", "https://h/x;jsessionid=(hidden)"),
        ("sshpass -p x ssh h cat -p f", "sshpass -p (hidden) ssh h cat -p f"),
        ("sshpass -v -px ssh h", "sshpass -v -p(hidden) ssh h"),
        ("mysqldump -h x -py db", "mysqldump -h x -p(hidden) db"),
        ("openssl enc -d -k x -in f; unzip -P y f", "openssl enc -d -k (hidden) -in f; unzip -P (hidden) f"),
        ("openssl rsa -passin pass:x -passout pass:y", "openssl rsa -passin (hidden) -passout (hidden)"),
        ("openssl rsa -passin 'pass:x y' -in f", "openssl rsa -passin (hidden) -in f"),
        ("openssl rsa -passin env:WORD -in f", "openssl rsa -passin env:WORD -in f"),
        ("7z x -so -py f", "7z x -so -p(hidden) f"),
        ("lftp -u me,x h; smbclient -U me%x", "lftp -u (hidden) h; smbclient -U (hidden)"),
        ("curl -H 'X-Auth-Key: ab c' u", "curl -H 'X-Auth-Key: (hidden)' u"),
        ("curl -H X-Functions-Key:ab u", "curl -H X-Functions-Key:(hidden) u"),
        ("wget --header='Cookie: sid=ab; x=cd' u", "wget --header='Cookie: (hidden)' u"),
        ('wget --header "Authorization: A b=c, d=e" u', 'wget --header "Authorization: (hidden)" u'),
        ("X-Auth-Key: ab12", "X-Auth-Key: (hidden)"),
        ("Cookie: sid=ab; x=cd\nA: b", "Cookie: (hidden)\nA: b"),
        ("{'Cookie': 'sid=ab; x=cd', 'a': 1}", "{'Cookie': '(hidden)', 'a': 1}"),
    ],
)
def test_what_a_secret_looks_like(text: str, wanted: str) -> None:
    assert redacted(text) == wanted
    assert redacted(wanted) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "dataset.params.path=data/{000..999}.tar",
        "model.tokenizer: unknown option",
        "tcp://first:80",
        "wandb.api_key=null",
        "key=3, keys: 4",
        "a red fox; secret garden",
        "token: 77 per caption",
        "token: 77",
        "tokens: 3",
        "access_token: 3",
        "unexpected token: comma",
        "wandb.api_key: unknown option (command line); did you mean wandb.mode?",
        "wandb.api_key: is required",
        "api_key: null",
        "use_auth_token: false",
        "Authorization: required for this store",
        "the key: a gift of 2019; secret: nobody knows",
        "docker run -u 1000:1000 and python -u x.py:3",
        "curl -XPUT -H a:b -o c:d https://host/up",
        "someone@host:80/a and s3://bucket/a@b/c",
        "optimizer.params.learning_rate=1e-4 num_tokens=77 max_tokens=77 token_masks=true",
        "tokenizer: openai/clip and tokenizer=openai/clip, tokenizer_2: x",
        "dataset.params.captions.num_kept_tags=3",
        "/data/token_ids/x.tar /data/secret_garden/{0..9}.tar /keys/a.tar",
        "monkey=3 turkey: 4 KEYS=3 NUM_TOKENS=77 MONKEY=3",
        "a cookie: chocolate and cream; the password to a garden",
        "tool --tokenizer clip --num-tokens 77 --keys a --key data/a.tar --token-file f",
        "tool --use-auth-token --recursive x; tool --no-password | cat",
        "train.py --dry-run -p x; python -m tests.faults.secrets FOLDER",
        "curl -H 'Range: bytes=0-9' -H 'Accept: image/jpeg' u",
        "mkdir -p a/b && cp -k x y",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


def test_no_other_option_of_the_configuration_is_a_secret() -> None:
    names = re.findall(r"^\| `([a-z_0-9.*]+)` \|", (ROOT / "docs" / "config.md").read_text(), re.MULTILINE)
    assert len(names) > 100 and "wandb.api_key" in names
    for name in names:
        for text in (f"{name}=ab12cd34ef", f"{name.rpartition('.')[2]}: ab12cd34ef"):
            assert (redacted(text) == text) == (name != "wandb.api_key"), text


HOSTILE = (
    "a",
    "a://",
    "curl -u ",
    "token: ",
    "password:\t",
    "a1+",
    "token ",
    "'",
    "A",
    "A=",
    "--a",
    " --a",
    " --token ",
)
HOSTILE += ("sshpass ", "sshpass -p ", "mysql -h ", "-H a", "-H key", "cookie:a", "cookie: a=", "a-", "--password '")


def test_hostile_text_takes_no_time() -> None:
    for part in HOSTILE:
        start = time.process_time()
        redacted(part * (200_000 // len(part)))
        assert time.process_time() - start < 2.0, part


def test_values_of_secret_keys_in_containers() -> None:
    held = {"token": "a", "x": {"api_key": "b", "password": None, "secret_key": "null", "tokens": "3"}}
    hidden = {"token": "(hidden)", "x": {"api_key": "(hidden)", "password": None, "secret_key": "null", "tokens": "3"}}
    assert redacted_values(held) == hidden


def test_the_environment_and_noted_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_noted", set())
    monkeypatch.setenv("MY_API_KEY", "abcdefgh")
    monkeypatch.setenv("OTHER_TOKEN", "abcdefghijkl")
    monkeypatch.setenv("SHORT_TOKEN", "true")
    redaction.note_secret("12")
    redaction.note_secret(None)
    assert redacted("abcdefghijkl abcdefgh true 3123") == "(hidden) (hidden) true 3(hidden)3"
    assert redacted_values({"abcdefgh": ["xabcdefghx", 12, None]}) == {"(hidden)": ["x(hidden)x", 12, None]}


def test_the_dump_and_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_noted", set())
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
from sd_training.redaction import note_secret

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
