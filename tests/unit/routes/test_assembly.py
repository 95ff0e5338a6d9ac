"""What the stream hands out of one partition: whole attempts only, whatever the order, fences, spoilt ones, time."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest

from moebus.broker.ports import LogRecord
from moebus.consumers.reader.assembly import OPEN_TTL_MS, Assembler, Open
from moebus.consumers.reader.fences import KEPT_MS, Fences
from moebus.consumers.reader.rollout import Rollout
from moebus.consumers.reader.whole import make_rollout
from moebus.schemas.attempt import attempt_text
from moebus.schemas.record import Base, Clear, Delete, Header, Outcome, encode
from moebus.schemas.rollout import rollout_key
from moebus.schemas.route_errors import RouteCorrupt
from moebus.schemas.route_ref import RouteRef
from tests.support.routes import CARD, attempt_id, make_attempt, make_routes


def no_base(ref: RouteRef, wait: float) -> Rollout:
    raise AssertionError(f"nobody asked for {ref}")


class Log:
    """Feeds values one after the other, a millisecond apart."""

    def __init__(self, start: int = 0) -> None:
        self.assembler = Assembler("run", start)
        self.offset = start
        self.now_ms = 1_000_000

    def feed(self, *values: bytes | None) -> list[Open]:
        found = []
        for value in values:
            whole = self.assembler.feed(LogRecord("t", 0, self.offset, self.now_ms, None, value))
            self.offset += 1
            self.now_ms += 1
            found += [whole] if whole else []
        return found

    def low(self) -> int:
        return self.assembler.watermark.low()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_whole_in_any_order(order: Iterable[int]) -> None:
    one = make_attempt(chunks=3, rows=9)
    log = Log()
    found = log.feed(*(one.records[i] for i in order))
    assert len(found) == 1
    assert np.array_equal(make_rollout(found[0], {}, no_base, 0).routes, one.routes)
    assert log.low() == 0
    log.assembler.release(found[0])
    assert log.low() == 4
    assert log.assembler.held_bytes == 0


def test_interleaved_attempts_pin_the_offset_of_the_oldest() -> None:
    a, b = make_attempt("a", number=1, chunks=2), make_attempt("b", number=2, chunks=2)
    log = Log(10)
    assert log.feed(a.records[0], b.records[0], b.records[1]) == []
    (whole,) = log.feed(b.records[2])
    log.assembler.release(whole)
    assert log.low() == 10
    (first,) = log.feed(*a.records[1:])
    log.assembler.release(first)
    assert log.low() == 16


def test_a_record_again_is_ignored_and_other_content_spoils() -> None:
    one, other = make_attempt(chunks=2, seed=1), make_attempt(chunks=2, seed=2)
    log = Log()
    assert len(log.feed(one.records[0], one.records[0], one.records[1], one.records[2])) == 1
    assert log.feed(*one.records) == [], "a re-send of what was delivered is not delivered again"
    spoilt = Log()
    assert spoilt.feed(one.records[0], other.records[0], *one.records) == []
    assert spoilt.assembler.tally.spoilt == 1
    assert spoilt.low() == spoilt.offset
    ends = Log()
    assert ends.feed(one.end, other.end, *one.chunks) == []
    assert ends.assembler.tally.spoilt == 1


def test_a_chunk_beyond_the_end_spoils() -> None:
    short, long = make_attempt(chunks=1, rows=3), make_attempt(chunks=3, rows=9)
    log = Log()
    assert log.feed(long.records[2], short.end) == []
    assert log.assembler.tally.spoilt == 1


def test_chunks_of_another_attempt_content_are_corrupt() -> None:
    one, other = make_attempt(chunks=2, seed=1), make_attempt(chunks=2, seed=2)
    log = Log()
    (whole,) = log.feed(one.records[0], other.records[1], one.end)
    with pytest.raises(RouteCorrupt, match="not those that the END names"):
        make_rollout(whole, {}, no_base, 0)


@pytest.mark.parametrize("status", ["partial", "aborted", "missing"])
def test_only_complete_ones_come_out(status: str) -> None:
    rows = 0 if status == "missing" else 5
    one = make_attempt(rows=rows, outcome=Outcome(status=status))  # type: ignore[arg-type]
    log = Log()
    assert log.feed(*one.records) == []
    assert log.assembler.tally.incomplete == 1
    assert log.low() == log.offset


def test_zero_rows_is_a_whole_rollout() -> None:
    (whole,) = Log().feed(*make_attempt(rows=0).records)
    assert make_rollout(whole, {}, no_base, 0).routes.shape[0] == 0


def test_a_delete_drops_what_is_open_and_refuses_what_is_late() -> None:
    one, ten = make_attempt("a:1:0:0", number=1, chunks=2), make_attempt("a:10:0:0", number=2, chunks=2)
    late, raised = make_attempt("a:1:2:0", number=3), make_attempt("a:1:0:0", number=4, epoch=1)
    fence = encode(Delete("run", "a:1", attempt_id(99)))
    log = Log()
    assert log.feed(one.records[0], ten.records[0], fence) == []
    assert log.low() == 1, "the deleted one holds nothing back"
    assert log.feed(*one.records[1:], *late.records) == []
    assert len(log.feed(*ten.records[1:])) == 1
    assert len(log.feed(*raised.records)) == 1
    assert (log.assembler.tally.deleted, log.assembler.tally.refused) == (1, 2)


def test_a_clear_fences_epochs_and_other_runs_do_not_matter() -> None:
    log = Log()
    log.feed(encode(Clear("other", 9, attempt_id(98))), encode(Delete("other", "a", attempt_id(97), 9)))
    assert len(log.feed(*make_attempt("a", number=1, epoch=4).records)) == 1
    log.feed(encode(Clear("run", 4, attempt_id(99))))
    assert log.feed(*make_attempt("b", number=2, epoch=4).records) == []
    assert len(log.feed(*make_attempt("c", number=3, epoch=5).records)) == 1
    assert log.feed(*make_attempt("d", number=4, run="other").records) == []
    assert log.low() == 2


def test_an_attempt_left_open_is_lost_after_an_hour_and_may_come_again_whole() -> None:
    one = make_attempt(chunks=2)
    log = Log()
    log.feed(one.records[0])
    log.now_ms += OPEN_TTL_MS
    log.feed(None)
    assert log.assembler.tally.lost == 1
    assert log.low() == log.offset
    assert len(log.feed(*one.records)) == 1


@pytest.mark.parametrize("value", [None, b"", b"x" * 10, b"MOER" + bytes(60)])
def test_bytes_that_are_no_record_are_counted_and_passed_over(value: bytes | None) -> None:
    log = Log()
    assert log.feed(value, *make_attempt().records) != []
    assert log.assembler.tally.bad_records == 1


def test_evicted_chunks_keep_their_place() -> None:
    one = make_attempt(chunks=3, rows=9)
    log = Log()
    log.feed(*one.chunks)
    largest = log.assembler.largest()
    assert largest is not None
    assert log.assembler.held_bytes == sum(map(len, one.chunks))
    log.assembler.evict(largest)
    assert log.assembler.held_bytes == 0
    (whole,) = log.feed(one.end)
    assert [held.offset for held in whole.chunks.values()] == [0, 1, 2]


def test_the_rows_of_a_base_come_first() -> None:
    base = Base(attempt_id(7), 4, "a:0:0:0")
    one = make_attempt("a:0:1:0", base=base, rows=6)
    before = make_routes(8, seed=50)
    asked: list[RouteRef] = []

    def bases(ref: RouteRef, wait: float) -> Rollout:
        asked.append(ref)
        return Rollout(
            ref, before, CARD.moe_layers, CARD.top_k, CARD.num_experts, "complete", versions=((0, "v0"), (5, "v1"))
        )

    (whole,) = Log().feed(*one.records)
    rollout = make_rollout(whole, {}, bases, 1.0)
    assert np.array_equal(rollout.routes, np.concatenate([before[:4], one.routes]))
    assert rollout.ref.rows == 10
    assert rollout.versions == ((0, "v0"),)
    assert (asked[0].attempt, asked[0].rows) == (attempt_text(attempt_id(7)), 4)


def test_a_base_with_too_few_rows_is_corrupt() -> None:
    one = make_attempt("a:0:1:0", base=Base(attempt_id(7), 4, "a:0:0:0"), rows=6)

    def bases(ref: RouteRef, wait: float) -> Rollout:
        return Rollout(ref, make_routes(3), CARD.moe_layers, CARD.top_k, CARD.num_experts, "complete")

    (whole,) = Log().feed(*one.records)
    with pytest.raises(RouteCorrupt, match="9 rows where the END says 10"):
        make_rollout(whole, {}, bases, 1.0)


def test_fences_are_forgotten_after_48_hours() -> None:
    fences = Fences()
    fences.add(Delete("run", "a", attempt_id(1), 3), 0)
    fences.add(Delete("run", "a", attempt_id(2), 1), 0)
    header = Header.of(rollout_key("run", "a:x"), attempt_id(3), epoch=3)
    assert fences.refuses(header)
    fences.add(Delete("run", "b", attempt_id(4), 1), KEPT_MS + 1)
    assert not fences.refuses(header)
