"""RoutingPublisher on the log in memory: receipts, bounds, refusals, outages, the truth of flush and close."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from moebus.broker.errors import AppendFailed, AppendUnknown
from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import LogRecord, OutRecord, TopicPartition
from moebus.broker.topics import Topics
from moebus.observability.metrics import Metrics
from moebus.observability.settings import PublisherSettings
from moebus.producers.routing import PublisherClosed, PublisherSuspended, RoutesDropped, RoutingPublisher
from moebus.schemas.attempt import parse_attempt
from moebus.schemas.errors import InvalidInput
from moebus.schemas.record import Chunk, Clear, Delete, End, Record, assemble, decode, stored_checksum
from moebus.schemas.rollout import partition_key
from moebus.schemas.route_ref import token_hash
from tests.support.routes import CARD, make_routes, make_tokens
from tests.support.wait import wait_until

TOPICS = Topics("t")
PARTITIONS = 4
WAIT = 10.0


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    memory = MemoryBroker()
    memory.create(TOPICS.routes, PARTITIONS)
    yield memory
    memory.close()


def make(broker: MemoryBroker, metrics: Metrics | None = None, **options: object) -> RoutingPublisher:
    return RoutingPublisher(
        broker, TOPICS, run="run", card=CARD, options=PublisherSettings.model_validate(options), metrics=metrics
    )


def records(broker: MemoryBroker) -> list[LogRecord]:
    """Everything in the routes topic, by partition and offset."""
    reader = broker.reader("check")
    ends = broker.admin().end_offsets([TopicPartition(TOPICS.routes, p) for p in range(PARTITIONS)])
    reader.assign(dict.fromkeys(ends, 0))
    found: list[LogRecord] = []
    while len(found) < sum(ends.values()):
        found += reader.poll(1.0)
    reader.close()
    return sorted(found, key=lambda record: (record.partition, record.offset))


def decoded(broker: MemoryBroker) -> list[Record]:
    return [decode(record.value) for record in records(broker)]


def test_a_rollout_is_stored_whole_and_its_receipt_says_where(broker: MemoryBroker) -> None:
    routes, tokens = make_routes(10), make_tokens(11)
    metrics = Metrics()
    with make(broker, metrics) as publisher:
        receipt = publisher.submit(routes, "a:0:0:0", 3, token_ids=tokens, prompt_rows=4, versions=[(0, "v1")])
        assert receipt.ref.rows == 10
        assert receipt.ref.token_hash == token_hash(tokens[:10])
        assert receipt.ref.prompt_hash == token_hash(tokens[:4])
        stored = receipt.result(WAIT)
    chunk_record, end_record = records(broker)
    chunk, end = decode(chunk_record.value), decode(end_record.value)
    assert isinstance(chunk, Chunk)
    assert isinstance(end, End)
    assert chunk_record.value is not None
    assert np.array_equal(assemble(end, [chunk], [stored_checksum(chunk_record.value)]), routes)
    assert (end.status, end.prompt_rows, end.token_hash) == ("complete", 4, receipt.ref.token_hash)
    assert chunk.versions == ((0, "v1"),)
    assert end.header.attempt == parse_attempt(receipt.ref.attempt)
    assert (stored.end.partition, stored.end.offset) == (end_record.partition, end_record.offset)
    assert stored.records == 2
    assert end_record.key == partition_key("run", "a")
    assert end_record.header("correlation-id") == receipt.ref.attempt.encode()
    assert end_record.header("content-type") == b"application/octet-stream"
    assert metrics.value("moebus_routes_rollouts_total", outcome="stored") == 1
    assert metrics.value("moebus_routes_records_total", kind="end") == 1
    assert metrics.value("moebus_routes_buffer_bytes") == 0


def test_a_large_rollout_becomes_many_chunks(broker: MemoryBroker) -> None:
    with make(broker) as publisher:
        stored = publisher.submit(make_routes(400_000), "big").result(WAIT)
    assert stored.records == 5
    kinds = [type(record).__name__ for record in decoded(broker)]
    assert kinds == ["Chunk"] * 4 + ["End"]


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "uint16"])
def test_any_integer_type_is_taken_and_copied_once(broker: MemoryBroker, dtype: str) -> None:
    routes = make_routes(5).astype(dtype)
    expected = routes.copy()
    with make(broker) as publisher, broker.outage():
        receipt = publisher.submit(routes, "a")
        routes[:] = 0  # the caller reuses its buffer before anything was sent
    receipt.result(WAIT)
    first = records(broker)[0].value
    end, chunk = decode(records(broker)[1].value), decode(first)
    assert isinstance(end, End)
    assert isinstance(chunk, Chunk)
    assert first is not None
    assert np.array_equal(assemble(end, [chunk], [stored_checksum(first)]), expected)


def test_rows_may_be_none_or_missing(broker: MemoryBroker) -> None:
    with make(broker) as publisher:
        missing = publisher.submit(None, "gone", status="missing")
        empty = publisher.submit(make_routes(0), "empty", status="aborted", finish_reason="abort")
        assert (missing.ref.rows, empty.ref.rows) == (0, 0)
        assert missing.result(WAIT).records == 1
        assert empty.result(WAIT).records == 1
    statuses = {end.header.rollout_id: end.status for end in map(_end, records(broker))}
    assert statuses == {"gone": "missing", "empty": "aborted"}


def _end(record: LogRecord) -> End:
    end = decode(record.value)
    assert isinstance(end, End)
    return end


BAD = [
    ({"routes": make_routes(3)[:, :2]}, "routes"),
    ({"routes": make_routes(3)[0]}, "routes"),
    ({"routes": make_routes(3).astype("float32")}, "routes"),
    ({"routes": np.full((3, 3, 2), 16)}, "routes"),
    ({"routes": np.full((3, 3, 2), -1)}, "routes"),
    ({"routes": None}, "routes"),
    ({"status": "missing"}, "routes"),
    ({"status": "done"}, "status"),
    ({"rollout_id": ""}, "rollout_id"),
    ({"choice": 65_536}, "choice"),
    ({"group": "x" * 256}, "group"),
    ({"token_ids": [1, 2]}, "token_ids"),
    ({"token_ids": [0.5] * 3}, "token_ids"),
    ({"prompt_rows": 4}, "prompt_rows"),
    ({"start": 1}, "start"),
    ({"versions": [(1, "v")]}, "versions"),
    ({"versions": [(0, "v"), (0, "w")]}, "versions"),
    ({"attempt": "short"}, "attempt"),
]


@pytest.mark.parametrize(("change", "field"), BAD)
def test_bad_input_raises_at_once_and_names_the_field(
    broker: MemoryBroker, change: dict[str, object], field: str
) -> None:
    arguments: dict[str, object] = {"routes": make_routes(3), "rollout_id": "a", **change}
    with make(broker) as publisher:
        with pytest.raises(InvalidInput) as caught:
            publisher.submit(**arguments)  # type: ignore[arg-type]
        assert isinstance(caught.value, ValueError)
        assert caught.value.field == field
        assert publisher.stats().submitted == 0
        assert publisher.flush(WAIT)
    assert records(broker) == []


def test_an_expert_twice_is_told_by_the_receipt_and_nothing_is_sent(broker: MemoryBroker) -> None:
    with make(broker) as publisher:
        bad = publisher.submit(np.full((3, 3, 2), 7), "a")
        publisher.submit(make_routes(3), "b").result(WAIT)
        error = bad.exception(WAIT)
        assert isinstance(error, InvalidInput)
        assert error.field == "routes"
    assert {r.header.rollout_id for r in decoded(broker) if isinstance(r, End)} == {"b"}


def test_one_rollout_above_the_bound_is_refused_at_once(broker: MemoryBroker) -> None:
    with make(broker, max_bytes=1 << 20) as publisher, pytest.raises(InvalidInput, match="may hold 1048576"):
        publisher.submit(make_routes(200_000), "a")


def test_full_drop_reports_and_counts(broker: MemoryBroker) -> None:
    metrics = Metrics()
    publisher = make(broker, metrics, max_bytes=1 << 20, full="drop")
    with broker.outage():
        kept = publisher.submit(make_routes(100_000), "kept")
        dropped = publisher.submit(make_routes(100_000), "dropped")
        assert isinstance(dropped.exception(WAIT), RoutesDropped)
        assert publisher.stats().buffer_bytes <= 1 << 20
        assert publisher.submit(make_routes(3), "small").done() is False  # what still fits is taken
    kept.result(WAIT)
    assert not publisher.flush(WAIT), "flush may not call it done when a rollout was dropped"
    assert publisher.flush(WAIT)
    assert publisher.stats().dropped == 1
    assert publisher.close(WAIT) == []
    assert metrics.value("moebus_routes_rollouts_total", outcome="dropped") == 1
    assert {r.header.rollout_id for r in decoded(broker) if isinstance(r, End)} == {"kept", "small"}


def test_full_block_waits_for_room(broker: MemoryBroker) -> None:
    publisher = make(broker, max_bytes=1 << 20, block_seconds=WAIT)
    with broker.outage():
        publisher.submit(make_routes(100_000), "first")
        waiting: list[BaseException | None] = []
        thread = threading.Thread(
            target=lambda: waiting.append(publisher.submit(make_routes(100_000), "second").exception(WAIT))
        )
        thread.start()
        wait_until(lambda: publisher.stats().submitted == 2, what="second submit begun")
        assert publisher.stats().waiting == 1
    thread.join(WAIT)
    assert waiting == [None]
    assert publisher.close(WAIT) == []


def test_full_block_gives_up_at_its_deadline(broker: MemoryBroker) -> None:
    publisher = make(broker, max_bytes=1 << 20, block_seconds=0.01)
    with broker.outage():
        publisher.submit(make_routes(100_000), "first")
        assert isinstance(publisher.submit(make_routes(100_000), "second").exception(WAIT), RoutesDropped)
    assert publisher.close(WAIT) == []


def test_an_outage_never_reaches_submit_and_everything_arrives_after(broker: MemoryBroker) -> None:
    publisher = make(broker)
    with broker.outage():
        receipts = [publisher.submit(make_routes(3, seed=i), f"r{i}") for i in range(100)]
        fence = publisher.delete("zzz")
        assert not publisher.flush(0.0)
        with pytest.raises(TimeoutError, match="run/r0#0"):
            receipts[0].result(0.0)
        assert publisher.stats().waiting == 101
    assert publisher.flush(WAIT)
    assert all(receipt.done() and receipt.exception() is None for receipt in receipts)
    assert set(fence.result(WAIT).positions) == set(range(PARTITIONS))
    assert len(records(broker)) == 200 + PARTITIONS
    assert publisher.close(WAIT) == []


def test_unfinished_appends_stay_in_the_window(broker: MemoryBroker) -> None:
    publisher = make(broker)
    with broker.outage():
        for i in range(200):
            publisher.submit(make_routes(1), f"r{i}")
        writer = broker.cluster.writers[-1]
        wait_until(lambda: writer.unsettled() == 32, what="window full")  # type: ignore[attr-defined]
    assert publisher.close(WAIT) == []


def test_close_names_what_it_gave_up_and_fails_those_receipts(broker: MemoryBroker) -> None:
    publisher = make(broker)
    done = publisher.submit(make_routes(1), "done")
    done.result(WAIT)
    with broker.outage():
        left = [publisher.submit(make_routes(1), f"r{i}") for i in range(50)]
        names = publisher.close(0.05)
        assert names == [receipt.name for receipt in left]
        assert publisher.close(WAIT) == []
        errors = [receipt.exception(WAIT) for receipt in left]
    assert isinstance(errors[0], AppendUnknown)  # it was with the log's client
    assert isinstance(errors[-1], PublisherClosed)  # it was never sent
    assert "nothing of it is in the log" in str(errors[-1])
    assert done.exception() is None
    with pytest.raises(PublisherClosed, match="run/late"):
        publisher.submit(make_routes(1), "late")


def test_lost_acks_are_unknown_not_stored(broker: MemoryBroker) -> None:
    publisher = make(broker, receipt_timeout=0.05)
    with broker.lost_acks():
        receipt = publisher.submit(make_routes(1), "a")
        assert isinstance(receipt.exception(WAIT), AppendUnknown)
    assert not publisher.flush(WAIT)
    again = publisher.submit(make_routes(1), "a", attempt=receipt.ref.attempt)
    again.result(WAIT)
    publisher.close(WAIT)
    values = [record.value for record in records(broker)]
    assert values[:2] == values[2:], "a re-send is the same bytes"


def test_a_refused_chunk_fails_its_rollout_alone_and_sends_no_end(broker: MemoryBroker) -> None:
    def bad(record: OutRecord) -> bool:
        found = decode(record.value)
        return isinstance(found, Chunk) and found.header.rollout_id == "bad"

    with make(broker) as publisher, broker.refusing(bad):
        good, wrong, also = (publisher.submit(make_routes(400_000), name) for name in ("g1", "bad", "g2"))
        assert isinstance(wrong.exception(WAIT), AppendFailed)
        good.result(WAIT)
        also.result(WAIT)
    ended = {r.header.rollout_id for r in decoded(broker) if isinstance(r, End)}
    assert ended == {"g1", "g2"}


def test_delete_and_clear_go_to_every_partition_under_one_id(broker: MemoryBroker) -> None:
    with make(broker) as publisher:
        deleted = publisher.delete("a:1", epoch=3)
        cleared = publisher.clear(through_epoch=4)
        positions = deleted.result(WAIT).positions
        assert set(positions) == set(cleared.result(WAIT).positions) == set(range(PARTITIONS))
        with pytest.raises(InvalidInput, match="prefix"):
            publisher.delete("a:")
    found = decoded(broker)
    deletes = [record for record in found if isinstance(record, Delete)]
    clears = [record for record in found if isinstance(record, Clear)]
    assert len(deletes) == len(clears) == PARTITIONS
    assert len(set(deletes)) == 1
    assert (deletes[0].prefix, deletes[0].epoch, deletes[0].run) == ("a:1", 3, "run")
    assert {record.through_epoch for record in clears} == {4}
    assert deletes[0].id == parse_attempt(deleted.fence_id)


def test_suspend_sends_nothing_and_says_so(broker: MemoryBroker) -> None:
    with make(broker) as publisher:
        publisher.suspend()
        assert isinstance(publisher.submit(make_routes(1), "a").exception(WAIT), PublisherSuspended)
        publisher.delete("x").result(WAIT)
        publisher.resume()
        publisher.submit(make_routes(1), "b").result(WAIT)
        assert publisher.stats().suspended == 1
        assert publisher.flush(WAIT)


def test_a_receipt_can_be_awaited_and_calls_back(broker: MemoryBroker) -> None:
    called: list[str] = []

    async def main(publisher: RoutingPublisher) -> int:
        receipt = publisher.submit(make_routes(2), "a")
        receipt.add_done_callback(lambda done: called.append(done.name))
        stored = await asyncio.wait_for(receipt, WAIT)
        return stored.records

    with make(broker) as publisher:
        assert asyncio.run(main(publisher)) == 2
    assert len(called) == 1


def test_cancelling_a_waiter_leaves_the_receipt_alone(broker: MemoryBroker) -> None:
    async def main(publisher: RoutingPublisher) -> None:
        with broker.outage():
            receipt = publisher.submit(make_routes(2), "a")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(receipt, 0.01)
        assert (await receipt).records == 2

    with make(broker) as publisher:
        asyncio.run(main(publisher))


def test_a_turn_sends_only_new_rows(broker: MemoryBroker) -> None:
    tokens = make_tokens(21)
    first = make_routes(10)
    second = np.concatenate([make_routes(10, seed=5), make_routes(10, seed=6)])
    with make(broker) as publisher:
        base = publisher.submit(first, "a:0:0:0", token_ids=tokens).ref
        turn = publisher.submit(second, "a:0:1:0", token_ids=tokens, base=base)
        only_new = publisher.submit(second[10:], "a:0:1:0", choice=1, start=10, token_ids=tokens, base=base)
        assert turn.ref.rows == only_new.ref.rows == 20
        assert publisher.flush(WAIT)
        assert publisher.stats().base_refused == 0
    found = decoded(broker)
    chunks = [r for r in found if isinstance(r, Chunk) and r.header.rollout_id == "a:0:1:0"]
    assert [(chunk.start, chunk.rows) for chunk in chunks] == [(10, 10), (10, 10)]
    assert chunks[0].payload == chunks[1].payload
    assert chunks[0].header.base is not None
    assert chunks[0].header.base.attempt == parse_attempt(base.attempt)


def test_a_base_whose_tokens_differ_is_refused_or_only_its_prompt_used(broker: MemoryBroker) -> None:
    tokens = make_tokens(21)
    other = tokens.copy()
    other[7] += 1
    elsewhere = make_tokens(21, seed=9)
    with make(broker) as publisher:
        base = publisher.submit(make_routes(10), "a:0:0:0", token_ids=tokens, prompt_rows=5).ref
        publisher.submit(make_routes(20), "a:1:0:0", token_ids=other, base=base)
        publisher.submit(make_routes(20), "a:2:0:0", token_ids=elsewhere, base=base)
        with pytest.raises(InvalidInput, match="start"):
            publisher.submit(make_routes(10), "a:3:0:0", start=10, token_ids=elsewhere, base=base)
        with pytest.raises(InvalidInput, match="token_ids"):
            publisher.submit(make_routes(20), "a:3:0:0", base=base)
        with pytest.raises(InvalidInput, match="another run or group"):
            publisher.submit(make_routes(20), "b:3:0:0", token_ids=tokens, base=base)
        assert publisher.flush(WAIT)
        assert publisher.stats().base_refused == 1
    starts = {r.header.rollout_id: r.start for r in decoded(broker) if isinstance(r, Chunk)}
    assert starts == {"a:0:0:0": 0, "a:1:0:0": 5, "a:2:0:0": 0}


def test_without_a_card_it_only_deletes(broker: MemoryBroker) -> None:
    with RoutingPublisher(broker, TOPICS, run="run", card=None) as publisher:
        publisher.delete("a").result(WAIT)
        with pytest.raises(InvalidInput, match="card"):
            publisher.submit(make_routes(1), "a")


def test_a_forked_process_is_told_to_make_its_own(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(broker) as publisher:
        monkeypatch.setattr(publisher, "_pid", publisher._pid + 1)
        with pytest.raises(PublisherClosed, match="forked"):
            publisher.submit(make_routes(1), "a")
