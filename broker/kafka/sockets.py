"""Plain connections for kafka-python that are closed when they fail.

kafka-python 3.0 leaves the socket of each failed attempt to the garbage collector: one a second for every client while
a broker is down. Its place for connections of another kind is the proxy's URL.
"""

from __future__ import annotations

from typing import Any

from kafka.net.inet import KafkaNetSocket

DIRECT = "moebus-direct://"
"""The `proxy_url` that selects this class."""


class DirectSocket(KafkaNetSocket):  # type: ignore[misc]
    """Connects as its base class does."""

    SCHEMES = ("moebus-direct",)

    async def sock_connect(self, net: Any, sock: Any, sockaddr: Any, timeout_at: float | None = None) -> Any:
        try:
            return await super().sock_connect(net, sock, sockaddr, timeout_at=timeout_at)
        except BaseException:
            sock.close()
            raise
