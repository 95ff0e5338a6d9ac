"""Complete attempts that came beside another one of the same identity: a request that was sent twice, perhaps."""

from __future__ import annotations

from moebus.consumers.store import keys
from moebus.consumers.store.doomed import hides
from moebus.consumers.store.ingest import Outcome
from moebus.consumers.store.partition import Partition
from moebus.consumers.store.state import AttemptState, status_of
from moebus.schemas.rollout import RolloutKey


class Repeats:
    """Of one store; the follower's thread asks and tells."""

    def __init__(self) -> None:
        self._turns: dict[int, tuple[int, set[RolloutKey]]] = {}

    def seen(self, partition: Partition, outcome: Outcome) -> bool:
        """Whether the attempt that `outcome` made whole is complete, and another one stands beside it."""
        turn, uncommitted = self._turns.get(partition.number, (None, set()))
        if turn != partition.turns:  # a commit, a rollback or a delete since: at worst one is not counted
            uncommitted = set()
            self._turns[partition.number] = (partition.turns, uncommitted)
        one = outcome.completed
        if one is None or status_of(one) != "complete":
            return False
        again = one.key in uncommitted or _is_committed(partition, one)
        uncommitted.add(one.key)
        return again


def _is_committed(partition: Partition, one: AttemptState) -> bool:
    with partition.reading() as (tables, pending):
        return any(
            status_of(other) == "complete" and other.header.attempt != one.header.attempt
            for other in tables.whole_attempts(keys.choice_range(one.key))
            if not any(hides(fence, one.key.run, one.key.rollout_id, other.header.epoch) for fence in pending)
        )
