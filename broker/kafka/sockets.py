"""Plain connections for kafka-python that are closed when they fail and read in large pieces.

kafka-python 3.0 leaves the socket of each failed attempt to the garbage collector: one a second for every client while
a broker is down. And it reads 4 KiB at a time, giving Python's lock away and waiting for it again each time: 512 times
for 2.1 MB of routes. Its place for connections of another kind is the proxy's URL.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any

from kafka.net.inet import KafkaNetSocket

DIRECT = "moebus-direct://"
"""The `proxy_url` that selects this class."""
PIECE = 1 << 20
TLS_RECORD = 16 << 10
"""What one read of TLS gives at most."""


class EndFollows(BlockingIOError):
    """The end has come right behind data; it is told by the next read."""


class LastWords:
    """Lets what the peer sent before it hung up be taken first: the client throws away what it received if the end
    comes in the same go, such as why a password was refused."""

    _taken = True

    def end_apart(self, receive: Callable[[], bytes]) -> bytes:
        """What `receive` gives. Raises EndFollows in place of the end where data came since the last time that nothing
        was there; and what `receive` raises."""
        try:
            received = receive()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._taken = True
            raise
        if not received and not self._taken:
            self._taken = True
            raise EndFollows
        self._taken = not received
        return received


class WideSocket(LastWords, socket.socket):
    """A socket whose `recv` returns up to `PIECE` bytes, also where fewer are asked for."""

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        return self.end_apart(lambda: socket.socket.recv(self, max(bufsize, PIECE), flags))


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


class ClosingSSLSocket(LastWords, ssl.SSLSocket):
    """Closes itself where its handshake fails: the client leaves it to the garbage collector."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return self.end_apart(lambda: ssl.SSLSocket.recv(self, max(buflen, TLS_RECORD), flags))
        except EndFollows:  # TLS has ended, its connection need not have: now there is something to wake up for
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self, socket.SHUT_RD)
            raise

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except BaseException:
            self.close()
            raise


def tls_context(cafile: str | None, certfile: str | None, keyfile: str | None) -> ssl.SSLContext:
    """As kafka-python makes it of the same files: TLS 1.2 or newer, host names compared. Without `cafile` the system's
    authorities are asked. Raises OSError where a file cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sslsocket_class = ClosingSSLSocket
    if cafile is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(cafile)
    if certfile is not None:
        context.load_cert_chain(certfile, keyfile)
    return context
