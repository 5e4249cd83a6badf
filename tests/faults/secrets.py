"""Secrets: runs with random ones everywhere a user may have them, and a search for each in all that they wrote or said.

python -m tests.faults.secrets FOLDER
"""

import json
import os
import secrets
import shutil
import sys
import tarfile
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

from sd_training.cli import run_cli
from sd_training.errors import ConfigError
from tests.faults.fork_server import shared_server
from tests.faults.row import Row
from tests.faults.tiny_run import RUN_HERE, as_torchrun
from tests.strategy_report import make_models

ENVIRONMENT = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SOME_SERVICE_PASSWORD")
MISTAKEN = ("missing", "wrong")
"""Runs of one process that end with a sentence."""
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
    url = f"https://reader:{known['user information']}@127.0.0.1/x?sig={known['signed query']}"
    path = f"dataset.params.path=pipe:cat {folder}/broken/{{000..001}}.tar; : {known['SOME_SERVICE_PASSWORD']} {url}"
    words = argv(folder, port, known, "experiment.name=piped", "dataset.params.allow_pipe=true")
    words += ["dataset.params.max_bad_fraction=1", "experiment.num_examples_to_see=64"]
    return [path, *words[1:]]


def environment_of(folder: Path, known: Mapping[str, str]) -> dict[str, str]:
    """With the secrets; what is written to the home folder or to TMPDIR is searched, too."""
    for name in ("home", "tmp", "said"):
        (folder / name).mkdir(exist_ok=True)
    environment = {**os.environ, **{name: known[name] for name in ENVIRONMENT}, "OMP_NUM_THREADS": "1"}
    environment |= {"XDG_CACHE_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    environment |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "WATCH_DIR": str(folder)}
    return environment | {"WANDB_MODE": "offline"}


def train(folder: Path, name: str, words: list[str], known: Mapping[str, str]) -> int | None:
    """The status of `train.py` with the secrets in its environment."""
    environment, program = environment_of(folder, known), [str(folder), "", str(ROOT / "train.py")]
    return shared_server().start(RUN_HERE, program + words, folder / "said" / f"{name}.txt", environment).wait(900)


def train_pair(folder: Path, name: str, words: list[str], known: Mapping[str, str]) -> list[int | None]:
    """The same by two processes, as torchrun starts them. `defect`: the second raises an exception that names the data.
    `proxy`: the second alone has a proxy, which is not there."""
    environment = environment_of(folder, known) | {"FAULT": name}
    proxy = {"http_proxy": f"http://agent:{known['proxy password']}@127.0.0.1:9"} if name == "proxy" else {}
    program = [str(folder), "", "-m", "tests.faults.faulty_run", *words, f"experiment.name={name}"]
    children = []
    for rank, (launched, more) in enumerate(zip(as_torchrun(2), ({}, proxy), strict=True)):
        own = {**environment, **launched, **more}
        children.append(shared_server().start(RUN_HERE, program, said_by(folder, name, rank), own))
    return [child.wait(900) for child in children]


def said_by(folder: Path, name: str, rank: int) -> Path:
    """What a process of `train_pair` printed."""
    return folder / "said" / f"{name}_{rank}.txt"


def places(folder: Path, known: Mapping[str, str]) -> Iterator[str]:
    """Every file, or file name, that holds a secret, as it is or in base64."""
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        for name, secret in known.items():
            for form in (secret.encode(), b64encode(secret.encode()).rstrip(b"=")[:-2]):
                if form in content or form.decode() in path.name:
                    yield f"{name} in {path.relative_to(folder)}"


def run(folder: Path, is_quick: bool) -> list[Row]:
    """Two rows: a run that trains, one that describes itself, and ones that fail with the secrets in scope; and runs of
    two processes of which one fails. Two at once, as most of their time goes into waiting."""
    folder = folder.resolve() / "secrets"
    of_two = folder.with_name("secrets_of_two")
    for old in (folder, of_two):
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True)
    make_models(folder)
    in_urls = ("user information", "signed query", "second query", "proxy password")
    names = (*ENVIRONMENT, "wandb.api_key", *in_urls)
    known = {name: secrets.token_hex(20) for name in names}
    with served(folder / "shards") as port, ThreadPoolExecutor(2) as pool:
        pair = pool.submit(pair_row, of_two, folder, port, known, is_quick)
        jobs = jobs_alone(folder, port, known, is_quick)
        ended = {name: pool.submit(train, folder, name, words, known) for name, words in jobs.items()}
        return [_row_alone(folder, known, {name: one.result() for name, one in ended.items()}), pair.result()]


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """Port of a server of these files on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def jobs_alone(folder: Path, port: int, known: Mapping[str, str], is_quick: bool) -> dict[str, list[str]]:
    """Name of a run of one process → its options."""
    trained = argv(folder, port, known)
    none = argv(folder, port, known, "experiment.name=none")
    jobs = {"piped": piped(folder, port, known)}
    if not is_quick:  # the two processes train on the same data
        jobs |= {"trained": trained, "described": [*trained, "--dry-run"]}
        jobs["wrong"] = [*trained, "wandb.mode=never", "dataset.params.filters.w=https://a:b@c/?sig=d"]
    return jobs | {"missing": [word.replace("{000..001}", "{007..008}") for word in none]}


def _row_alone(folder: Path, known: Mapping[str, str], statuses: Mapping[str, int | None]) -> Row:
    hits = list(places(folder, known))
    is_named = any(folder.glob("piped/**/bad_samples.jsonl"))
    num_files = sum(path.is_file() for path in folder.rglob("*"))
    figure = f"{len(hits)} hits in {num_files} files for {len(known)} secrets, exit statuses {list(statuses.values())}"
    figure += "".join(f"; {hit}" for hit in hits[:5])
    is_right = all(status == (2 if name in MISTAKEN else 0) for name, status in statuses.items())
    fault = "secrets in environment, options and data URL"
    return Row(fault, PROMISE, len(statuses), figure, not hits and is_named and is_right)


def pair_row(folder: Path, models: Path, port: int, known: Mapping[str, str], is_quick: bool) -> Row:
    """Two processes; the weights leave the range of numbers in the first step, and the second process fails alone."""
    folder.mkdir()
    words = argv(models, port, known, f"experiment.log_dir={folder}", "system.batch_size=4")
    words += ["experiment.num_examples_to_see=64", "optimizer.params.learning_rate=1e30"]
    words += [f"dataset.params.{place}={folder / 'data'}" for place in ("index_dir", "remote.cache_dir")]
    ended = {"defect": train_pair(folder, "defect", [*words, "system.workers=0"], known)}
    if not is_quick:
        ended["proxy"] = train_pair(folder, "proxy", words, known)
    hits, problems = list(places(folder, known)), list(untold(folder, list(ended), f"http://127.0.0.1:{port}/00"))
    for problem in problems:
        print(f"secrets: {problem}", file=sys.stderr)
    num_files = sum(path.is_file() for path in folder.rglob("*"))
    statuses = [status for pair in ended.values() for status in pair]
    figure = f"{len(hits)} hits in {num_files} files, exit statuses {statuses}, {len(problems)} things not told"
    figure += "".join(f"; {hit}" for hit in hits[:5])
    fault = "a loss that is not finite, and the second of two ranks fails alone"
    is_kept = not hits and not problems and 0 not in statuses
    return Row(fault, f"{PROMISE}; incident, note of the end and message name the data", len(ended), figure, is_kept)


def untold(folder: Path, names: Sequence[str], url: str) -> Iterator[str]:
    """What has not been told, in which a secret could have been.

    Args:
        folder: of `train_pair`.
        names: of the runs; the one named `defect` has incidents.
        url: how the data's shards begin, without secrets.
    """
    told = [path.read_text() for path in folder.glob("defect/incidents/*.json")]
    if not any(url in sample["shard"] for text in told for sample in json.loads(text)["samples"]):
        yield f"none of {len(told)} incidents names a sample by its URL"
    for name in names:
        kind = "Traceback" if name == "defect" else "error: "
        said = said_by(folder, name, 1).read_text()
        if kind not in said or url[:-2] not in said:
            yield f"{name}: rank 1 does not name the data after {kind!r}:\n{said[-1000:]}"
        path = folder / name / "first_failure.json"
        end: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rank": None, "text": "no file"}
        if end["rank"] != 1 or url[:-2] not in end["text"]:
            yield f"{name}: first_failure.json is of rank {end['rank']}: {end['text']}"


def main() -> None:
    """Parse, run, print."""
    if len(sys.argv) != 2:
        raise ConfigError("python -m tests.faults.secrets FOLDER")
    for row in run(Path(sys.argv[1]), is_quick=False):
        print(f"{'kept  ' if row.is_kept else 'BROKEN'} {row.fault}, {row.trials} runs: {row.figure}")


if __name__ == "__main__":
    run_cli(main)
