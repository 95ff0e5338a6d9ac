"""Jobs of the pipeline: a rollout (its chunks, then its END) and a fence (a DELETE or CLEAR for every partition)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from moebus.broker.errors import TopicMissing
from moebus.broker.ports import LogAdmin, OutRecord, Position
from moebus.producers.routing.pipeline import Job
from moebus.producers.routing.receipt import FenceStored, Stored
from moebus.producers.routing.submission import Submission
from moebus.schemas.attempt import attempt_text
from moebus.schemas.headers import BINARY_TYPE, build_headers
from moebus.schemas.model_card import ModelCard
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


Acknowledged = Callable[[dict[str, int], int], None]
"""(records by kind, bytes of their values) of a job that is stored."""


def rollout_job(
    submission: Submission,
    card: ModelCard,
    wire: Wire,
    traceparent: str | None,
    future: Future[Stored],
    finish: Callable[[Exception | None], None],
    acknowledged: Acknowledged,
) -> Job:
    """`finish` runs before the receipt settles: it gives the bytes back."""
    sizes: list[int] = []

    def records() -> Iterator[OutRecord]:
        key = partition_key(submission.header.run, submission.header.group)
        headers = wire.headers(submission.ref.attempt, traceparent)
        encoded = encode_attempt(
            submission.routes, submission.header, card, submission.outcome, versions=submission.versions
        )
        for value in encoded:
            sizes.append(len(value))
            yield OutRecord(wire.topic, value, key, headers)

    def settle(outcome: list[Position] | Exception) -> None:
        if isinstance(outcome, Exception):
            finish(outcome)
            future.set_exception(outcome)
            return
        finish(None)
        acknowledged({"chunk": len(outcome) - 1, "end": 1}, sum(sizes))
        future.set_result(Stored(submission.ref, outcome[-1], len(outcome), sum(sizes)))

    return Job(submission.name, records, settle)


def fence_job(
    fence: Delete | Clear,
    name: str,
    wire: Wire,
    admin: LogAdmin,
    future: Future[FenceStored],
    acknowledged: Acknowledged,
) -> Job:
    """One record with one id to every partition the topic has."""
    value = encode(fence)
    text = attempt_text(fence.id)

    def records() -> Iterator[OutRecord]:
        found = admin.describe([wire.topic], timeout=2.0)
        if wire.topic not in found:
            raise TopicMissing(f"topic {wire.topic} does not exist; `moebus topics ensure` creates it")
        headers, key = wire.headers(text, None), record_key(fence)
        return iter([OutRecord(wire.topic, value, key, headers, p) for p in range(found[wire.topic].partitions)])

    def settle(outcome: list[Position] | Exception) -> None:
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
            return
        acknowledged({fence.kind.name.lower(): len(outcome)}, len(value) * len(outcome))
        future.set_result(FenceStored(text, {position.partition: position for position in outcome}))

    return Job(name, records, settle)
