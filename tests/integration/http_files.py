"""A small web server on loopback for files in memory, with or without range requests."""

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WebFiles(ThreadingHTTPServer):
    """The server. `files`, `secret` and `has_ranges` may be changed while it runs."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        """By path; a folder is listed from them."""
        self.has_ranges = True
        self.secret: str | None = None
        """Query that every request must have, as signed links do."""
        self.counts: Counter[str] = Counter()
        """Requests by path."""
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True
    server: WebFiles

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.server.counts[path] += 1
        if self.server.secret not in (None, query):
            return self._answer(403, b"no")
        if path.endswith("/"):
            links = "".join(f'<a href="{name}">x</a>' for name in self.server.files if name.startswith(path))
            return self._answer(200, links.encode(), {"Content-Type": "text/html"})
        if path not in self.server.files:
            return self._answer(404, b"no")
        return self._content(self.server.files[path])

    def _content(self, content: bytes) -> None:
        headers = {"ETag": f'"{hash(content)}"'}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not (self.server.has_ranges and wanted):
            return self._answer(200, content, headers)
        start, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
        if start > last:
            return self._answer(416, b"", headers)
        headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
        return self._answer(206, content[start : last + 1], headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def web_files() -> Iterator[WebFiles]:
    """Runs the server on a free port, which `url` tells."""
    server = WebFiles()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
