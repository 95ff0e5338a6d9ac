"""Plain connections for kafka-python that are closed when they fail and read in large pieces.

kafka-python 3.0 leaves the socket of each failed attempt to the garbage collector: one a second for every client while
a broker is down. And it reads 4 KiB at a time, giving Python's lock away and waiting for it again each time: 512 times
for 2.1 MB of routes. Its place for connections of another kind is the proxy's URL.
"""

from __future__ import annotations

import socket
from typing import Any

from kafka.net.inet import KafkaNetSocket

DIRECT = "moebus-direct://"
"""The `proxy_url` that selects this class."""
PIECE = 1 << 20


class WideSocket(socket.socket):
    """A socket whose `recv` returns up to `PIECE` bytes, also where fewer are asked for."""

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        return super().recv(max(bufsize, PIECE), flags)


class DirectSocket(KafkaNetSocket):  # type: ignore[misc]
    """Connects as its base class does. TLS puts a socket of its own around the one made here."""

    SCHEMES = ("moebus-direct",)

    def socket(
        self,
        family: int = socket.AF_UNSPEC,
        sock_type: int = socket.SOCK_STREAM,
        proto: int = socket.IPPROTO_TCP,
    ) -> socket.socket:
        return WideSocket(family, sock_type, proto)

    async def sock_connect(self, net: Any, sock: Any, sockaddr: Any, timeout_at: float | None = None) -> Any:
        try:
            return await super().sock_connect(net, sock, sockaddr, timeout_at=timeout_at)
        except BaseException:
            sock.close()
            raise
