"""The store's partition against a model that is too simple to be wrong: any log, any batches, any restarts."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moebus.consumers.store.decide import Rules
from moebus.consumers.store.partition import Guard, Partition
from moebus.consumers.store.view import View, rows_of
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.record import Base, Clear, Delete, encode
from moebus.schemas.rollout import covers
from tests.support.routes import Attempt, attempt_id, make_attempt

GUARD = Guard("cluster", "topic")
MAP = 32 << 20
IDS = ("a:1", "a:1:0:0", "a:10:0:0", "a", "b")


def pool() -> list[Attempt]:
    """Attempts of several ids, epochs and sizes; some go on from others."""
    attempts = []
    for number, rollout_id in enumerate(IDS, 1):
        attempts.append(make_attempt(rollout_id, number=number, rows=6, chunks=number % 3 + 1, group="g"))
        attempts.append(make_attempt(rollout_id, number=10 + number, rows=4, chunks=2, epoch=1, group="g"))
        base = Base(attempt_id(number), 6, rollout_id)
        attempts.append(make_attempt("a:1:1:0", choice=number, number=20 + number, rows=3, base=base, group="g"))
        attempts.append(make_attempt("b:2", choice=number, number=30 + number, rows=0, chunks=0, base=base, group="g"))
    return attempts


POOL = pool()
BY_ID = {attempt.header.attempt: attempt for attempt in POOL}
REMOVALS: tuple[Delete | Clear, ...] = (
    Delete("run", "a:1", attempt_id(90), 0),
    Delete("run", "a", attempt_id(91), 0),
    Delete("run", "b", attempt_id(92), 1),
    Clear("run", 0, attempt_id(93)),
)


@dataclass
class Model:
    """Sets and loops only. `whole` and `seen` by attempt."""

    fences: list[Delete | Clear] = field(default_factory=list)
    seen: dict[bytes, set[bytes]] = field(default_factory=dict)
    gone: set[bytes] = field(default_factory=set)
    lost: set[bytes] = field(default_factory=set)

    def hides(self, attempt: Attempt) -> bool:
        return any(_hides(fence, attempt) for fence in self.fences)

    def feed(self, what: tuple[Attempt, bytes] | Delete | Clear) -> None:
        if isinstance(what, (Delete, Clear)):
            self.fences.append(what)
            self.gone |= {number for number in {*self.seen, *self.lost} if _hides(what, BY_ID[number])}
            return
        attempt, record = what
        number = attempt.header.attempt
        if self.hides(attempt):
            self.gone.add(number)
        elif number not in self.gone:
            base = attempt.header.base
            if number not in self.seen and base is not None and not self.whole(base.attempt):
                self.lost.add(number)
                return
            self.lost.discard(number)
            self.seen.setdefault(number, set()).add(record)

    def whole(self, number: bytes) -> bool:
        records = set(BY_ID[number].records)
        return number not in self.gone and self.seen.get(number) == records

    def rows(self, attempt: Attempt) -> RouteArray:
        base = attempt.header.base
        if base is None:
            return attempt.routes
        return np.concatenate([BY_ID[base.attempt].routes[: base.rows], attempt.routes])


def _hides(fence: Delete | Clear, attempt: Attempt) -> bool:
    header = attempt.header
    if isinstance(fence, Clear):
        return header.epoch <= fence.through_epoch
    return header.epoch <= fence.epoch and covers(fence.prefix, header.rollout_id)


RECORDS = [(attempt, record) for attempt in POOL for record in attempt.records]
STEPS = st.lists(
    st.one_of(
        st.sampled_from(RECORDS),
        st.sampled_from(POOL),  # a whole attempt at once
        st.sampled_from(REMOVALS),
        st.sampled_from(["commit", "rollback", "reopen", "tidy"]),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_partition_equals_the_model(steps: list[object]) -> None:
    log: list[tuple[Attempt, bytes] | Delete | Clear] = []
    with tempfile.TemporaryDirectory() as folder:
        partition = Partition(0, Path(folder), GUARD, Rules(), MAP, sync=False)

        def catch_up() -> None:
            for offset in range(partition.next_offset or 0, len(log)):
                what = log[offset]
                value = what[1] if isinstance(what, tuple) else encode(what)
                partition.apply(offset, value, 1000)

        for step in steps:
            if isinstance(step, Attempt):
                log.extend((step, record) for record in step.records)
            elif isinstance(step, (tuple, Delete, Clear)):
                log.append(step)
            elif step == "commit":
                see_before_the_commit(partition, log)
                partition.commit()
            elif step == "tidy":
                partition.tidy(1000)
            elif step == "rollback":
                partition.rollback()
            elif step == "reopen":  # what is not committed is lost and read again
                partition.close()
                partition = Partition(0, Path(folder), GUARD, Rules(), MAP, sync=False)
            catch_up()
        see_before_the_commit(partition, log)
        partition.commit()
        compare(partition, log)
        partition.close()


def see_before_the_commit(partition: Partition, log: list[tuple[Attempt, bytes] | Delete | Clear]) -> None:
    """With the open batch, exactly what is whole by the whole log is readable."""
    model = Model()
    for what in log:
        model.feed(what)
    view = View(partition, partition.fresh)
    for number, attempt in BY_ID.items():
        found = [s for s in view.find(attempt.header.key).attempts if s.header.attempt == number and s.state == "whole"]
        assert len(found) == model.whole(number)
        for state in found:
            assert state.end is not None
            parts = list(rows_of(view, view.plan(state, 0, state.end.rows)))
            np.testing.assert_array_equal(np.concatenate(parts), model.rows(attempt))


def compare(partition: Partition, log: list[tuple[Attempt, bytes] | Delete | Clear]) -> None:
    model = Model()
    for what in log:
        model.feed(what)
    view = View(partition)
    for number, attempt in BY_ID.items():
        found = [s for s in view.find(attempt.header.key).attempts if s.header.attempt == number]
        assert len(found) == (1 if number in model.seen or number in model.gone or number in model.lost else 0)
        if number in model.gone:
            assert found[0].state == "gone"
        elif model.whole(number):
            assert found[0].state == "whole"
            end = found[0].end
            assert end is not None
            plan = view.plan(found[0], 0, end.rows)
            parts = list(rows_of(view, plan))
            np.testing.assert_array_equal(np.concatenate(parts), model.rows(attempt))
        elif found:
            assert found[0].state == ("open" if number in model.seen else "lost")
    assert partition.figures().whole == sum(model.whole(number) for number in BY_ID)
    if log:
        assert partition.figures().next_offset == len(log)
    assert_no_leak(partition)


def assert_no_leak(partition: Partition) -> None:
    """After the trash is freed, the blobs held are those of owners, and every reference is counted."""
    while partition.tidy(1000):
        partition.commit()
    partition.commit()
    with partition.reading() as (tables, _):
        states = list(tables.attempts(b""))
        refs: dict[int, int] = {}
        for state in states:
            for number in {part.owner for part in state.parts} | ({state.owner} if state.owner else set()):
                refs[number] = refs.get(number, 0) + 1
        blobs = list(tables._keys("blobs"))
        owners = [tables.owner(int.from_bytes(key, "big")) for key in tables._keys("owners")]
    assert {owner.number: owner.refs for owner in owners if owner is not None} == refs
    assert len(blobs) == sum(len(owner.chunks) for owner in owners if owner is not None)
