"""server.properties and the command line of one node, as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moebus.broker.local.state import Node

TAG = "-Dmoebus.node="
"""JVM argument that names the node's directory: how its process is recognised without the state file."""


def escape(value: str) -> str:
    """A value as java.util.Properties reads it back: ISO 8859-1 with escapes."""
    text = value.replace("\\", "\\\\")
    return "".join(c if " " <= c <= "~" else "".join(f"\\u{unit:04x}" for unit in _utf16(c)) for c in text)


def _utf16(character: str) -> list[int]:
    raw = character.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(raw[i : i + 2], "big") for i in range(0, len(raw), 2)]


def server_properties(node: Node, nodes: Sequence[Node]) -> str:
    """Settings of `node` in a cluster of `nodes`. Everything listens on 127.0.0.1 only."""
    replicas = len(nodes)
    in_sync = 2 if replicas >= 3 else 1
    settings: dict[str, object] = {
        "process.roles": "broker,controller",
        "node.id": node.id,
        "controller.quorum.voters": ",".join(f"{n.id}@127.0.0.1:{n.controller_port}" for n in nodes),
        "listeners": f"PLAINTEXT://{node.address},CONTROLLER://127.0.0.1:{node.controller_port}",
        "advertised.listeners": f"PLAINTEXT://{node.address}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": node.data,
        # Topics are made by `moebus topics ensure`, never by a typing error.
        "auto.create.topics.enable": "false",
        "group.initial.rebalance.delay.ms": 0,
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        "offsets.topic.num.partitions": 4,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.num.partitions": 4,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.num.partitions": 4,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
        # A node that was killed can register again only after its old session has ended.
        "broker.session.timeout.ms": 3000,
        "broker.heartbeat.interval.ms": 500,
        # Two cores and a small heap: the cleaner alone would take 128 MiB.
        "num.network.threads": 2,
        "num.io.threads": 4,
        "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
    }
    return "".join(f"{key}={escape(str(value))}\n" for key, value in settings.items())


def java_command(
    java: Path, jars: Sequence[Path], log4j: Path, node: Node, *, heap_mb: int, archive: Sequence[str]
) -> list[str]:
    """Command line of a node, without Kafka's class and its arguments. `archive`: options of the class archive."""
    return [
        str(java),
        f"-Xmx{heap_mb}m",
        # Starting fast matters more here than running at full speed for days.
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "-XX:-UsePerfData",
        *archive,
        "-Djava.net.preferIPv4Stack=true",
        "-Djava.awt.headless=true",
        f"-Dlog4j2.configurationFile={log4j.as_uri()}",
        f"{TAG}{node.directory}",
        "-cp",
        ":".join(str(jar) for jar in jars),
    ]
