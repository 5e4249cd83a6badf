"""A port for a process that is started later."""

import secrets
import socket
from contextlib import suppress


def free_port() -> int:
    """One that no outgoing connection is given before somebody listens on it: Linux takes those from 32768 on."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
