"""An HTTP proxy on loopback that passes requests on to one server and spoils some of the answers.

Whether an answer is spoilt, and how, is a pure function of (seed, request, how often this request came before): the
same run meets the same faults whatever its threads and processes do.
"""

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = ("status", "reset", "truncated", "short", "delay")
"""503 · connection reset without an answer · the connection ends within the body · a shorter body that claims to be
whole · an answer that comes too late."""
_BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>"


class FaultProxy:
    """What the proxy does and has seen; may be changed while it runs.

    Args:
        upstream: URL of the server.
        rate: share of the answers that are spoilt.
        seed: of the faults.
        faults: kinds that are used.
        delay_s: how late the late answers are [s].
        longest_row: one and the same request is spoilt at most so often in a row.
    """

    def __init__(
        self,
        upstream: str,
        rate: float = 0.0,
        seed: int = 0,
        faults: tuple[str, ...] = FAULTS,
        delay_s: float = 1.0,
        longest_row: int = 3,
    ) -> None:
        parts = urlsplit(upstream)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.rate, self.seed, self.faults, self.delay_s, self.longest_row = rate, seed, faults, delay_s, longest_row
        self.url = ""
        self.counts: Counter[str] = Counter()
        """Faults so far, by kind."""
        self.requests: Counter[str] = Counter()
        """Requests so far, by method, path and range."""
        self._lock = threading.Lock()

    @property
    def num_requests(self) -> int:
        """All requests so far."""
        return sum(self.requests.values())

    def fault_of(self, request: str) -> str | None:
        """What is done to this request; None: nothing."""
        with self._lock:
            attempt = self.requests[request]
            self.requests[request] += 1
            draw = random.Random(f"{self.seed} {request} {attempt}")
            if attempt % (self.longest_row + 1) == self.longest_row or draw.random() >= self.rate:
                return None
            fault = draw.choice(self.faults)
            self.counts[fault] += 1
            return fault


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    proxy: FaultProxy

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that gave up waiting are expected."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # headers and body in one packet; else each answer waits 40 ms for a delayed acknowledgement
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        proxy = self.server.proxy
        fault = proxy.fault_of(f"{self.command} {self.path} {self.headers.get('Range', '')}")
        if fault == "reset":
            return self._reset()
        if fault == "status" or (fault in ("truncated", "short") and self.command == "HEAD"):
            return self._answer(503, {"Content-Type": "application/xml"}, _BUSY, len(_BUSY))
        if fault == "delay":
            time.sleep(proxy.delay_s)
        status, headers, body = self._upstream()
        length = int(headers.get("Content-Length", len(body)))
        if fault == "truncated":
            self._answer(status, headers, body[: len(body) // 2], length)
            self.wfile.flush()
            return self._hang_up()
        if fault == "short":
            body = body[: len(body) // 2]
            length = len(body)
        return self._answer(status, headers, body, length)

    do_HEAD = do_PUT = do_GET

    def _upstream(self) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.server.proxy.host, self.server.proxy.port, timeout=60)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection.request(self.command, self.path, body or None, dict(self.headers.items()))
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, dict(answer.getheaders()), content

    def _answer(self, status: int, headers: dict[str, str], body: bytes, length: int) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        """With lingering off, closing sends RST instead of FIN."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def running(proxy: FaultProxy) -> Iterator[FaultProxy]:
    """Runs the proxy on a free port of loopback, which `proxy.url` tells."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.proxy = proxy
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
