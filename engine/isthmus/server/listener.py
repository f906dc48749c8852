"""The port of a server, open before anything is imported that takes time."""

from __future__ import annotations

import socket

from isthmus.errors import ConfigError

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Connections wait in it until somebody serves them.

    Raises ConfigError.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError([f"--host={host} --port={port}: cannot be listened on: {why}; choose another"]) from error


def url_of(listener: socket.socket, *, tls: bool) -> str:
    """Where the server is."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"
