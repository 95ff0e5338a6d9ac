"""A consumer group of the in-memory log: eager rebalance, range assignment, committed offsets.

As in Kafka, a rebalance stops every member until all of them have polled (and so given their partitions up) or
have been silent for `MAX_POLL_INTERVAL`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moebus.broker.errors import PartitionLost
from moebus.broker.ports import TopicPartition

MAX_POLL_INTERVAL = 300.0


@dataclass(eq=False)
class Member:
    """One reader of the group. `joined`: it has given up its partitions for the rebalance under way."""

    name: str
    topics: tuple[str, ...]
    last_poll: float
    owned: tuple[TopicPartition, ...] = ()
    generation: int = -1
    joined: bool = False


@dataclass
class Group:
    """State of one group; the cluster's lock guards it. `partitions(topic)`: how many it has, 0 if missing."""

    name: str
    partitions: Callable[[str], int]
    committed: dict[TopicPartition, int] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)
    generation: int = 0
    rebalancing: bool = False
    planned: dict[TopicPartition, Member] = field(default_factory=dict)

    def add(self, member: Member) -> None:
        self.members.append(member)
        self.rebalance()

    def remove(self, member: Member) -> None:
        if member in self.members:
            self.members.remove(member)
            self.rebalance()

    def rebalance(self) -> None:
        self.rebalancing = True
        for member in self.members:
            member.joined = False

    def tick(self, now: float) -> None:
        """Drops silent members, notices topics that came or grew, ends the rebalance when all have joined."""
        for member in [m for m in self.members if now - m.last_poll > MAX_POLL_INTERVAL]:
            self.remove(member)
        if not self.rebalancing and set(self.planned) != {tp for m in self.members for tp in self._subscribed(m)}:
            self.rebalance()
        if self.rebalancing and self.members and all(member.joined for member in self.members):
            self.rebalancing = False
            self.generation += 1
            self.planned = self._plan()

    def _subscribed(self, member: Member) -> list[TopicPartition]:
        return [TopicPartition(topic, n) for topic in member.topics for n in range(self.partitions(topic))]

    def _plan(self) -> dict[TopicPartition, Member]:
        plan: dict[TopicPartition, Member] = {}
        for topic in sorted({topic for member in self.members for topic in member.topics}):
            takers = [member for member in self.members if topic in member.topics]
            count = self.partitions(topic)
            for number in range(count):
                plan[TopicPartition(topic, number)] = takers[_range_owner(number, count, len(takers))]
        return plan

    def assignment(self, member: Member) -> tuple[TopicPartition, ...]:
        return tuple(tp for tp, owner in self.planned.items() if owner is member)

    def commit(self, member: Member, positions: Mapping[TopicPartition, int]) -> None:
        """Raises PartitionLost, and stores nothing, unless the member owns every partition now."""
        lost = lost_partitions(positions, member.owned if member in self.members else ())
        if lost is not None:
            raise lost
        self.committed.update(positions)


def _range_owner(number: int, partitions: int, members: int) -> int:
    """Kafka's range assignor: contiguous runs, the first members get one more where it does not divide."""
    each, more = divmod(partitions, members)
    boundary = more * (each + 1)
    return number // (each + 1) if number < boundary else more + (number - boundary) // each


def lost_partitions(wanted: Mapping[TopicPartition, int], owned: Sequence[TopicPartition]) -> PartitionLost | None:
    """The error of a commit that names partitions outside `owned`, else None."""
    missing = sorted(str(tp) for tp in wanted if tp not in owned)
    if not missing:
        return None
    return PartitionLost(f"commit of {', '.join(missing)}: not assigned to this member now; nothing was committed")
