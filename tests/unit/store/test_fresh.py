"""What the open batch has made whole is readable before its commit, and nothing else is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebus.consumers.store import fresh
from moebus.consumers.store.answers import Answers, Question
from moebus.consumers.store.decide import Rules
from moebus.consumers.store.fresh import Fresh
from moebus.consumers.store.partition import Guard, Partition
from moebus.consumers.store.progress import Progress
from moebus.consumers.store.state import AttemptState, ChunkInfo, Owner, Part
from moebus.consumers.store.view import View, rows_of
from moebus.observability.clock import SystemClock
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.record import Base, Delete, encode
from tests.support.routes import Attempt, attempt_id, make_attempt

GUARD = Guard("cluster", "topic")


@pytest.fixture
def partition(tmp_path: Path) -> Iterator[Partition]:
    made = open_at(tmp_path)
    yield made
    made.close()


def open_at(path: Path, rules: Rules | None = None) -> Partition:
    return Partition(0, path, GUARD, rules or Rules(), 16 << 20, sync=False)


def feed(partition: Partition, *records: bytes) -> list[bool]:
    """Whether each made something readable; not committed."""
    first = partition.next_offset or 0
    return [partition.apply(first + number, record, 0).readable for number, record in enumerate(records)]


def whole(view: View, attempt: Attempt) -> AttemptState | None:
    found = view.find(attempt.header.key).attempts
    return next((s for s in found if s.header == attempt.header and s.state == "whole"), None)


def rows(view: View, attempt: Attempt) -> RouteArray | None:
    state = whole(view, attempt)
    if state is None or state.end is None:
        return None
    return np.concatenate(list(rows_of(view, view.plan(state, 0, state.end.rows))))


def now(partition: Partition) -> View:
    return View(partition, partition.fresh)


def test_with_its_last_record_it_is_readable(partition: Partition) -> None:
    attempt = make_attempt(rows=9, chunks=3)
    assert feed(partition, *attempt.records[:-1]) == [False] * 3
    assert whole(now(partition), attempt) is None
    assert feed(partition, attempt.end) == [True]
    assert np.array_equal(rows(now(partition), attempt), attempt.routes)  # type: ignore[arg-type]
    assert whole(View(partition), attempt) is None, "it is not committed"
    before = now(partition)
    partition.commit()
    for view in (before, now(partition), View(partition)):  # who had begun to read goes on
        assert np.array_equal(rows(view, attempt), attempt.routes)  # type: ignore[arg-type]


def test_chunks_of_an_earlier_commit_and_of_this_batch(partition: Partition) -> None:
    attempt = make_attempt(rows=9, chunks=3)
    feed(partition, *attempt.records[:2])
    partition.commit()
    assert feed(partition, *attempt.records[2:]) == [False, True]
    assert np.array_equal(rows(now(partition), attempt), attempt.routes)  # type: ignore[arg-type]


@pytest.mark.parametrize("committed", [True, False])
def test_rows_of_a_base(partition: Partition, committed: bool) -> None:
    first = make_attempt("a:1:0:0", number=1, rows=6, group="g")
    base = Base(attempt_id(1), 6, "a:1:0:0")
    then = make_attempt("a:1:1:0", number=2, rows=3, base=base, group="g")
    feed(partition, *first.records)
    if committed:
        partition.commit()
    assert feed(partition, *then.records)[-1]
    assert np.array_equal(rows(now(partition), then), np.concatenate([first.routes, then.routes]))  # type: ignore[arg-type]


def test_a_delete_behind_it_hides_it_and_a_dropped_batch_shows_nothing(partition: Partition) -> None:
    gone, kept = make_attempt("a:1", number=1), make_attempt("a:10", number=2)
    feed(partition, *gone.records, *kept.records, encode(Delete("run", "a:1", attempt_id(9))))
    assert (whole(now(partition), gone), whole(now(partition), kept) is None) == (None, False)
    partition.rollback()
    assert whole(now(partition), kept) is None


def test_what_a_commit_has_ended_stays_so(partition: Partition) -> None:
    attempt = make_attempt("a:1", number=1)
    feed(partition, *attempt.records)
    early = partition.fresh
    partition.commit()
    feed(partition, encode(Delete("run", "a:1", attempt_id(9))))
    partition.commit()
    assert whole(View(partition, early), attempt) is None


def test_what_a_quota_refuses_is_not_shown(tmp_path: Path) -> None:
    partition = open_at(tmp_path, Rules(quotas={"run": 10}))
    attempt = make_attempt(rows=9)
    assert not any(feed(partition, *attempt.records))
    assert whole(now(partition), attempt) is None
    partition.close()


@pytest.mark.parametrize("committed", [True, False])
def test_what_the_batch_takes_away_is_never_seen_beside_what_takes_its_place(tmp_path: Path, committed: bool) -> None:
    """Else a reader hears of two complete attempts, of which no store that read this log ever has both."""
    first = make_attempt("a:1", number=1, rows=9, codec="raw")
    other, again = (make_attempt(name, number=n, rows=9, codec="raw") for n, name in ((2, "b:1"), (3, "a:1")))
    partition = open_at(tmp_path, Rules(quotas={"run": len(first.records[0]) * 2 - 1}))  # room for one
    feed(partition, *first.records)
    if committed:
        partition.commit()
    assert feed(partition, *other.records)[-1], "the first one makes room for it"
    assert not feed(partition, *again.records)[-1]
    assert [whole(now(partition), attempt) is not None for attempt in (first, other, again)] == [True, True, False]
    partition.commit()
    assert [whole(now(partition), attempt) is not None for attempt in (first, other, again)] == [False, False, True]
    partition.close()


def test_a_reader_that_stood_still_over_a_rebuild_gets_no_rows_of_another_rollout(partition: Partition) -> None:
    old, new = make_attempt("a:1", number=1), make_attempt("b:1", number=2)
    feed(partition, *old.records)
    early = now(partition)
    partition.rebuild(GUARD)  # the numbers of owners begin again
    feed(partition, *new.records)
    partition.commit()
    assert np.array_equal(rows(early, new), new.routes)  # type: ignore[arg-type]
    assert whole(early, old) is None


@pytest.mark.parametrize("when", ["before the tables are opened", "after"])
def test_a_delete_and_what_came_behind_it_are_seen_together(
    partition: Partition, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A reader that is held up between looking at one and the other looks again."""
    old, new = (make_attempt("a:1", number=1 + epoch, epoch=epoch) for epoch in (0, 1))
    feed(partition, *old.records)
    partition.commit()
    held_up, reading = iter([True]), partition.reading

    @contextmanager
    def slowly() -> Iterator[Any]:
        def meanwhile(now: bool) -> None:
            if now and next(held_up, False):
                feed(partition, encode(Delete("run", "a:1", attempt_id(9))), *new.records)

        meanwhile(when != "after")
        with reading() as read:
            meanwhile(when == "after")
            yield read

    monkeypatch.setattr(partition, "reading", slowly)
    answers = Answers({0: partition}, Progress(SystemClock()))
    found = answers._find(Question(old.header.key), {0: partition})
    assert found.meta.ref.attempt == new.header.attempt_text


