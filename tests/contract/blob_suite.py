"""The contract of blobs: a home passes it where a subclass provides the fixture `world`.

Told through a partition, since the index alone makes a blob visible.
"""

from __future__ import annotations

import numpy as np
import pytest

from moebus.consumers.store.blobs.port import BlobMissing
from moebus.consumers.store.partition import Partition
from moebus.consumers.store.view import View, rows_of
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.record import Base, Delete, encode
from moebus.schemas.route_errors import RouteDeleted, RouteError
from tests.support.blob_world import LmdbWorld
from tests.support.routes import Attempt, attempt_id, make_attempt
from tests.support.wait import wait_until


def feed(partition: Partition, *records: bytes, now_ms: int = 0, commit: bool = True) -> None:
    for record in records:
        partition.apply(partition.next_offset or 0, record, now_ms)
    if commit:
        partition.commit()


def rows(partition: Partition, attempt: Attempt, start: int = 0, stop: int | None = None) -> RouteArray:
    """Raises what a reader would hear."""
    view = View(partition)
    found = [s for s in view.find(attempt.header.key).attempts if s.header == attempt.header]
    if not found or found[0].end is None:
        raise RouteDeleted("not there")
    plan = view.plan(found[0], start, found[0].end.rows if stop is None else stop)
    return np.concatenate(list(rows_of(view, plan)))


def drop(partition: Partition, attempt: Attempt, now_ms: int = 0) -> None:
    feed(partition, encode(Delete("run", attempt.header.rollout_id, attempt_id(99))), now_ms=now_ms)


def entries(partition: Partition) -> int:
    with partition.reading() as (tables, _):
        return len(list(tables._keys("blobs")))


def freed(partition: Partition, left: int = 0) -> None:
    """Waits until only `left` blobs are held."""

    def done() -> bool:
        partition.tidy(0)
        partition.commit()
        return entries(partition) == left

    wait_until(done, 30, f"{left} blobs left")


