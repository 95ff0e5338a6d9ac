"""RolloutStream on the log in memory: whole rollouts, acks in any order, rebalances, little memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import OutRecord, TopicPartition
from moebus.consumers.reader.item import StreamItem
from moebus.consumers.reader.rollout import Rollout
from moebus.consumers.reader.stream import RolloutStream, StreamOptions
from moebus.observability.clock import SystemClock
from moebus.observability.metrics import Metrics
from moebus.schemas.attempt import attempt_text
from moebus.schemas.record import Base, Delete, Outcome, encode
from moebus.schemas.route_errors import RouteDeleted, RouteError, RouteNeverComing, RouteNotYet, StoreCatchingUp
from moebus.schemas.route_ref import RouteRef
from tests.support.routes import CARD, Attempt, attempt_id, make_attempt, make_routes
from tests.support.wait import wait_until

TOPIC = "t.routes.v1"
TP = TopicPartition(TOPIC, 0)


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    memory = MemoryBroker()
    memory.create(TOPIC, 1)
    yield memory
    memory.close()


def no_store(ref: RouteRef, wait: float) -> Rollout:
    raise AssertionError(f"nobody asked for {ref}")


def same(rollout: Rollout) -> Rollout:
    return rollout


def open_stream(
    broker: MemoryBroker, bases: object = no_store, idle: float | None = 0.0, **options: float
) -> RolloutStream:
    return RolloutStream(
        broker, TOPIC, run="run", group="trainer", idle_timeout=idle, bases=bases, check_card=same,  # type: ignore[arg-type]
        options=StreamOptions(**{"commit_interval": 0.0, **options}),  # type: ignore[arg-type]
        metrics=Metrics(), clock=SystemClock(), on_close=lambda stream: None,
    )  # fmt: skip


def put(broker: MemoryBroker, *values: bytes | None) -> None:
    writer = broker.writer("test")
    for value in values:
        writer.append(OutRecord(TOPIC, value, b"key")).result(5)
    writer.close(5)


def attempts(count: int, **options: int) -> list[Attempt]:
    return [make_attempt(f"a:{i}:0:0", number=i + 1, **options) for i in range(count)]  # type: ignore[arg-type]


def committed(broker: MemoryBroker, stream: RolloutStream) -> int | None:
    return stream._reader.committed(TP)


def take(stream: RolloutStream, count: int) -> list[StreamItem]:
    items: list[StreamItem] = []
    wait_until(lambda: step(stream, items) and len(items) >= count, what="rollouts")
    return items


def step(stream: RolloutStream, into: list[StreamItem]) -> bool:
    """One turn of the loop; what comes goes to `into`."""
    item = next(stream, None)
    into += [item] if item else []
    return True


def test_whole_rollouts_come_out_equal_and_the_commit_follows_the_acks(broker: MemoryBroker) -> None:
    sent = attempts(4, chunks=2)
    put(broker, *(value for one in sent for value in one.records))
    with open_stream(broker) as stream:
        items = take(stream, 4)
        for item, one in zip(items, sent, strict=True):
            assert np.array_equal(item.rollout.routes, one.routes)
            assert item.ref.attempt == one.header.attempt_text
        assert items[1].position == f"{TOPIC}/0/5"
        assert items[2].ack()
        assert items[1].ack()
        assert next(stream, None) is None
        assert committed(broker, stream) in (None, 0)
        assert items[0].ack()
        assert items[0].ack(), "twice is harmless"
        assert next(stream, None) is None
        assert committed(broker, stream) == 9, "the offset of the one that is still in use"
        items[3].ack()
    with open_stream(broker) as again:
        assert next(again, None) is None
        assert committed(broker, again) == 12


def test_what_was_not_acked_comes_again_after_a_restart(broker: MemoryBroker) -> None:
    put(broker, *(value for one in attempts(3) for value in one.records))
    with open_stream(broker) as stream:
        take(stream, 3)[0].ack()
    with open_stream(broker) as stream:
        assert [item.ref.rollout_id for item in take(stream, 2)] == ["a:1:0:0", "a:2:0:0"]


def test_half_a_rollout_is_never_seen_and_comes_once_it_is_whole(broker: MemoryBroker) -> None:
    one = make_attempt(chunks=3, rows=9)
    put(broker, *one.records[:2])
    with open_stream(broker) as stream:
        assert next(stream, None) is None
    put(broker, *one.records[2:])
    with open_stream(broker) as stream:
        (item,) = take(stream, 1)
        assert np.array_equal(item.rollout.routes, one.routes), "the chunks before the restart were read again"


def test_a_rebalance_drops_the_partition_and_an_old_ack_says_so(broker: MemoryBroker) -> None:
    put(broker, *(value for one in attempts(3) for value in one.records))
    first = open_stream(broker)
    items = take(first, 3)
    items[0].ack()
    assert next(first, None) is None  # commits
    second = open_stream(broker)
    later: list[StreamItem] = []
    wait_until(
        lambda: (step(second, later) and step(first, later) and not first._partitions) or later, what="rebalance"
    )
    assert items[1].ack() is False
    assert items[2].ack() is False
    wait_until(lambda: step(second, later) and step(first, later) and len(later) == 2, what="delivery again")
    assert [item.ref.rollout_id for item in later] == ["a:1:0:0", "a:2:0:0"], "not what was committed"
    assert all(item.ack() for item in later)
    first.close()
    second.close()
    with open_stream(broker) as third:
        assert next(third, None) is None
        assert committed(broker, third) == 6


def test_a_delete_before_the_end_keeps_it_away(broker: MemoryBroker) -> None:
    one, ten = make_attempt("a:1:0:0", number=1), make_attempt("a:10:0:0", number=2)
    put(broker, *one.chunks, *ten.chunks, encode(Delete("run", "a:1", attempt_id(9))), one.end, ten.end)
    with open_stream(broker) as stream:
        (item,) = take(stream, 1)
        assert item.ref.rollout_id == "a:10:0:0"
        assert next(stream, None) is None
        assert stream.tally()["deleted"] == 1


def test_above_the_bound_chunks_are_read_again(broker: MemoryBroker) -> None:
    sent = [make_attempt(f"a:{i}:0:0", number=i + 1, chunks=4, rows=400) for i in range(3)]
    size = len(sent[0].records[0])
    put(broker, *(one.records[i] for i in range(5) for one in sent))
    with open_stream(broker, max_open_bytes=3 * size) as stream:
        items = take(stream, 3)
        for item, one in zip(items, sent, strict=True):
            assert np.array_equal(item.rollout.routes, one.routes)


def test_the_bound_holds_while_attempts_stay_open(broker: MemoryBroker) -> None:
    sent = [make_attempt(f"a:{i}:0:0", number=i + 1, chunks=4, rows=400) for i in range(20)]
    size = len(sent[0].records[0])
    put(broker, *(value for one in sent for value in one.chunks))
    with open_stream(broker, max_open_bytes=5 * size) as stream:
        assert next(stream, None) is None
        wait_until(lambda: (next(stream, None), stream._partitions)[1], what="records read")
        (partition,) = stream._partitions.values()
        wait_until(lambda: (next(stream, None), partition.assembler.watermark.position == 80)[1], what="all read")
        assert 0 < partition.assembler.held_bytes <= 5 * size


def test_a_chunk_that_retention_took_is_set_aside(broker: MemoryBroker) -> None:
    one, good = make_attempt("a:0:0:0", number=1, chunks=2, rows=400), make_attempt("a:1:0:0", number=2)
    put(broker, *one.chunks)
    with open_stream(broker, max_open_bytes=1) as stream:
        wait_until(lambda: (next(stream, None), stream._partitions)[1], what="records read")
        put(broker, one.end, *good.records)
        broker.truncate(TP, 1)
        (item,) = take(stream, 1)
        assert item.ref.rollout_id == "a:1:0:0"
        assert stream.tally()["corrupt"] == 1


def test_bad_content_is_set_aside_and_does_not_hold_the_commit(broker: MemoryBroker) -> None:
    one, other, good = make_attempt(chunks=2, seed=1), make_attempt(chunks=2, seed=2), make_attempt("b", number=2)
    put(broker, one.records[0], other.records[1], one.end, None, b"junk", *good.records)
    with open_stream(broker) as stream:
        (item,) = take(stream, 1)
        item.ack()
        assert next(stream, None) is None
        assert committed(broker, stream) == 7
        assert (stream.tally()["corrupt"], stream.tally()["bad_records"]) == (1, 2)


def test_other_statuses_are_passed_over(broker: MemoryBroker) -> None:
    put(broker, *make_attempt("a", number=1, outcome=Outcome(status="aborted")).records)
    with open_stream(broker) as stream:
        wait_until(lambda: (next(stream, None), stream.tally()["incomplete"])[1], what="END read")
        assert next(stream, None) is None


def test_base_rows_come_from_the_store_and_are_waited_for(broker: MemoryBroker) -> None:
    base = Base(attempt_id(7), 4, "a:0:0:0")
    turn, orphan = (
        make_attempt("a:0:1:0", number=8, base=base),
        make_attempt("a:0:2:0", number=9, base=Base(attempt_id(6), 4, "x")),
    )
    put(broker, *turn.records, *orphan.records)
    before = make_routes(4, seed=70)
    gone = [RouteNeverComing("base gone"), RouteNeverComing("base_not_held")]  # the base, then the attempt itself
    answers = [StoreCatchingUp("at 3 of 9"), None, *gone]

    def bases(ref: RouteRef, wait: float) -> Rollout:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        assert ref.attempt == attempt_text(attempt_id(7))
        return Rollout(ref, before, CARD.moe_layers, CARD.top_k, CARD.num_experts, "complete")

    with open_stream(broker, bases) as stream:
        with pytest.raises(StoreCatchingUp):
            wait_until(lambda: next(stream, None), what="the base to be asked for")
        (item,) = take(stream, 1)  # the same rollout, asked for again
        assert np.array_equal(item.rollout.routes, np.concatenate([before, turn.routes]))
        assert next(stream, None) is None
        assert stream.tally()["corrupt"] == 1
    assert not answers


@pytest.mark.parametrize("base_is", [RouteNotYet, RouteDeleted, RouteNeverComing])
def test_where_the_base_cannot_be_had_the_store_is_asked_for_the_attempt(
    broker: MemoryBroker, base_is: type[RouteError]
) -> None:
    """Its base was deleted after it began: the store keeps those rows. One whose base never came holds up nobody."""
    pinned = make_attempt("a:0:1:0", number=8, base=Base(attempt_id(7), 4, "a:0:0:0"), group="a")
    lost = make_attempt("a:0:2:0", number=9, base=Base(attempt_id(6), 4, "x"), group="a")
    plain = make_attempt("a:0:3:0", number=10, group="a")
    put(broker, *lost.records, *pinned.records, *plain.records)
    whole = np.concatenate([make_routes(4, seed=70), pinned.routes])
    waits: list[float] = []

    def bases(ref: RouteRef, wait: float) -> Rollout:
        if ref.attempt == attempt_text(attempt_id(8)):
            waits.append(wait)
            return Rollout(ref, whole, CARD.moe_layers, CARD.top_k, CARD.num_experts, "complete")
        if ref.attempt == attempt_text(attempt_id(9)):
            raise RouteNeverComing("lost (base_not_held)")
        raise base_is("no base")

    with open_stream(broker, bases) as stream:
        first, second = take(stream, 2)
        assert np.array_equal(first.rollout.routes, whole)
        assert np.array_equal(second.rollout.routes, plain.routes)
        assert next(stream, None) is None
        assert stream.tally()["corrupt"] == 1
    assert waits[0] > 0


def test_acks_after_close_say_that_they_are_lost(broker: MemoryBroker) -> None:
    put(broker, *make_attempt().records)
    stream = open_stream(broker)
    (item,) = take(stream, 1)
    stream.close()
    stream.close()
    assert item.ack() is False
    assert list(stream) == []


def test_the_idle_timeout_ends_the_iteration(broker: MemoryBroker) -> None:
    put(broker, *make_attempt().records)
    with open_stream(broker, idle=0.2) as stream:
        assert [item.ref.rollout_id for item in stream] == ["a:0:0:0"]
