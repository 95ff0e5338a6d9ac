"""Quotas by run: the oldest whole rollouts make room, other runs do not notice, every store decides alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moebus.consumers.store.decide import Rules
from moebus.consumers.store.ingest import Outcome
from moebus.consumers.store.partition import Guard, Partition
from moebus.consumers.store.select import select
from moebus.consumers.store.view import View, rows_of
from moebus.schemas.record import Base, Delete, encode
from moebus.schemas.route_errors import RouteDeleted, RouteNeverComing
from tests.support.routes import Attempt, attempt_id, make_attempt

GUARD = Guard("cluster", "topic")
ONE = len(make_attempt("size", rows=10, codec="raw").records[0])
LIMIT = 5 * ONE + ONE // 2
RULES = Rules(open_ttl_ms=1_000, keep_ttl_ms=10_000, quotas={"run": LIMIT})


def whole(number: int, run: str = "run", **more: object) -> Attempt:
    """One chunk of about `ONE` bytes and its END; all in one group."""
    return make_attempt(f"r{number}", run=run, number=number, rows=10, codec="raw", group="g", **more)  # type: ignore[arg-type]


class Fed:
    """A partition at `path` and the next offset of its log."""

    def __init__(self, path: Path, rules: Rules = RULES) -> None:
        self.path, self.rules = path, rules
        self.partition = Partition(0, path, GUARD, rules, 16 << 20, sync=False)

    def feed(self, *records: bytes, now_ms: int = 0) -> list[Outcome]:
        first = self.partition.next_offset or 0
        return [self.partition.apply(first + n, record, now_ms) for n, record in enumerate(records)]

    def put(self, *attempts: Attempt, now_ms: int = 0) -> None:
        for attempt in attempts:
            self.feed(*attempt.records, now_ms=now_ms)
        self.partition.commit()

    def again(self) -> None:
        self.partition.close()
        self.partition = Partition(0, self.path, GUARD, self.rules, 16 << 20, sync=False)

    def ids(self, run: str = "run") -> list[str]:
        return [state.key.rollout_id for state in View(self.partition).page(run, None, b"", 1000)]

    def usage(self, run: str = "run") -> int:
        return {one.run: one.used_bytes for one in self.partition.runs()}.get(run, 0)

    def open(self, run: str = "run") -> int:
        return {one.run: one.open_bytes for one in self.partition.runs()}.get(run, 0)

    def error(self, attempt: Attempt) -> str:
        found = View(self.partition).find(attempt.header.key)
        with pytest.raises((RouteDeleted, RouteNeverComing)) as caught:
            select(attempt.header.key, found.attempts, attempt.header.attempt, found.fence)
        return f"{caught.value.name} {caught.value}"


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Fed]:
    made = Fed(tmp_path)
    yield made
    made.partition.close()


def test_the_oldest_make_room_and_readers_are_told(fed: Fed) -> None:
    attempts = [whole(number) for number in range(1, 9)]
    others = [whole(number, run="other") for number in range(11, 31)]
    fed.put(*attempts, *others)
    assert fed.ids() == ["r4", "r5", "r6", "r7", "r8"]
    assert len(fed.ids("other")) == 20  # another run does not notice
    assert fed.usage() == 5 * len(attempts[0].records[0])
    text = fed.error(attempts[0])
    assert text.startswith("RouteDeleted")
    assert "quota of run run" in text
    assert "the oldest made room" in text


def test_what_was_given_up_is_counted_and_its_space_comes_back(fed: Fed) -> None:
    outcomes = [fed.feed(*whole(number).records) for number in range(1, 8)]
    assert [one[-1].over_quota for one in outcomes] == [None] * 5 + ["run"] * 2
    assert fed.partition.commit().removed == {"quota": 2}
    assert fed.partition.figures().whole == 5
    fed.partition.tidy(0)
    fed.partition.commit()
    with fed.partition.reading() as (tables, _):
        assert len(list(tables._keys("blobs"))) == 5


def test_a_rollout_that_can_never_fit_is_refused_and_takes_nothing_with_it(fed: Fed) -> None:
    fed.put(*(whole(number) for number in range(1, 4)))
    giant = make_attempt("giant", number=50, rows=80, chunks=8, codec="raw", group="g")
    verdicts = [(one.verdict, one.reason) for one in fed.feed(*giant.records)]
    fed.partition.commit()
    assert ("refused", "quota") in verdicts
    assert all(verdict in ("stored", "refused") for verdict, _ in verdicts)
    assert not any(one.completed for one in fed.feed(*giant.records))  # nor when it is sent again
    assert fed.error(giant).startswith("RouteDeleted")
    assert "this one alone is larger" in fed.error(giant)
    assert fed.ids() == ["r1", "r2", "r3"]
    assert (fed.usage(), fed.open()) == (3 * len(whole(1).records[0]), 0)


def test_what_is_open_has_as_much_again_and_takes_nothing_from_what_is_whole(fed: Fed) -> None:
    fed.put(*(whole(number) for number in range(1, 6)))
    halves = [make_attempt(f"h{n}", number=n, rows=20, chunks=2, codec="raw", group="g") for n in range(61, 68)]
    outcomes = [fed.feed(half.records[0])[0] for half in halves]
    assert [one.over_quota for one in outcomes] == [None] * 5 + ["run"] * 2
    fed.partition.commit()
    assert len(fed.ids()) == 5
    assert fed.open() == sum(len(half.records[0]) for half in halves[2:])
    assert "the oldest made room" in fed.error(halves[0])
    fed.put(Attempt(halves[6].header, halves[6].routes, halves[6].records[1:]))
    assert fed.ids() == ["h67", "r3", "r4", "r5"]
    # the time of the open ones ends in the log: that makes room without a sweep
    late = [make_attempt(f"l{n}", number=n, rows=20, chunks=2, codec="raw", group="g") for n in range(71, 76)]
    assert [fed.feed(half.records[0], now_ms=2_000)[0].over_quota for half in late] == [None] * 5


def test_rows_that_a_later_turn_uses_count_until_it_goes(fed: Fed) -> None:
    first = whole(1)
    turn = make_attempt("t", number=2, rows=10, base=Base(attempt_id(1), 10, "r1"), codec="raw", group="g")
    fed.put(first, turn, now_ms=1)
    held = fed.usage()
    fed.feed(encode(Delete("run", "r1", attempt_id(90))), now_ms=1)
    fed.partition.commit()
    assert fed.usage() == held  # the turn holds them
    fed.put(*(whole(number) for number in range(3, 7)), now_ms=2)
    assert "t" not in fed.ids()
    assert fed.ids() == ["r3", "r4", "r5", "r6"]
    assert fed.usage() == 4 * len(first.records[0])


def test_one_of_a_base_that_was_given_up_is_told_so(fed: Fed) -> None:
    fed.put(*(whole(number) for number in range(1, 8)))
    turn = make_attempt("t", number=20, rows=3, base=Base(attempt_id(1), 10, "r1"), group="g")
    assert fed.feed(*turn.records)[0].reason == "base_not_held"
    fed.partition.commit()
    assert fed.error(turn).startswith("RouteNeverComing")


def test_every_other_run(tmp_path: Path) -> None:
    fed = Fed(tmp_path, Rules(quotas={"*": 2 * ONE + 50, "big": 100 * ONE}))
    for run, first in (("a", 1), ("b", 20), ("big", 40)):
        fed.put(*(whole(number, run=run) for number in range(first, first + 6)))
    assert [len(fed.ids(run)) for run in ("a", "b", "big")] == [2, 2, 6]
    quotas = {one.run: one.quota_bytes for one in fed.partition.runs()}
    assert quotas == {"a": 2 * ONE + 50, "b": 2 * ONE + 50, "big": 100 * ONE}
    fed.partition.close()


def random_log(rng: random.Random) -> list[tuple[bytes, int]]:
    """(record, append time): attempts with and without a base, mixed; some are never finished; deletes."""
    log: list[tuple[bytes, int]] = []
    now = 0
    attempts: list[Attempt] = []
    waiting: list[bytes] = []
    for number in range(1, 120):
        before = rng.choice(attempts[-6:]) if attempts and rng.random() < 0.4 else None
        base = None
        if before is not None and before.header.base is None and len(before.routes):
            base = Base(before.header.attempt, len(before.routes), before.header.rollout_id)
        rows = rng.choice([0, 4, 10, 25])
        more = {"chunks": min(3, max(1, rows // 4)), "base": base}
        attempts.append(make_attempt(f"r{number}", number=number, rows=rows, codec="raw", group="g", **more))  # type: ignore[arg-type]
        waiting += attempts[-1].records
        for _ in range(rng.randrange(7)):
            if waiting:
                log.append((waiting.pop(rng.randrange(min(5, len(waiting)))), max(0, now)))
                now += rng.randrange(100) - 15  # append times of two brokers
        if rng.random() < 0.05:
            prefix = f"r{rng.randrange(1, number + 1)}"
            log.append((encode(Delete("run", prefix, attempt_id(10_000 + number))), max(0, now)))
    return log


def live(fed: Fed, log: list[tuple[bytes, int]], chance: random.Random, ill: bool) -> None:
    """Reads the log to its end; `ill`: with commits, crashes and sweeps wherever chance has them."""
    while (at := fed.partition.next_offset or 0) < len(log):
        value, when = log[at]
        fed.partition.apply(at, value, when)
        if ill and chance.random() < 0.3:
            fed.partition.commit()
        if ill and chance.random() < 0.05:
            fed.again()
        if ill and chance.random() < 0.2:
            fed.partition.tidy(fed.partition.figures().now_ms)
    fed.partition.commit()
    fed.partition.tidy(fed.partition.figures().now_ms)
    fed.partition.commit()


@pytest.mark.parametrize("seed", range(6))
def test_every_store_decides_alike(tmp_path: Path, seed: int) -> None:
    """The same log under other batches, restarts and sweeps, and a rebuild: the same end of everything."""
    log = random_log(random.Random(seed))
    ends = []
    for life in range(4):
        fed = Fed(tmp_path / str(life), Rules(open_ttl_ms=4_000, keep_ttl_ms=12_000, quotas={"run": LIMIT}))
        live(fed, log, random.Random(seed * 10 + life), ill=life > 0)
        view = View(fed.partition)
        found = {}
        for state in view.page("run", None, b"", 1000):
            assert state.end is not None
            rows = [*rows_of(view, view.plan(state, 0, state.end.rows))]
            found[state.header.attempt] = (np.concatenate(rows).tobytes() if rows else b"", state.at_ms)
        ends.append((found, fed.usage(), fed.open()))
        assert max(fed.usage(), fed.open()) <= LIMIT
        fed.partition.close()
    assert ends[0] == ends[1] == ends[2] == ends[3]
    assert ends[0][0]


def test_a_quota_that_is_lowered_holds_from_the_next_record_on(fed: Fed) -> None:
    fed.put(*(whole(number) for number in range(1, 6)))
    fed.rules = Rules(quotas={"run": 2 * ONE + 50})
    fed.again()
    assert len(fed.ids()) == 5
    fed.put(whole(6))
    assert fed.ids() == ["r5", "r6"]
