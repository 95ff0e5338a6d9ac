"""Kept-open HTTP connections to stores, whose bodies go straight into the memory that they are meant for.

A general client hands a body out in small pieces, each copied several times: for 2 MB of routes that takes longer than
their way through the network.
"""

from __future__ import annotations

import http.client
import select
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol
from urllib.parse import urlsplit

CONNECT_SECONDS = 2.0
MAX_TEXT_BYTES = 64 << 20
"""Of a page or an error; more than that is no answer of a store."""
_GONE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)
UNREACHABLE = (OSError, http.client.HTTPException)
"""What can be raised by whatever is done here: no answer, or half of one."""


class Reply(Protocol):
    """An answer whose body is not read yet. `headers`: names in lower case."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    def fill(self, memory: memoryview) -> int:
        """Reads the body into `memory`; fewer bytes than it has: the body was shorter."""
        ...

    def read(self) -> bytes:
        """The whole body, of an answer that has no rows."""
        ...


class Http(Protocol):
    """See `Connections`."""

    @contextmanager
    def open(self, method: str, url: str, path: str, seconds: float) -> Iterator[Reply]:
        """Asks; `seconds`: how long the store may be silent. Raises UNREACHABLE."""
        ...

    def close(self) -> None: ...


class Connections:
    """To any number of servers. Thread-safe; each connection serves one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[str, list[http.client.HTTPConnection]] = {}
        self._closed = False

    @contextmanager
    def open(self, method: str, url: str, path: str, seconds: float) -> Iterator[Reply]:
        """`url`: scheme and address; `path`: the rest, encoded.

        Raises:
            UNREACHABLE, also while the body is read.
        """
        connection, response = self._ask(method, url, path, seconds)
        try:
            yield _Reply(response)
        finally:
            if response.length == 0 and not response.will_close:  # all of the body was read, or there is none
                response.close()
                self._keep(url, connection)
            else:
                connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _ask(
        self, method: str, url: str, path: str, seconds: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """An idle connection may have been closed by the other side a moment ago: then over a new one."""
        for _ in range(2):
            connection = self._take(url)
            fresh = connection is None
            if connection is None:
                connection = _connect(url)
            try:
                assert connection.sock is not None
                connection.sock.settimeout(seconds)
                connection.request(method, path, headers={"accept-encoding": "identity"})
                return connection, connection.getresponse()
            except BaseException as exc:
                connection.close()
                if fresh or not isinstance(exc, _GONE):
                    raise
        raise ConnectionError("the server closes every connection")

    def _take(self, url: str) -> http.client.HTTPConnection | None:
        while True:
            with self._lock:
                idle = self._idle.get(url)
                connection = idle.pop() if idle else None
            if connection is None or _is_open(connection):
                return connection
            connection.close()

    def _keep(self, url: str, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(url, []).append(connection)
                return
        connection.close()


class _Reply:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}

    def fill(self, memory: memoryview) -> int:
        filled = 0
        while filled < len(memory) and (count := self._response.readinto(memory[filled:])):
            filled += count
        return filled

    def read(self) -> bytes:
        body = self._response.read(MAX_TEXT_BYTES + 1)
        if len(body) > MAX_TEXT_BYTES:
            raise http.client.HTTPException(f"more than {MAX_TEXT_BYTES} bytes of text")
        if self._response.length:  # `read` with a limit says nothing of a body that was cut
            raise http.client.IncompleteRead(body, self._response.length)
        return body


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise http.client.InvalidURL(f"{url!r} is no http address")
    connection = kind(parts.hostname, parts.port, timeout=CONNECT_SECONDS)
    try:
        connection.connect()
    except BaseException:
        connection.close()
        raise
    return connection


def _is_open(connection: http.client.HTTPConnection) -> bool:
    """Nothing is sent to an idle connection but its end."""
    sock = connection.sock
    if sock is None:
        return False
    poll = select.poll()  # unlike select, for descriptors of any number
    poll.register(sock, select.POLLIN)
    return not poll.poll(0)
