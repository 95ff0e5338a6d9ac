"""What is known of a local cluster: values, and the file `cluster.json` that other processes read them from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moebus.broker.local.errors import LocalKafkaError
from moebus.broker.local.jars import write_atomic
from moebus.broker.local.process import ProcessId

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Node:
    """One broker that is its own controller. `process` is None when it was never started or was stopped."""

    id: int
    port: int
    controller_port: int
    directory: Path
    process: ProcessId | None = None

    @property
    def log(self) -> Path:
        return self.directory / "server.log"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def alive(self) -> bool:
        """Whether this very process runs (not another one that has its pid by now)."""
        return self.process is not None and self.process.alive()


@dataclass(frozen=True, slots=True)
class ClusterState:
    """A cluster. `watcher` kills the nodes when their owner dies; `recording` is a class archive not finished yet."""

    name: str
    cluster_id: str
    kafka: str
    nodes: tuple[Node, ...]
    watcher: ProcessId | None = None
    recording: Path | None = None
    archive: Path | None = None

    @property
    def bootstrap(self) -> str:
        return ",".join(node.address for node in self.nodes)

    def node(self, number: int) -> Node:
        for node in self.nodes:
            if node.id == number:
                return node
        raise LocalKafkaError(f"there is no node {number}: this cluster has 1 to {len(self.nodes)}")

    def with_node(self, changed: Node) -> ClusterState:
        return replace(self, nodes=tuple(changed if node.id == changed.id else node for node in self.nodes))


def state_file(directory: Path) -> Path:
    return directory / "cluster.json"


def to_json(state: ClusterState) -> str:
    return json.dumps({"format": FORMAT, **asdict(state)}, indent=1, default=str) + "\n"


def from_json(text: str) -> ClusterState:
    """Raises ValueError, KeyError or TypeError for anything that `to_json` did not write."""
    record = json.loads(text)
    if record["format"] != FORMAT:
        raise ValueError(f"format {record['format']!r} instead of {FORMAT}")
    return ClusterState(
        name=str(record["name"]),
        cluster_id=str(record["cluster_id"]),
        kafka=str(record["kafka"]),
        nodes=tuple(_node(node) for node in record["nodes"]),
        watcher=_process(record["watcher"]),
        recording=_path(record["recording"]),
        archive=_path(record["archive"]),
    )


def _node(record: dict[str, Any]) -> Node:
    return Node(
        id=int(record["id"]),
        port=int(record["port"]),
        controller_port=int(record["controller_port"]),
        directory=Path(record["directory"]),
        process=_process(record["process"]),
    )


def _process(record: dict[str, Any] | None) -> ProcessId | None:
    return None if record is None else ProcessId(int(record["pid"]), int(record["start"]))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def save(directory: Path, state: ClusterState) -> None:
    write_atomic(state_file(directory), to_json(state))


def load(directory: Path) -> ClusterState | None:
    """The cluster recorded in `directory`, None when there is none.

    Raises:
        LocalKafkaError: the file is there and cannot be read.
    """
    path = state_file(directory)
    try:
        return from_json(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LocalKafkaError(f"{path} is damaged ({error!r}): delete {directory} to start afresh") from error
