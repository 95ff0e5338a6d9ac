from __future__ import annotations

from dataclasses import replace

import pytest

from moebus.consumers.store.decide import Decision, Facts, Rules, decide
from moebus.consumers.store.state import AttemptState, Owner, Part, Shape, cut, dump_attempt, load_attempt
from moebus.schemas.record import Base, Chunk, End, Outcome, decode, stored_checksum
from moebus.schemas.record.types import Header
from tests.support.routes import Attempt, attempt_id, make_attempt

RULES = Rules(open_ttl_ms=1000, keep_ttl_ms=5000)
SHAPE = Shape((1, 2, 5), 2, 16)


def facts(attempt: AttemptState | None = None, owner: Owner | None = None, **more: object) -> Facts:
    return replace(Facts(attempt, owner, None, None, None, 9), **more)  # type: ignore[arg-type]


def feed(attempt: Attempt, *order: int, now_ms: int = 0) -> Decision:
    """The last decision after these records of an attempt."""
    decision = Decision("stored")
    state: AttemptState | None = None
    owner: Owner | None = None
    for index in order:
        decision = step(attempt.records[index], state, owner, now_ms)
        state, owner = decision.attempt or state, decision.owner or owner
    return decision


def step(data: bytes, state: AttemptState | None, owner: Owner | None, now_ms: int = 0) -> Decision:
    record = decode(data)
    assert isinstance(record, (Chunk, End))
    return decide(record, stored_checksum(data), now_ms, facts(state, owner), RULES)


def opened(attempt: Attempt, *order: int) -> tuple[AttemptState, Owner]:
    decision = feed(attempt, *order)
    assert decision.attempt is not None
    assert decision.owner is not None
    return decision.attempt, decision.owner


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_whole_in_any_order(order: tuple[int, ...]) -> None:
    attempt = make_attempt(rows=9, chunks=3)
    before = feed(attempt, *order[:3])
    assert (before.verdict, before.attempt and before.attempt.state) == ("stored", "open")
    decision = feed(attempt, *order)
    assert decision.verdict == "completed"
    state = decision.attempt
    assert state is not None
    assert (state.state, state.parts, state.shape) == ("whole", (Part(9, 0, 9),), SHAPE)


def test_the_same_again_is_a_duplicate() -> None:
    attempt = make_attempt(rows=9, chunks=3)
    assert feed(attempt, 0, 0).verdict == "duplicate"
    assert feed(attempt, 3, 3).verdict == "duplicate"
    state, owner = opened(attempt, 0, 1, 2, 3)
    for record in attempt.records:
        assert step(record, state, owner).verdict == "duplicate"


def test_other_content() -> None:
    attempt, other = make_attempt(rows=9, chunks=3), make_attempt(rows=9, chunks=3, seed=7)
    state, owner = opened(attempt, 0, 1)
    spoilt = step(other.records[0], state, owner)
    assert (spoilt.verdict, spoilt.reason, spoilt.release) == ("spoilt", "other_content", state)
    assert spoilt.attempt is not None
    assert (spoilt.attempt.state, spoilt.attempt.owner) == ("spoilt", 0)
    assert step(attempt.records[2], spoilt.attempt, None).verdict == "late"
    state, owner = opened(attempt, 0, 1, 2, 3)
    assert step(other.records[0], state, owner) == Decision("late", "other_content")
    assert step(other.records[3], state, owner) == Decision("late", "other_end")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"epoch": 1}, "other_header"), ({"group": "x"}, "other_header"),
    ],
)  # fmt: skip
def test_a_header_that_differs_spoils(change: dict[str, object], reason: str) -> None:
    attempt = make_attempt(rows=9, chunks=3)
    state, owner = opened(attempt, 0)
    record = decode(attempt.records[1])
    assert isinstance(record, Chunk)
    strange = replace(record, header=replace(record.header, **change))  # type: ignore[arg-type]
    decision = decide(strange, 5, 0, facts(state, owner), RULES)
    assert (decision.verdict, decision.reason) == ("spoilt", reason)


def test_records_that_do_not_fit_together_spoil() -> None:
    attempt = make_attempt(rows=9, chunks=3)
    end = decode(attempt.end)
    chunk = decode(attempt.records[2])
    assert isinstance(end, End)
    assert isinstance(chunk, Chunk)
    state, owner = opened(attempt, 0, 1, 2)
    for wrong, reason in [
        (replace(end, checksum=1), "whole_checksum"),
        (replace(end, rows=8), "row_count"),
        (replace(end, chunks=2), "chunk_beyond_end"),
    ]:
        assert decide(wrong, 0, 0, facts(state, owner), RULES).reason == reason
    state, owner = opened(attempt, 3, 0, 1)
    for late, reason in [
        (replace(chunk, index=5), "chunk_beyond_end"),
        (replace(chunk, top_k=1), "other_shape"),
        (replace(chunk, start=7), "rows_do_not_join"),
    ]:
        assert decide(late, 0, 0, facts(state, owner), RULES).reason == reason
    assert decide(end, 0, 0, facts(state, owner), RULES).verdict == "duplicate"
    assert decide(replace(end, rows=8), 0, 0, facts(state, owner), RULES).reason == "other_end"


