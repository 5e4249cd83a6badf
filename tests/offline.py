"""A process that may not open a connection."""

import socket
from typing import Any, NoReturn


def refuse_connections() -> None:
    """From now on, in this process."""

    def refused(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a connection was asked for")

    socket.socket.connect = refused  # type: ignore[method-assign]
    socket.create_connection = socket.getaddrinfo = refused
