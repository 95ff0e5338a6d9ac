"""The real Apache Kafka on one machine, for `moebus broker up`, the demo and the tests."""

from moebus.broker.local.cluster import LocalCluster
from moebus.broker.local.errors import LocalKafkaError, ToolMissing
from moebus.broker.local.paths import KAFKA_VERSION, default_directory
from moebus.broker.local.state import ClusterState, Node

__all__ = [
    "KAFKA_VERSION",
    "ClusterState",
    "LocalCluster",
    "LocalKafkaError",
    "Node",
    "ToolMissing",
    "default_directory",
]
