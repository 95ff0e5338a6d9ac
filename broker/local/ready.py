"""Waiting until nodes serve. The one place of the runner that talks Kafka."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

from moebus.broker.errors import BrokerUnavailable
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
        _until(partial(_listens, node.port), node, nodes, deadline, "it does not listen")
        serves = partial(_serves, node, expected, cluster_id)
        _until(serves, node, nodes, deadline, "it does not answer as a member of its cluster")


def _until(ready: Callable[[], bool], node: Node, nodes: Sequence[Node], deadline: float, lacking: str) -> None:
    while not ready():
        for other in nodes:
            if not other.alive():
                raise NodeEnded(other)
        if time.monotonic() > deadline:
            raise LocalKafkaError(with_log(f"Kafka node {node.id} is not ready in time: {lacking}", node.log))
        time.sleep(STEP)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _serves(node: Node, expected: frozenset[int], cluster_id: str) -> bool:
    # Imported late: the commands and the watcher that only look at processes need no client.
    from moebus.broker.kafka import KafkaConfig
    from moebus.broker.kafka.clients import make_admin

    try:
        with closing(make_admin(KafkaConfig(bootstrap_servers=node.address, request_timeout=3.0), 3.0)) as admin:
            cluster = admin.describe_cluster()
            admin.list_topics()
    except (BrokerUnavailable, RuntimeError, OSError):  # every error of kafka-python is a RuntimeError
        return False
    if cluster["cluster_id"] != cluster_id:
        return False  # another Kafka took the port; ours ends by itself, which `_until` sees
    return expected <= {int(broker["broker_id"]) for broker in cluster["brokers"] if not broker.get("is_fenced")}
