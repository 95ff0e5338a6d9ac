"""Asking several stores: who is asked, what their answers make together, when asking ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from moebus.consumers.reader.ask import Asker, Query, merge, shares_of
from moebus.consumers.reader.directory import StoreAddress
from moebus.consumers.reader.errors import StoreUnreachable
from moebus.consumers.reader.rollout import Rollout
from moebus.observability.clock import ManualClock
from moebus.schemas.attempt import attempt_text
from moebus.schemas.route_errors import (
    AmbiguousAttempt,
    RouteCorrupt,
    RouteDeleted,
    RouteError,
    RouteNeverComing,
    RouteNotYet,
    StoreCatchingUp,
)
from moebus.schemas.route_ref import RouteRef
from tests.support.routes import CARD, attempt_id, make_routes

A, B, A2 = (
    StoreAddress("http://a", frozenset({0, 1})),
    StoreAddress("http://b", frozenset({2, 3})),
    StoreAddress("http://a2", frozenset({0, 1})),
)
QUERY = Query("run", "r")
Answer = Rollout | RouteError


def rollout(number: int = 1, group: str | None = None) -> Rollout:
    ref = RouteRef("run", "r", 0, attempt_text(attempt_id(number)), 3, group)
    return Rollout(ref, make_routes(3), CARD.moe_layers, CARD.top_k, CARD.num_experts, "complete")


class Stores:
    """A directory and a fetch function in one; `answer(url, query, turn)` decides."""

    def __init__(self, stores: Sequence[StoreAddress], answer: Callable[[str, int], Answer]) -> None:
        self.clock = ManualClock()
        self.asked: list[tuple[str, float]] = []
        self.fresh: list[bool] = []
        self._stores = stores
        self._answer = answer
        self.asker = Asker(self, self.fetch, self.clock, self.clock.advance)

    def stores(self, timeout: float, *, fresh: bool = False) -> Sequence[StoreAddress]:
        self.fresh.append(fresh)
        return self._stores

    def close(self) -> None: ...

    def fetch(self, url: str, query: Query, wait: float) -> Rollout:
        self.asked.append((url, wait))
        answer = self._answer(url, len(self.asked))
        if isinstance(answer, RouteError):
            if isinstance(answer, RouteNotYet):
                self.clock.advance(wait)
            raise answer
        return answer


def test_by_partition_copies_are_asked_in_turns() -> None:
    assert shares_of([A, B, A2], 1, 0) == [[A, A2]]
    assert shares_of([A, B, A2], 1, 1) == [[A2, A]]
    assert shares_of([A, B, A2], 2, 7) == [[B]]
    assert shares_of([A, B], 9, 0) == []


def test_by_identity_every_share_is_asked() -> None:
    assert shares_of([A2, B, A], None, 0) == [[A, A2], [B]]
    assert shares_of([A2, B, A], None, 1) == [[A2, A], [B]]
    unknown = StoreAddress("http://x"), StoreAddress("http://y")
    assert len(shares_of(unknown, None, 0)) == len(shares_of(unknown, 3, 0)) == 2


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([RouteNotYet(""), RouteDeleted("")], RouteDeleted),
        ([RouteNotYet(""), StoreCatchingUp("")], StoreCatchingUp),
        ([StoreCatchingUp(""), RouteNeverComing("")], RouteNeverComing),
        ([RouteDeleted(""), RouteCorrupt("")], RouteCorrupt),
        ([RouteCorrupt(""), AmbiguousAttempt("")], AmbiguousAttempt),
        ([StoreUnreachable(""), RouteNotYet("")], StoreUnreachable),
        ([RouteNotYet("")], RouteNotYet),
        ([], StoreUnreachable),
        ([rollout(1), rollout(2, "g")], AmbiguousAttempt),
        ([rollout(1), rollout(1), RouteNotYet("")], Rollout),
        ([RouteDeleted(""), rollout(1)], Rollout),
    ],
)
def test_one_answer_out_of_many(answers: list[Answer], expected: type) -> None:
    assert type(merge(QUERY, answers)) is expected


def test_it_waits_until_the_rollout_is_there() -> None:
    stores = Stores([A], lambda url, turn: RouteNotYet("not yet") if turn < 4 else rollout())
    assert stores.asker.get(QUERY, 100.0).ref.rollout_id == "r"
    assert stores.asked[0] == ("http://a", 20.0)


def test_the_wait_ends_with_the_last_answer() -> None:
    stores = Stores([A, B], lambda url, turn: RouteNotYet(f"{url} has nothing"))
    with pytest.raises(RouteNotYet, match="http://a has nothing"):
        stores.asker.get(QUERY, 1.0)
    assert {url for url, _ in stores.asked} == {"http://a", "http://b"}
    assert stores.asked[0][1] == 0.25
    assert stores.clock.monotonic() >= 1.0


def test_an_answer_that_cannot_change_ends_it_at_once() -> None:
    stores = Stores([A], lambda url, turn: RouteDeleted("gone"))
    with pytest.raises(RouteDeleted):
        stores.asker.get(QUERY, 100.0)
    assert len(stores.asked) == 1


@pytest.mark.parametrize("excuse", [StoreUnreachable("down"), StoreCatchingUp("at 3 of 9")])
def test_the_reader_goes_to_the_copy_at_once(excuse: RouteError) -> None:
    stores = Stores([A, A2], lambda url, turn: excuse if url == "http://a" else rollout())
    assert stores.asker.get(Query("run", "r", partition=0), 0.0).ref.rows == 3
    assert [url for url, _ in stores.asked] == ["http://a", "http://a2"]


def test_dead_stores_make_the_reader_look_again() -> None:
    stores = Stores([A, A2], lambda url, turn: StoreUnreachable("down") if turn < 4 else rollout())
    assert stores.asker.get(Query("run", "r", partition=0), 5.0).ref.rows == 3
    assert [url for url, _ in stores.asked] == ["http://a", "http://a2", "http://a2", "http://a"]
    assert stores.fresh == [False, True]


def test_nobody_to_ask_names_the_partition() -> None:
    stores = Stores([A], lambda url, turn: rollout())
    with pytest.raises(
        StoreUnreachable, match=r"run/r#0 attempt X: no live store that follows partition 3 .*moebus store"
    ):
        stores.asker.get(Query("run", "r", attempt="X", partition=3), 0.3)
    assert len(stores.fresh) > 2
