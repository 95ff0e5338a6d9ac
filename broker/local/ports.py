"""Free loopback ports."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Collection

from moebus.broker.local.errors import LocalKafkaError

# Below Linux's ephemeral range (32768 and up): there an outgoing connection could take a port while its node is down.
RANGE = range(20_000, 32_000)


def is_free(port: int) -> bool:
    """Whether a server could listen on 127.0.0.1 at `port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            # Binding alone succeeds beside another SO_REUSEADDR socket that does not listen yet.
            probe.listen(1)
        except OSError:
            return False
    return True


def becomes_free(port: int, timeout: float) -> bool:
    """Whether it is free, or becomes so within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not is_free(port):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def free_ports(count: int, avoid: Collection[int] = (), rng: random.Random | None = None) -> list[int]:
    """`count` different free ports, drawn at random so that two clusters started together rarely meet."""
    draw = rng or random.SystemRandom()
    found: list[int] = []
    for port in draw.sample(RANGE, len(RANGE)):
        if len(found) == count:
            return found
        if port not in avoid and is_free(port):
            found.append(port)
    if len(found) == count:
        return found
    raise LocalKafkaError(f"no {count} free ports on 127.0.0.1 between {RANGE.start} and {RANGE.stop}")
