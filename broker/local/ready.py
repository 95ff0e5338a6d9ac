"""Waiting until nodes serve. The one place of the runner that talks Kafka."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

from moebus.broker.local.errors import LocalKafkaError, with_log
from moebus.broker.local.state import Node

STEP = 0.05


class NodeEnded(LocalKafkaError):
    """A node's process ended while it was starting."""

    def __init__(self, node: Node) -> None:
        super().__init__(with_log(f"Kafka node {node.id} ended while it was starting", node.log))
        self.node = node


def wait_ready(nodes: Sequence[Node], expected: frozenset[int], cluster_id: str, timeout: float) -> None:
    """Returns once each of `nodes`, asked on its own port, lists every broker of `expected` and answers for topics.

    Raises:
        NodeEnded: a process ended first.
        LocalKafkaError: not ready after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    for node in nodes:
        _until(partial(_refuses, node.port), node, nodes, deadline)
        _until(partial(_lacks, node, expected, cluster_id), node, nodes, deadline)


def _until(lacking: Callable[[], str | None], node: Node, nodes: Sequence[Node], deadline: float) -> None:
    while reason := lacking():
        for other in nodes:
            if not other.alive():
                raise NodeEnded(other)
        if time.monotonic() > deadline:
            raise LocalKafkaError(with_log(f"Kafka node {node.id} is not ready in time ({reason})", node.log))
        time.sleep(STEP)


def _refuses(port: int) -> str | None:
    """Why nobody can connect, None when one can."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError as error:
        return f"port {port}: {error}"
    return None


def _lacks(node: Node, expected: frozenset[int], cluster_id: str) -> str | None:
    """What is missing until this node serves, None when nothing is."""
    # Imported late: the commands and the watcher that only look at processes need no client.
    from moebus.broker.kafka import KafkaConfig
    from moebus.broker.kafka.clients import make_admin

    try:
        with closing(make_admin(KafkaConfig(bootstrap_servers=node.address, request_timeout=3.0), 3.0)) as admin:
            cluster = admin.describe_cluster()
            admin.list_topics()
    except Exception as error:  # whatever the client raises means: not yet; the last one is shown
        return f"{type(error).__name__}: {error}"
    if cluster["cluster_id"] != cluster_id:
        # Another Kafka took the port; ours ends by itself, which `_until` sees.
        return f"port {node.port} belongs to another Kafka"
    missing = expected - {int(broker["broker_id"]) for broker in cluster["brokers"] if not broker.get("is_fenced")}
    return f"it does not see node {min(missing)}" if missing else None
