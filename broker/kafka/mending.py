"""Faults of kafka-python 3.0's consumer that its user has to make up for. The contract suite fails without each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kafka import errors as kafka_errors
from kafka.coordinator.base import MemberState

from moebus.broker.errors import BrokerUnavailable
from moebus.observability.log import get_logger

if TYPE_CHECKING:  # clients.py makes consumers with what is mended here
    from moebus.broker.kafka.clients import Consumer, GiveUp

_log = get_logger(__name__)
_STEP_MS = 500


def await_topics(consumer: Consumer, topics: Sequence[str], give_up: GiveUp) -> None:
    """Returns when the client knows the partitions of every topic.

    A member that joins before that is assigned nothing, and is told of partitions that come later after 5 minutes.

    Raises:
        BrokerUnavailable: `give_up()` became true first.
    """
    cluster, manager = consumer._cluster, consumer._manager
    said = False
    while not give_up():
        try:
            consumer._net.run(manager.wait_for, cluster.request_update(), _STEP_MS)
        except kafka_errors.KafkaError:
            continue  # no answer in time: asked again
        missing = [topic for topic in topics if not cluster.partitions_for_topic(topic)]
        if not missing:
            return
        if not said:
            said = True
            _log.warning("reader.waiting", f"a group member waits: topics are missing ({', '.join(missing)})")
        time.sleep(_STEP_MS / 1000)
    raise BrokerUnavailable("given up")


def finish_rejoin(consumer: Consumer) -> None:
    """Lets a rejoin that a `poll` could not wait for go on in the next one; called after each `poll`.

    When the rejoin was caused by a change of metadata, the client forgets it: it has left its partitions, sends no
    heartbeats, and never takes the new assignment.
    """
    coordinator = consumer._coordinator
    if coordinator.rejoining:
        coordinator.rejoin_needed = True


def has_joined(consumer: Consumer) -> bool:
    """Whether the member is through its last rebalance, as far as it knows."""
    coordinator = consumer._coordinator
    return bool(coordinator.state is MemberState.STABLE and not coordinator.rejoin_needed)


def forget_assignment(consumer: Consumer) -> None:
    """On revoke, before the rejoin: a partition that comes back starts at the group's commit.

    The client keeps the position of a partition that it gets again, so what its user dropped on revoke, unfinished,
    would not be read again by anyone.
    """
    consumer._subscription.assign_from_subscribed([])


def free_parked(consumer: Consumer) -> None:
    """Before each `poll`: records set aside while their partition was paused are found again.

    The client looks for them only when the records in line before have been dropped, not when they are used up.
    """
    fetcher = consumer._fetcher
    if fetcher._next_partition_records is not None and not fetcher._next_partition_records:
        fetcher._next_partition_records = None


def fetch_together(consumer: Consumer) -> None:
    """Once, after it was made: no fetch is sent while an answer waits to be taken.

    The client leaves the partitions of that answer out of the fetch. If the others have nothing new, the fetch stays at
    the broker for all of its `fetch_max_wait_ms`, half a second in which nothing is read of the partitions left out.
    That takes an answer that comes between a `poll`'s first look and its fetch: one of a thousand with short polls.
    """
    fetcher = consumer._fetcher
    create = fetcher._create_fetch_requests

    def create_fetch_requests() -> Any:
        return {} if fetcher._completed_fetches else create()

    fetcher._create_fetch_requests = create_fetch_requests
