"""The log that a store follows: which one it is, how many partitions it has, where they begin and end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from moebus.broker.errors import BrokerUnavailable, TopicMissing
from moebus.broker.ports import LogAdmin, TopicPartition
from moebus.consumers.store.partition import Guard
from moebus.consumers.store.progress import Progress
from moebus.observability.log import get_logger
from moebus.schemas.errors import SettingsError

_log = get_logger(__name__)
_RETRY = 1.0
_TIMEOUT = 5.0
_FEW = 5


@dataclass(frozen=True, slots=True)
class Found:
    """The log as it was found. `numbers`: the partitions to follow; `total`: all that the topic has."""

    guard: Guard
    numbers: tuple[int, ...]
    total: int
    starts: dict[int, int]
    ends: dict[int, int]


class Source:
    """Thread-safe as far as the admin is. `total` is 0 until the log was found."""

    def __init__(self, admin: LogAdmin, topic: str, partitions: Sequence[int] | None) -> None:
        """`partitions`: those to follow, None for all."""
        self.topic = topic
        self.total = 0
        self._admin = admin
        self._wanted = tuple(sorted(set(partitions))) if partitions is not None else None

    def wait(self, progress: Progress, stopping: threading.Event) -> Found | None:
        """The log, once brokers and topic are there; None when told to stop first.

        Raises:
            SettingsError: a partition that the topic does not have.
        """
        said = ""
        while not stopping.is_set():
            try:
                return self._find()
            except (BrokerUnavailable, TopicMissing) as error:
                progress.wait_for(str(error))
                if str(error) != said:
                    _log.warning("store.waiting", f"{error}; the store waits and goes on by itself")
                    said = str(error)
                stopping.wait(_RETRY)
        return None

    def guard(self) -> Guard:
        """Which log it is now. Raises BrokerUnavailable or TopicMissing."""
        info = self._admin.describe([self.topic], _TIMEOUT).get(self.topic)
        if info is None:
            raise TopicMissing(f"{self.topic} does not exist: run `moebus topics ensure`")
        self.total = info.partitions
        return Guard(self._admin.cluster_id(_TIMEOUT), info.topic_id)

    def count(self) -> int:
        """How many partitions the topic has. Raises BrokerUnavailable or TopicMissing."""
        self.guard()
        return self.total

    def range(self, tps: Sequence[TopicPartition]) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        """First offsets and log ends. Raises BrokerUnavailable or TopicMissing."""
        return self._admin.start_offsets(tps, _TIMEOUT), self._admin.end_offsets(tps, _TIMEOUT)

    def ends(self, numbers: Sequence[int]) -> dict[int, int]:
        """Log ends by partition. Raises BrokerUnavailable or TopicMissing."""
        found = self._admin.end_offsets([TopicPartition(self.topic, number) for number in numbers], _TIMEOUT)
        return {tp.partition: end for tp, end in found.items()}

    def _find(self) -> Found:
        guard = self.guard()
        numbers = tuple(range(self.total)) if self._wanted is None else self._wanted
        strange = [number for number in numbers if not 0 <= number < self.total]
        if strange or not numbers:
            text = ", ".join(map(str, strange[:_FEW])) or "none"
            text += f" and {len(strange) - _FEW} more" if len(strange) > _FEW else ""
            raise SettingsError(f"partitions {text}: {self.topic} has the partitions 0 to {self.total - 1}")
        tps = [TopicPartition(self.topic, number) for number in numbers]
        starts, ends = self.range(tps)
        by_number = {tp.partition: starts[tp] for tp in tps}, {tp.partition: ends[tp] for tp in tps}
        return Found(guard, numbers, self.total, *by_number)
