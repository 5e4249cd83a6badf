"""scripts/push_to_hub.py: the folder that is published, its card, and what the hub is sent."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from diffusers import StableDiffusionPipeline
from huggingface_hub import ModelCard, constants

from scripts import push_to_hub
from sd_training.errors import ConfigError, DataError
from tests import makers
from tests.integration.training import options, train

NAME = "someone/tiny"


class Hub(BaseHTTPRequestHandler):
    """What the hub answers to a new repository and to one commit of small files."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server: Any = self.server
        if self.headers.get("Authorization") != "Bearer secret":
            return self.answer(401, {"error": "no token"})
        if self.path == "/api/repos/create":
            server.created.append(json.loads(body))
            return self.answer(200, {"url": f"{server.url}/{NAME}", "id": NAME, "name": NAME})
        if self.path.endswith("/preupload/main"):
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            return self.answer(200, {"files": [{**file, "shouldIgnore": False} for file in files]})
        if self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                else:
                    server.summaries.append(line["value"]["summary"])
            return self.answer(200, {"commitUrl": f"{server.url}/{NAME}/commit/1", "commitOid": "1"})
        self.answer(200, {"errors": [], "warnings": []})  # of the card's head

    def answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    server.created, server.files, server.summaries = [], {}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "secret")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, pipeline_dir: Path, shards_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("published")
    held_out = makers.write_shard(folder / "held_out" / "0.tar", makers.caption_samples(6, 90)).parent
    changes = {"validation__path": held_out, "validation__every": 2, "sampling__every": 2, "sampling__raw": True}
    changes |= {"sampling__prompts": "['a red, \"round\" picture']", "sampling__num_inference_steps": 1}
    argv = options(folder / "run", pipeline_dir, shards_dir, experiment__num_examples_to_see=32, **changes)
    train([*argv, "objective.snr_gamma=5", "system.gradient_accumulation=1"])
    return folder / "run"


def test_the_folder_is_a_pipeline_with_a_card(run_dir: Path, tmp_path: Path) -> None:
    push_to_hub.main([str(run_dir), NAME, "--license", "openrail++", "--out", str(tmp_path / "out")])
    StableDiffusionPipeline.from_pretrained(tmp_path / "out", local_files_only=True)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.library_name, card.data.base_model) == ("openrail++", "diffusers", None)
    assert f'DiffusionPipeline.from_pretrained("{NAME}")' in card.text
    assert "pipeline('a red, \"round\" picture').images[0]" in card.text
    assert "4 of 4 optimizer steps, 32 images" in card.text and "| data fingerprint | " in card.text
    assert "| validation loss, EMA | " in card.text and "] after step 4 |" in card.text
    assert "| `objective.snr_gamma` | 5.0 |" in card.text
    grid = run_dir / "samples" / "step_4" / "previews_grid.png"
    assert (tmp_path / "out" / "samples.png").read_bytes() == grid.read_bytes()
    assert str(run_dir.parent) not in card.text and "pytest" not in card.text
    with pytest.raises(ConfigError, match="is there already"):
        push_to_hub.main([str(run_dir), NAME, "--license", "mit", "--out", str(tmp_path / "out")])


def test_the_hub_gets_every_file_in_one_commit(run_dir: Path, hub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run_dir.rglob("*"))
    push_to_hub.main([str(run_dir), NAME, "--license", "mit", "--private"])
    assert capsys.readouterr().out == f"{hub.url}/{NAME}/commit/1\n"
    (made,) = hub.created
    assert (made["organization"], made["name"]) == ("someone", "tiny")
    assert made.get("private") is True or made.get("visibility") == "private"  # by version of the library
    exported = {str(p.relative_to(d)): p for d in [run_dir / "current_pipeline"] for p in d.rglob("*") if p.is_file()}
    assert {name: content for name, content in hub.files.items() if name in exported} == {
        name: path.read_bytes() for name, path in exported.items()
    }
    assert hub.files.keys() - exported.keys() == {"README.md", "samples.png"} and hub.summaries == ["Step 4"]
    assert sorted(run_dir.rglob("*")) == before


def test_what_cannot_be_published(run_dir: Path, hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(DataError, match=r"someone/tiny: the hub has not taken it \(.*401.*HF_TOKEN"):
        push_to_hub.main([str(run_dir), NAME, "--license", "mit"])
    assert not hub.files
    with pytest.raises(ConfigError, match="OWNER/NAME: 'a/b/c' is no name"):
        push_to_hub.main([str(run_dir), "a/b/c", "--license", "mit"])
    with pytest.raises(ConfigError, match="has no current_pipeline"):
        push_to_hub.main([str(tmp_path), NAME, "--license", "mit"])


def test_adapters_are_loaded_over_their_base(run_dir: Path) -> None:
    lines = push_to_hub.usage(NAME, "owner/base", False, "a dog").splitlines()
    assert lines[3:5] == [
        'pipeline = DiffusionPipeline.from_pretrained("owner/base").to("cuda")',
        f'pipeline.load_lora_weights("{NAME}")',
    ]
