"""Why a hub id cannot be read: asked once, with a server that answers as the hub does."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_ANSWERS = {
    "gated": (403, "GatedRepo"),
    "missing": (404, "RepoNotFound"),
    "other": (404, "RevisionNotFound"),
    "plain": (404, "EntryNotFound"),
    "busy": (503, None),
}


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """Address of a server, and the paths that it was asked for."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            status, code = _ANSWERS[self.path.split("/")[1]]
            self.send_response(status)
            if code is not None:
                self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


def said(home: Path, endpoint: str, names: list[str], **environment: str) -> dict[str, str | None]:
    """Each name's sentence, asked for twice, from a process of its own: the library reads its settings at import."""
    code = (
        "import json, sys; from sd_training.hub import hub_problem; "
        "print(json.dumps({n: hub_problem(n, None, 'model.pretrained') for n in sys.argv[1:] * 2}))"
    )
    kept = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        cwd=ROOT,
        env={**kept, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str | None] = json.loads(done.stdout)
    return found


def test_each_answer_has_its_sentence_after_one_request(tmp_path: Path, hub: tuple[str, list[str]]) -> None:
    endpoint, asked = hub
    cached = tmp_path / "hub" / "models--cached--x" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    names = [*(f"{name}/x" for name in _ANSWERS), "cached/x", "a/b/c", str(tmp_path)]
    lines = said(tmp_path, endpoint, names)
    assert sorted(asked) == sorted(f"/{name}/x/resolve/main/config.json" for name in _ANSWERS)
    assert [name for name in names if lines[name] is None] == ["plain/x", "cached/x", str(tmp_path)]
    assert "'gated/x' is no folder here, and the hub gives it only to users who accepted" in str(lines["gated/x"])
    assert "accept them on https://huggingface.co/gated/x and log in" in str(lines["gated/x"])
    assert "the hub has no such repository, or shows it only after hf auth login" in str(lines["missing/x"])
    assert "the hub cannot be reached (" in str(lines["other/x"])
    assert "not in the local cache, and the hub cannot be reached (" in str(lines["busy/x"])
    assert "'a/b/c' is no folder here, and no hub id either" in str(lines["a/b/c"])


def test_without_the_hub_both_readings_are_named(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"  # nobody listens
    for environment, why in (({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE disables"), ({}, "the hub cannot be reached (")):
        line = str(said(tmp_path, nowhere, ["models/sd2"], **environment)["models/sd2"])
        assert line.startswith(
            "model.pretrained: 'models/sd2' is no folder here, and it is not in the local cache, and "
        )
        assert why in line
        assert "python scripts/download_diffusers.py -m models/sd2 -o FOLDER" in line
        assert line.endswith("and write model.pretrained=FOLDER")
