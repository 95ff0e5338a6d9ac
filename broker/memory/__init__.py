"""The log in memory: passes the same contract suite as the Kafka adapter (`tests/contract/`)."""

from moebus.broker.memory.broker import MemoryBroker

__all__ = ["MemoryBroker"]
