"""A real S3-protocol server (moto) in a process of its own on loopback."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

from sd_training.data.storage import object_store as object_store
from tests.free_port import free_port

BUCKET = "shards"
_STARTUP_S = 300


def s3_environment(endpoint: str) -> dict[str, str]:
    """What a process needs in its environment to use the server, or a proxy of it.

    This process forgets its clients: they keep the endpoint that they were made with.
    """
    object_store._client.cache_clear()
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "not-a-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }


@dataclass(frozen=True)
class S3Server:
    """A running server with one empty bucket."""

    url: str

    def put(self, key: str, content: bytes) -> str:
        """Stores an object. Returns its URL."""
        self._client().put_object(Bucket=BUCKET, Key=key, Body=content)
        return f"s3://{BUCKET}/{key}"

    def put_folder(self, folder: Path, prefix: str) -> list[str]:
        """Stores every file of a folder. Returns their URLs, sorted."""
        return [self.put(f"{prefix}/{path.name}", path.read_bytes()) for path in sorted(folder.iterdir())]

    def _client(self) -> Any:
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "not-a-secret", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.url, **keys)


@contextmanager
def s3_server(log: Path) -> Iterator[S3Server]:
    """Runs the server; its output goes to `log`."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "NO_PROXY": "127.0.0.1"})
    try:
        server = S3Server(f"http://127.0.0.1:{port}")
        _wait(server, process, log)
        server._client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        process.terminate()
        process.wait(60)


def _wait(server: S3Server, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + _STARTUP_S
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(f"{server.url}/moto-api/data.json", timeout=5).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"the S3 server did not start:\n{log.read_text(errors='replace')}")