def test_bad_rows_spoil_also_as_the_first_record() -> None:
    attempt = make_attempt(rows=9, chunks=3)
    record = decode(attempt.records[0])
    assert isinstance(record, Chunk)
    decision = decide(record, 1, 0, facts(fault="expert_ids"), RULES)
    assert (decision.verdict, decision.owner, decision.release, decision.pin) == ("spoilt", None, None, ())


def test_a_barrier_refuses_and_leaves_a_mark() -> None:
    attempt = make_attempt()
    record = decode(attempt.records[0])
    assert isinstance(record, Chunk)
    first = decide(record, 1, 7, facts(barrier="deleted"), RULES)
    assert first.verdict == "refused"
    assert first.attempt is not None
    assert (first.attempt.state, first.attempt.reason, first.attempt.at_ms) == ("gone", "deleted", 7)
    again = decide(record, 1, 8, facts(first.attempt, barrier="deleted"), RULES)
    assert again == Decision("refused", "deleted")
    assert decide(record, 1, 8, facts(first.attempt), RULES).verdict == "refused"


def test_an_open_attempt_that_was_silent_too_long_begins_again() -> None:
    attempt = make_attempt(rows=9, chunks=3)
    state, owner = opened(attempt, 0, 1)
    assert step(attempt.records[2], state, owner, now_ms=1000).release is None
    late = step(attempt.records[2], state, owner, now_ms=1001)
    assert (late.verdict, late.release) == ("stored", state)
    assert late.owner is not None
    assert [chunk.index for chunk in late.owner.chunks] == [2]
    lost = state.ended("lost", "", 1500)
    assert step(attempt.records[0], lost, None, now_ms=2000).verdict == "stored"


def whole_base(**more: object) -> AttemptState:
    outcome = Outcome(token_hash="a" * 32, prompt_rows=4, prompt_hash="b" * 32)
    decision = feed(make_attempt("a:0:0:0", number=1, rows=9, chunks=3, outcome=outcome), 0, 1, 2, 3)
    assert decision.attempt is not None
    return replace(decision.attempt, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("base", "held", "reason"),
    [
        (Base(attempt_id(1), 9, "a:0:0:0"), whole_base(), ""),
        (Base(attempt_id(1), 9, "a:0:0:0", 0, "a" * 32), whole_base(), ""),
        (Base(attempt_id(1), 4, "a:0:0:0", 0, "b" * 32), whole_base(), ""),
        (Base(attempt_id(1), 9, "a:0:0:0", 0, "c" * 32), whole_base(), "base_mismatch"),
        (Base(attempt_id(1), 4, "a:0:0:0", 0, "a" * 32), whole_base(), "base_mismatch"),
        (Base(attempt_id(1), 5, "a:0:0:0"), whole_base(), "base_mismatch"),
        (Base(attempt_id(1), 9, "a:0:0:0"), None, "base_not_held"),
        (Base(attempt_id(1), 9, "a:0:0:0"), whole_base(state="open"), "base_not_held"),
        (Base(attempt_id(1), 9, "a:0:0:0"), whole_base(state="gone", end=None), "base_not_held"),
        (Base(attempt_id(1), 9, "a:0:0:0"), whole_base(at_ms=-6000), "base_not_held"),
        (Base(attempt_id(1), 9, "a:0:0:0"), whole_base(header=Header("run", "h", "a:0:0:0", 0, attempt_id(1))),
         "base_mismatch"),
    ],
)  # fmt: skip
def test_bases(base: Base, held: AttemptState | None, reason: str) -> None:
    attempt = make_attempt("a:0:1:0", number=2, rows=3, base=base)
    record = decode(attempt.records[0])
    assert isinstance(record, Chunk)
    decision = decide(record, 1, 0, facts(base=held), RULES)
    assert decision.reason == reason
    assert decision.attempt is not None
    if reason:
        assert (decision.verdict, decision.attempt.state, decision.pin) == ("quarantined", "lost", ())
    else:
        assert decision.verdict == "stored"
        assert decision.pin == decision.attempt.parts == (Part(9, 0, base.rows),)


def test_cut() -> None:
    parts = (Part(1, 0, 5), Part(2, 5, 9))
    assert cut(parts, 9) == parts
    assert cut(parts, 7) == (Part(1, 0, 5), Part(2, 5, 7))
    assert cut(parts, 5) == (Part(1, 0, 5),)


def test_states_survive_their_json() -> None:
    outcome = Outcome("partial", "length", "a" * 32, 4, "b" * 32)
    attempt = make_attempt("é:0:0:0", base=Base(attempt_id(2), 3, "x", 1, "c" * 32), outcome=outcome)
    end = decode(attempt.end)
    assert isinstance(end, End)
    full = AttemptState(end.header, "whole", 4, 99, (Part(2, 0, 3), Part(4, 3, 13)), SHAPE, end)
    for state in (full, full.ended("gone", "why", 5), replace(full, end=None, state="open")):
        assert load_attempt(state.key, state.header.attempt, dump_attempt(state)) == state
