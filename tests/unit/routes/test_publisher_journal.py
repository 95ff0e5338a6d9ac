"""The publisher with a journal: recovery, age, damage, a child that goes, many laps. The child is a thread here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moebus.broker.errors import AppendUnknown
from moebus.broker.ports import LogRecord
from moebus.observability.clock import ManualClock
from moebus.observability.metrics import Metrics
from moebus.producers.routing import RoutesDropped, RoutingPublisher
from moebus.producers.routing.process import layout
from moebus.producers.routing.process.sender import ProcessSender
from moebus.schemas.record import Chunk, Delete, End, assemble, decode, stored_checksum
from tests.contract.publisher_world import WAIT, JournalWorld, MemoryWorld, decoded, end_of
from tests.support.routes import make_routes, make_tokens
from tests.support.wait import wait_until

MB = 1 << 20


@pytest.fixture
def world() -> Iterator[JournalWorld]:
    made = JournalWorld()
    yield made
    made.broker.close()


def ends(world: JournalWorld) -> set[str]:
    return {record.header.rollout_id for record in decoded(world) if isinstance(record, End)}


def values(records: list[LogRecord]) -> list[bytes | None]:
    return [record.value for record in records]


def sender_of(publisher: RoutingPublisher) -> ProcessSender:
    sender = publisher._sender
    assert isinstance(sender, ProcessSender)
    return sender


def test_what_a_publisher_left_the_next_one_sends_as_the_same_bytes(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    tokens = make_tokens(20)
    sent = []
    for again in (False, True):  # in a world without and in one with a break in between: the records are the same
        world = JournalWorld()
        attempts = ["01ARZ3NDEKTSV4RRFFQ69G5FAV", "01ARZ3NDEKTSV4RRFFQ69G5FAW"]
        publisher = world.make(journal=journal, max_bytes=MB)
        with world.outage():
            base = publisher.submit(make_routes(10), "a:0:0:0", token_ids=tokens, attempt=attempts[0]).ref
            late = publisher.submit(
                make_routes(20), "a:0:1:0", token_ids=tokens, base=base, attempt=attempts[1], versions=[(0, "v")]
            )
            if again:
                assert len(publisher.close(0)) == 2
                assert isinstance(late.exception(WAIT), AppendUnknown)
                assert str(journal) in str(late.exception())
                metrics = Metrics()
                publisher = world.make(metrics, journal=journal, max_bytes=MB)
                assert publisher.stats().recovered == 2
                assert metrics.value("moebus_routes_recovered_total") == 2
        assert publisher.flush(WAIT)
        assert publisher.close(WAIT) == []
        whole = [record for record in world.records() if record.value is not None]
        sent.append(sorted({record.value for record in whole if record.value is not None}))
        world.broker.close()
    assert len(sent[0]) == 4
    assert sent[0] == sent[1]


def test_a_fence_is_recovered_under_its_id(world: JournalWorld, tmp_path: Path) -> None:
    publisher = world.make(journal=tmp_path / "j", max_bytes=MB)
    with world.outage():
        fence = publisher.delete("a")
        assert publisher.close(0) == [fence.name]
    with world.make(journal=tmp_path / "j", max_bytes=MB) as publisher:
        assert publisher.flush(WAIT)
    deletes = {record for record in decoded(world) if isinstance(record, Delete)}
    assert len(deletes) == 1


def test_entries_of_more_than_20_hours_are_dropped_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(now_ms=1_700_000_000_000)
    world = JournalWorld(clock)
    publisher = world.make(journal=tmp_path / "j", max_bytes=MB)
    with world.outage():
        publisher.submit(make_routes(1), "old")
        publisher.close(0)
    clock.advance(19 * 3600)
    with world.outage():
        publisher = world.make(journal=tmp_path / "j", max_bytes=MB)
        publisher.submit(make_routes(1), "young")
        publisher.close(0)
    clock.advance(2 * 3600)
    metrics = Metrics()
    publisher = world.make(metrics, journal=tmp_path / "j", max_bytes=MB)
    assert publisher.stats().recovered == 1
    assert metrics.value("moebus_routes_rollouts_total", outcome="dropped") == 1
    assert publisher.flush(WAIT)
    publisher.close(WAIT)
    assert "run/old#0" in caplog.text
    assert ends(world) == {"young"}
    world.broker.close()


@pytest.mark.parametrize("kind", ["thread", "journal"])
def test_what_waited_for_more_than_20_hours_is_not_sent(kind: str) -> None:
    clock = ManualClock(now_ms=1_700_000_000_000)
    world = MemoryWorld(clock) if kind == "thread" else JournalWorld(clock)
    publisher = world.make(receipt_timeout=1e6)
    with world.outage():
        receipts = [publisher.submit(make_routes(1), f"r{n}") for n in range(100)]
        writer = wait_until(lambda: world.broker.cluster.writers, WAIT, "the child to start")[-1]
        wait_until(lambda: writer.unsettled() == 32, what="window full")  # type: ignore[attr-defined]
        clock.advance(21 * 3600)
    errors = [receipt.exception(WAIT) for receipt in receipts]
    assert errors[0] is None
    assert isinstance(errors[-1], RoutesDropped)
    assert "20 hours" in str(errors[-1])
    assert publisher.close(WAIT) == []
    world.broker.close()


def test_damage_fails_one_entry_alone(world: JournalWorld, tmp_path: Path) -> None:
    path = tmp_path / "j"
    publisher = world.make(journal=path, max_bytes=MB)
    with world.outage():
        for name in ("a", "b", "c"):
            publisher.submit(make_routes(100), name)
        assert len(publisher.close(0)) == 3
    size = os.path.getsize(path)
    with path.open("r+b") as file:  # the second entry's rows
        file.seek(layout.HEAD_BYTES)
        first = layout.unpack_entry(file.read(layout.ALIGN), 0)
        assert first is not None
        file.seek(layout.HEAD_BYTES + first.size + first.data_at)
        file.write(b"\xff" * 10)
    assert os.path.getsize(path) == size
    metrics = Metrics()
    with world.make(metrics, journal=path, max_bytes=MB) as publisher:
        assert publisher.flush(WAIT)
        assert publisher.stats().recovered == 2
    assert metrics.value("moebus_routes_rollouts_total", outcome="dropped") == 1
    assert ends(world) == {"a", "c"}


def test_many_laps_keep_content_and_order(world: JournalWorld) -> None:
    rng = np.random.default_rng(5)
    sizes = [int(size) for size in rng.integers(0, 20_000, 150)]  # up to 120 KB each, in 1 MB
    with world.make(max_bytes=MB, block_seconds=WAIT) as publisher:
        for number, rows in enumerate(sizes):
            publisher.submit(make_routes(rows, seed=number), f"r{number}", group="one")
        assert publisher.flush(WAIT)
        assert publisher.stats().buffer_bytes == 0
    records = world.records()
    order = []
    chunks: list[tuple[Chunk, int]] = []
    for record in records:
        found = decode(record.value)
        if isinstance(found, End):
            number = int(found.header.rollout_id[1:])
            routes = assemble(found, [chunk for chunk, _ in chunks], [checksum for _, checksum in chunks])
            assert np.array_equal(routes.reshape(-1), make_routes(sizes[number], seed=number).reshape(-1))
            order.append(number)
            chunks = []
        else:
            assert isinstance(found, Chunk)
            assert record.value is not None
            chunks.append((found, stored_checksum(record.value)))
    assert order == list(range(150))


def test_a_child_that_goes_is_replaced_and_sends_the_rest_again(world: JournalWorld) -> None:
    metrics = Metrics()
    with world.make(metrics) as publisher:
        publisher.submit(make_routes(1), "before").result(WAIT)
        with world.outage():
            receipts = [publisher.submit(make_routes(1), f"r{n}") for n in range(10)]
            world.children[0].kill()
            wait_until(lambda: len(world.children) == 2, WAIT, "another child")
        assert publisher.flush(WAIT)
        assert all(receipt.exception(WAIT) is None for receipt in receipts)
        assert metrics.value("moebus_routes_publisher_restarts_total") == 1
        wait_until(lambda: publisher.problem() is None, WAIT, "a child that is well")
    attempts = {end_of(record).header.attempt for record in world.records() if _is_end(record)}
    assert len(attempts) == 11


def _is_end(record: LogRecord) -> bool:
    return isinstance(decode(record.value), End)


def test_a_delete_gets_in_where_rollouts_fill_the_journal(world: JournalWorld) -> None:
    with world.make(max_bytes=MB, full="drop", block_seconds=0) as publisher:
        with world.outage():
            receipts = [publisher.submit(make_routes(10_000), f"r{n}") for n in range(30)]
            dropped = [receipt for receipt in receipts if receipt.done()]
            assert dropped
            fence = publisher.delete("a")
            assert not fence.done()
        assert len(fence.result(WAIT).positions) == 4
        assert not publisher.flush(WAIT)


def test_a_failed_write_leaves_no_gap(world: JournalWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    with world.make() as publisher:
        journal = sender_of(publisher)._journal
        write = journal.write

        def interrupted(*arguments: object, **more: object) -> object:
            write(*arguments, **more)  # type: ignore[arg-type]
            raise KeyboardInterrupt

        monkeypatch.setattr(journal, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publisher.submit(make_routes(1), "interrupted")
        monkeypatch.undo()
        publisher.submit(make_routes(1), "after").result(WAIT)
        assert publisher.flush(WAIT)
    assert ends(world) == {"after"}