def test_deletes_without_end_do_not_keep_a_reader_for_ever(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = make_attempt("b:1", number=1)
    feed(partition, *attempt.records)
    reading = partition.reading

    @contextmanager
    def under_fire() -> Iterator[Any]:
        feed(partition, encode(Delete("run", "a:1", attempt_id(9))))
        with reading() as read:
            yield read

    monkeypatch.setattr(partition, "reading", under_fire)
    found = Answers({0: partition}, Progress(SystemClock()))._find(Question(attempt.header.key), {0: partition})
    assert b"".join(found.rows()) == attempt.routes.tobytes()


def test_who_reads_slowly_keeps_only_its_own_rows_in_memory(partition: Partition) -> None:
    before, mine, other = (make_attempt(f"{n}", number=n, rows=9, codec="raw") for n in (1, 2, 3))
    feed(partition, *before.records)
    partition.commit()
    feed(partition, *mine.records, *other.records)
    answers = Answers({0: partition}, Progress(SystemClock()))
    found = [answers._find(Question(one.header.key), {0: partition}) for one in (before, mine)]
    batch = weakref.ref(partition.fresh)
    partition.rollback()
    gc.collect()
    assert batch() is None
    for answer, attempt in zip(found, (before, mine), strict=True):
        assert b"".join(answer.rows()) == attempt.routes.tobytes()


def test_what_does_not_fit_into_memory_waits_for_the_commit(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = make_attempt("large", number=1, rows=3000, chunks=3, codec="raw")
    small = make_attempt("small", number=2)
    on = make_attempt("more", number=3, rows=2, base=Base(attempt_id(1), 3000, "large"), group="large")
    monkeypatch.setattr(fresh, "MOST_BYTES", 20_000)
    partition.rollback()  # a new batch
    assert not any(feed(partition, *large.records)), "two of its three chunks fit"
    assert whole(now(partition), large) is None
    assert feed(partition, *small.records)[-1]
    assert not any(feed(partition, *on.records)), "what it goes on from is not readable either"
    partition.commit()
    for attempt in (large, small):
        assert np.array_equal(rows(now(partition), attempt), attempt.routes)  # type: ignore[arg-type]


def test_many_small_ones_are_bounded_too() -> None:
    held = Fresh(fresh.ENTRY_BYTES * 3)
    headers = [make_attempt(f"a:{number}", number=number, rows=0, chunks=0).header for number in range(1, 6)]
    states = [AttemptState(header, "whole", number, 0) for number, header in enumerate(headers, 1)]
    made = [held.made_whole(state, Owner(state.owner, 1, state.header.attempt)) for state in states]
    assert made == [True, True, True, False, False]


def test_long_lists_of_parts_and_versions_count() -> None:
    held = Fresh(fresh.ENTRY_BYTES + fresh.ITEM_BYTES * 3)
    header = make_attempt(rows=0, chunks=0).header
    parts = tuple(Part(number, number, number + 1) for number in range(2))
    chunk = ChunkInfo(0, 2, 1, 0, ((2, "v1"),))
    state = AttemptState(header, "whole", 9, 0, parts)
    assert not held.made_whole(state, Owner(9, 1, header.attempt, chunks=(chunk,)))
    assert held.made_whole(state, Owner(9, 1, header.attempt, chunks=(replace(chunk, versions=()),)))
