"""Secrets: a run with random ones everywhere a user may have them, and a search for each in all that it wrote or said.

python -m scripts.campaign.secrets FOLDER
"""

import os
import secrets
import shutil
import subprocess
import sys
import tarfile
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.campaign.row import Row
from scripts.strategy_report import make_models
from sd_training.cli import run_cli
from sd_training.errors import ConfigError

ENVIRONMENT = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SOME_SERVICE_PASSWORD")
PROMISE = "no secret in any file of the run, nor in what it prints"


class _Files(SimpleHTTPRequestHandler):
    """Serves a folder, with ranges as the reader of shards asks for them."""

    def do_GET(self) -> None:
        """The bytes of `Range: bytes=a-b`, or the whole file."""
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            return self.send_error(404)
        content = path.read_bytes()
        first, last, wanted = 0, len(content) - 1, self.headers.get("Range", "")
        if wanted.startswith("bytes="):
            begin, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last = int(begin or 0), min(last, int(end or last))
        part = content[first : last + 1]
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        self.wfile.write(part)
        return None

    def log_message(self, format: str, *words: Any) -> None:
        """Nothing."""


def argv(folder: Path, port: int, known: Mapping[str, str], *more: str) -> list[str]:
    """Options of a run of two steps whose data and key are secret."""
    url = f"http://reader:{known['user information']}@127.0.0.1:{port}"
    query = f"X-Amz-Signature={known['signed query']}&sig={known['second query']}"
    return [
        f"dataset.params.path={url}/{{000..001}}.tar?{query}",
        f"experiment.log_dir={folder}",
        "experiment.name=run",
        "experiment.num_examples_to_see=16",
        f"model.pretrained={folder / 'pipeline'}",
        "model.mixed_precision=no",
        "model.use_ema=true",
        "dataset.params.resolution=32",
        f"dataset.params.remote.cache_dir={folder / 'cache'}",
        f"dataset.params.index_dir={folder / 'index'}",
        "dataset.params.remote.num_retries=1",
        "system.batch_size=8",
        "system.workers=1",
        "trainer.accelerator=cpu",
        "logging.every=1",
        "wandb.mode=offline",
        f"wandb.api_key={known['wandb.api_key']}",
        *more,
    ]


def piped(folder: Path, port: int, known: Mapping[str, str]) -> list[str]:
    """Options of a run whose data come by a command with secrets, with one image that cannot be used."""
    shutil.copytree(folder / "shards", folder / "broken")
    with tarfile.open(folder / "broken" / "000.tar", "a") as shard:
        for name, content in (("broken.jpg", b"no image"), ("broken.txt", b"a caption")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, BytesIO(content))
    header = f"'Authorization: Bearer {known['header']}' 'x-api-key: {known['second header']}'"
    user = f"curl -u reader:{known['password']} {known['SOME_SERVICE_PASSWORD']}"
    path = f"dataset.params.path=pipe:cat {folder}/broken/{{000..001}}.tar; : {header} {user}"
    words = argv(folder, port, known, "experiment.name=piped", "dataset.params.allow_pipe=true")
    words += ["dataset.params.max_bad_fraction=1", "experiment.num_examples_to_see=64"]
    return [path, *words[1:]]


def train(folder: Path, words: list[str], known: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    """`train.py` with the secrets in its environment."""
    environment = {**os.environ, **{name: known[name] for name in ENVIRONMENT}, "OMP_NUM_THREADS": "1"}
    environment |= {"XDG_CACHE_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("WANDB_MODE", None)
    command = [sys.executable, str(ROOT / "train.py"), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=300)
    (folder / "said").mkdir(exist_ok=True)
    number = len(list((folder / "said").iterdir()))
    (folder / "said" / f"{number}.txt").write_bytes(done.stdout + done.stderr)
    return done


def places(folder: Path, known: Mapping[str, str]) -> Iterator[str]:
    """Every file, or file name, that holds a secret, as it is or in base64."""
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        for name, secret in known.items():
            for form in (secret.encode(), b64encode(secret.encode()).rstrip(b"=")[:-2]):
                if form in content or form.decode() in path.name:
                    yield f"{name} in {path.relative_to(folder)}"


def run(folder: Path, is_quick: bool) -> list[Row]:
    """One row: a run that trains, one that describes itself, and ones that fail with the secrets in scope."""
    folder = folder.resolve() / "secrets"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_models(folder)
    in_urls, in_commands = ("user information", "signed query", "second query"), ("header", "second header", "password")
    names = (*ENVIRONMENT, "wandb.api_key", *in_urls, *in_commands)
    known = {name: secrets.token_hex(20) for name in names}
    handler = partial(_Files, directory=str(folder / "shards"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    try:
        good = train(folder, argv(folder, port, known), known)
        described = good if is_quick else train(folder, argv(folder, port, known, "--dry-run"), known)
        skipping = train(folder, piped(folder, port, known), known)
        missing = [
            word.replace("{000..001}", "{007..008}") for word in argv(folder, port, known, "experiment.name=none")
        ]
        bad = [train(folder, missing, known)]
        if not is_quick:
            wrong = argv(folder, port, known, "wandb.mode=never", "dataset.params.filters.w=https://a:b@c/?sig=d")
            bad.append(train(folder, wrong, known))
    finally:
        server.shutdown()
        server.server_close()
    hits = list(places(folder, known))
    is_named = any(folder.glob("piped/**/bad_samples.jsonl"))
    ended = [good.returncode, *(done.returncode for done in bad)]
    num_files = sum(path.is_file() for path in folder.rglob("*"))
    figure = f"{len(hits)} hits in {num_files} files for {len(known)} secrets, exit statuses {ended}"
    figure += "".join(f"; {hit}" for hit in hits[:5])
    have_trained = good.returncode == skipping.returncode == described.returncode == 0
    is_kept = not hits and is_named and have_trained and all(end == 2 for end in ended[1:])
    return [Row("secrets in environment, options and data URL", PROMISE, len(ended), figure, is_kept)]


def main() -> None:
    """Parse, run, print."""
    if len(sys.argv) != 2:
        raise ConfigError("python -m scripts.campaign.secrets FOLDER")
    for row in run(Path(sys.argv[1]), is_quick=False):
        print(f"{'kept  ' if row.is_kept else 'BROKEN'} {row.fault}, {row.trials} runs: {row.figure}")


if __name__ == "__main__":
    run_cli(main)
