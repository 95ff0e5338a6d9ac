"""LogAdmin on the in-memory log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moebus.broker.errors import TopicMissing
from moebus.broker.memory.cluster import Cluster
from moebus.broker.memory.log import Topic
from moebus.broker.ports import TopicInfo, TopicPartition


class MemoryAdmin:
    """See `LogAdmin`. During an outage every call waits for up to its timeout."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def cluster_id(self, timeout: float = 10.0) -> str:
        with self._cluster.changed:
            self._cluster.await_up(timeout)
            return self._cluster.cluster_id

    def broker_count(self, timeout: float = 10.0) -> int:
        with self._cluster.changed:
            self._cluster.await_up(timeout)
            return self._cluster.brokers

    def describe(self, names: Sequence[str], timeout: float = 10.0) -> dict[str, TopicInfo]:
        with self._cluster.changed:
            self._cluster.await_up(timeout)
            topics = self._cluster.topics
            return {name: topics[name].info() for name in names if name in topics}

    def create(
        self, name: str, *, partitions: int, replication: int, config: Mapping[str, str], timeout: float = 10.0
    ) -> bool:
        with self._cluster.changed:
            self._cluster.await_up(timeout)
            if name in self._cluster.topics:
                return False
            self._cluster.topics[name] = Topic.make(name, partitions, replication, config)
            self._cluster.changed.notify_all()
        self._cluster.pump()
        return True

    def set_config(self, name: str, config: Mapping[str, str], timeout: float = 10.0) -> None:
        with self._cluster.changed:
            self._cluster.await_up(timeout)
            if name not in self._cluster.topics:
                raise TopicMissing(f"{name} does not exist: run `moebus topics ensure`")
            self._cluster.topics[name].config.update(config)

    def start_offsets(self, tps: Sequence[TopicPartition], timeout: float = 10.0) -> dict[TopicPartition, int]:
        with self._cluster.changed:
            self._cluster.await_up(timeout)
            return {tp: self._cluster.existing_log(tp).start for tp in tps}

    def end_offsets(self, tps: Sequence[TopicPartition], timeout: float = 10.0) -> dict[TopicPartition, int]:
        with self._cluster.changed:
            self._cluster.await_up(timeout)
            return {tp: self._cluster.existing_log(tp).end for tp in tps}

    def close(self) -> None:
        """Nothing to release."""
