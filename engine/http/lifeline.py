"""Noticing that a server has restarted between two calls: a connection that nobody uses ends with its process."""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit

CONNECT_S = 0.3
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


class Lifeline:
    """For servers that say nothing of their start. `losses` counts how often an open connection has ended; a server
    that takes none adds nothing to it. uvicorn leaves a connection open that has not asked anything yet; a proxy in
    between may not, so workers are put directly beside their servers. Over TLS there is none: the server would end it.
    Thread-safe.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._place = None if parts.scheme != "http" else (parts.hostname or "", parts.port or 80)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._losses = 0

    def losses(self) -> int:
        """Looks at the connection, makes one where there is none, and says how many have ended so far."""
        with self._lock:
            if self._socket is not None and _ended(self._socket):
                self._losses += 1
                self._drop()
            if self._socket is None and self._place is not None:
                self._socket = _connected(self._place)
            return self._losses

    def close(self) -> None:
        with self._lock:
            self._drop()
            self._place = None

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def _connected(place: tuple[str, int]) -> socket.socket | None:
    try:
        made = socket.create_connection(place, timeout=CONNECT_S)
    except OSError:
        return None
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:  # a machine that is gone says nothing
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def _ended(connection: socket.socket) -> bool:
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True  # its end, or words that nobody asked for, which come before it