class BlobSuite:
    """What every home does."""

    def test_bytes_come_back(self, world: LmdbWorld) -> None:
        partition = world.open()
        one = make_attempt("a", number=1, rows=30, chunks=3)
        two = make_attempt("b", number=2, rows=9, chunks=2, codec="raw")
        feed(partition, *(record for pair in zip(one.records, two.records, strict=False) for record in pair))
        feed(partition, *one.records[3:])
        np.testing.assert_array_equal(rows(partition, one), one.routes)
        np.testing.assert_array_equal(rows(partition, two), two.routes)
        np.testing.assert_array_equal(rows(partition, one, 7, 23), one.routes[7:23])
        partition.close()

    def test_ranges(self, world: LmdbWorld) -> None:
        partition = world.open()
        attempt = make_attempt("a", rows=30, chunks=3)
        feed(partition, *attempt.records)
        with partition.reading() as (tables, _):
            held = [tables.blob(1, index) for index in range(3)]
        for entry, record in zip(held, attempt.chunks, strict=True):
            assert entry is not None
            size = len(record)
            for start, stop in ((0, None), (0, 1), (5, 17), (size - 1, size), (3, size + 50), (size, None), (9, 4)):
                assert partition.blobs.read(1, entry, start, stop) == record[start:stop]
        partition.close()

    def test_a_restart_keeps_what_was_committed_and_nothing_else(self, world: LmdbWorld) -> None:
        partition = world.open()
        kept, dropped = make_attempt("a", number=1), make_attempt("b", number=2)
        feed(partition, *kept.records)
        feed(partition, *dropped.records, commit=False)
        partition.close()
        partition = world.open()
        np.testing.assert_array_equal(rows(partition, kept), kept.routes)
        with pytest.raises(RouteDeleted):
            rows(partition, dropped)
        assert partition.next_offset == len(kept.records)
        feed(partition, *dropped.records)  # read again: the same owner number, other bytes
        np.testing.assert_array_equal(rows(partition, dropped), dropped.routes)
        partition.close()

    def test_an_owner_number_of_a_lost_batch_is_used_again_for_other_bytes(self, world: LmdbWorld) -> None:
        partition = world.open()
        lost, other = make_attempt("a", number=1, rows=50), make_attempt("b", number=2, rows=20)
        feed(partition, *lost.records, commit=False)
        partition.rollback()
        feed(partition, *other.records)
        np.testing.assert_array_equal(rows(partition, other), other.routes)
        partition.blobs.sweep(partition.reading)
        np.testing.assert_array_equal(rows(partition, other), other.routes)
        partition.close()

    @pytest.mark.parametrize("chunks", [3, 10, 25])  # they are freed in pieces of ten
    def test_a_delete_frees(self, world: LmdbWorld, chunks: int) -> None:
        partition = world.open()
        gone, kept = make_attempt("a", number=1, rows=50, chunks=chunks), make_attempt("b", number=2)
        feed(partition, *gone.records, *kept.records)
        drop(partition, gone)
        freed(partition, left=1)
        np.testing.assert_array_equal(rows(partition, kept), kept.routes)
        partition.close()

    def test_rows_that_others_use_stay(self, world: LmdbWorld) -> None:
        partition = world.open()
        first = make_attempt("a:0:0:0", number=1, rows=6, group="g")
        turn = make_attempt("a:0:1:0", number=2, rows=3, base=Base(attempt_id(1), 6, "a:0:0:0"), group="g")
        feed(partition, *first.records, *turn.records)
        drop(partition, first)
        freed(partition, left=2)
        np.testing.assert_array_equal(rows(partition, turn), np.concatenate([first.routes, turn.routes]))
        drop(partition, turn)
        freed(partition)
        partition.close()

    def test_a_delete_that_is_not_committed_takes_nothing(self, world: LmdbWorld) -> None:
        partition = world.open()
        attempt = make_attempt("a")
        feed(partition, *attempt.records)
        feed(partition, encode(Delete("run", "a", attempt_id(99))), commit=False)
        partition.tidy(0)
        partition.rollback()
        partition.blobs.sweep(partition.reading)
        np.testing.assert_array_equal(rows(partition, attempt), attempt.routes)
        partition.close()

    def test_a_rebuild_begins_with_nothing(self, world: LmdbWorld) -> None:
        partition = world.open()
        attempt, other = make_attempt("a", number=1), make_attempt("b", number=2)
        feed(partition, *attempt.records)
        partition.rebuild(partition.guard)
        assert entries(partition) == 0
        feed(partition, *other.records)
        partition.blobs.sweep(partition.reading)
        np.testing.assert_array_equal(rows(partition, other), other.routes)
        partition.close()

    def test_an_answer_that_is_cut_by_a_delete_is_no_damage(self, world: LmdbWorld) -> None:
        partition = world.open()
        attempt = make_attempt("a", rows=30, chunks=3)
        feed(partition, *attempt.records)
        view = View(partition)
        state = view.find(attempt.header.key).attempts[0]
        plan = view.plan(state, 0, 30)
        drop(partition, attempt)
        freed(partition)
        with pytest.raises(RouteDeleted):
            view.fetch(plan.pieces[1], None)
        assert partition.damaged is None
        partition.close()

    def test_an_entry_that_is_damaged(self, world: LmdbWorld) -> None:
        partition = world.open()
        attempt = make_attempt("a")
        feed(partition, *attempt.records)
        txn = partition.env.begin_write()
        txn.put((1).to_bytes(8, "big") + (0).to_bytes(4, "big"), b"rubbish", db=partition.env.tables["blobs"])
        txn.commit()
        with pytest.raises(RouteError) as caught:
            rows(partition, attempt)
        assert caught.value.name == "RouteCorrupt"
        assert "chunk 0" in (partition.damaged or "")
        partition.rebuild(partition.guard)
        assert partition.damaged is None
        partition.close()


__all__ = ["BlobMissing", "BlobSuite", "drop", "entries", "feed", "freed", "rows"]
