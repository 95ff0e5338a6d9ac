"""Jobs of the pipeline: a rollout (its chunks, then its END) and a fence (a DELETE or CLEAR for every partition)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moebus.broker.errors import TopicMissing
from moebus.broker.ports import LogAdmin, OutRecord, Position
from moebus.observability.clock import Clock
from moebus.producers.routing.errors import RoutesDropped
from moebus.producers.routing.parcel import MAX_AGE_MS, Parcel, Sent, Settle
from moebus.producers.routing.pipeline import Job
from moebus.schemas.attempt import attempt_text
from moebus.schemas.headers import BINARY_TYPE, build_headers
from moebus.schemas.record import Clear, Delete, encode, encode_attempt, record_key
from moebus.schemas.rollout import partition_key


@dataclass(frozen=True, slots=True)
class Wire:
    """Where records go and what their headers say."""

    topic: str
    producer_id: str

    def headers(self, correlation_id: str, traceparent: str | None) -> list[tuple[str, bytes | None]]:
        return build_headers(
            correlation_id=correlation_id,
            producer_id=self.producer_id,
            traceparent=traceparent,
            content_type=BINARY_TYPE,
        )


def rollout_job(parcel: Parcel, wire: Wire, clock: Clock, settle: Settle) -> Job:
    """`parcel.rows` must have the card's type and stay as they are until `settle` was called."""
    sizes: list[int] = []

    def records() -> Iterator[OutRecord]:
        if clock.now_ms() - parcel.created_ms > MAX_AGE_MS:
            raise RoutesDropped(f"{parcel.name}: older than 20 hours, so a delete of it may be forgotten; not sent")
        rows = parcel.rows.view(parcel.card.dtype)
        key = partition_key(parcel.header.run, parcel.header.group)
        headers = wire.headers(parcel.header.attempt_text, parcel.traceparent)
        encoded = encode_attempt(
            rows, parcel.header, parcel.card, parcel.outcome,
            versions=parcel.versions, codec=parcel.codec, target=parcel.target, check=True,
        )  # fmt: skip
        for value in encoded:
            sizes.append(len(value))
            yield OutRecord(wire.topic, value, key, headers)

    def done(outcome: list[Position] | Exception) -> None:
        if isinstance(outcome, Exception):
            settle(outcome)
            return
        settle(Sent((outcome[-1],), {"chunk": len(outcome) - 1, "end": 1}, sum(sizes)))

    return Job(parcel.name, records, done)


def fence_job(fence: Delete | Clear, name: str, wire: Wire, admin: LogAdmin, settle: Settle) -> Job:
    """One record with one id to every partition the topic has."""
    value = encode(fence)

    def records() -> Iterator[OutRecord]:
        found = admin.describe([wire.topic], timeout=2.0)
        if wire.topic not in found:
            raise TopicMissing(f"topic {wire.topic} does not exist; `moebus topics ensure` creates it")
        headers, key = wire.headers(attempt_text(fence.id), None), record_key(fence)
        return iter([OutRecord(wire.topic, value, key, headers, p) for p in range(found[wire.topic].partitions)])

    def done(outcome: list[Position] | Exception) -> None:
        if isinstance(outcome, Exception):
            settle(outcome)
            return
        settle(Sent(tuple(outcome), {fence.kind.name.lower(): len(outcome)}, len(value) * len(outcome)))

    return Job(name, records, done)
