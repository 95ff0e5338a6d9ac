"""Asking several stores, which share the partitions or copy each other, and making one answer of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moebus.consumers.reader.directory import StoreAddress, StoreDirectory
from moebus.consumers.reader.errors import StoreUnreachable
from moebus.consumers.reader.rollout import Rollout
from moebus.observability.clock import Clock
from moebus.schemas.route_errors import (
    AmbiguousAttempt,
    RouteCorrupt,
    RouteDeleted,
    RouteError,
    RouteNeverComing,
    RouteNotYet,
    StoreCatchingUp,
)

LOOKUP_SECONDS = 10.0
LONG_POLL_SECONDS = 20.0
SLICE_SECONDS = 0.25
"""How long each store may hold a question while others are to be asked too."""
RETRY_SECONDS = 0.1
_WORST_FIRST: tuple[type[RouteError], ...] = (
    AmbiguousAttempt,
    RouteCorrupt,
    RouteDeleted,
    RouteNeverComing,
    StoreCatchingUp,
    StoreUnreachable,
    RouteNotYet,
)
_FINAL = _WORST_FIRST[:4]


@dataclass(frozen=True, slots=True)
class Query:
    """Which rollout, and which part of it. `partition`: where it lies, None where that is not known."""

    run: str
    rollout_id: str
    choice: int = 0
    attempt: str | None = None
    layers: tuple[int, ...] | None = None
    start: int = 0
    stop: int | None = None
    min_offset: int | None = None
    partition: int | None = None

    def __str__(self) -> str:
        named = f" attempt {self.attempt}" if self.attempt else ""
        return f"{self.run}/{self.rollout_id}#{self.choice}{named}"


Fetch = Callable[[str, Query, float], Rollout]
"""(url, query, seconds the store may wait) -> the rollout, or a RouteError."""


class Asker:
    """Thread-safe where `fetch` and the directory are."""

    def __init__(self, directory: StoreDirectory, fetch: Fetch, clock: Clock, pause: Callable[[float], object]) -> None:
        """`pause(seconds)`: waits before stores that do not answer are asked again."""
        self._directory = directory
        self._fetch = fetch
        self._clock = clock
        self._pause = pause

    def get(self, query: Query, wait: float) -> Rollout:
        """Asks until there is a rollout, an answer that cannot change, or `wait` seconds have passed.

        Raises:
            RouteError: one of its subclasses.  BrokerUnavailable: the stores could not be looked up.
        """
        deadline = self._clock.monotonic() + wait
        turn, fresh = 0, False
        while True:
            stores = self._directory.stores(LOOKUP_SECONDS, fresh=fresh)
            answers = self._round(query, shares_of(stores, query.partition, turn), deadline)
            verdict = merge(query, answers)
            if isinstance(verdict, Rollout):
                return verdict
            left = deadline - self._clock.monotonic()
            if isinstance(verdict, _FINAL) or left <= 0:
                raise verdict
            turn, fresh = turn + 1, isinstance(verdict, StoreUnreachable)
            if not isinstance(verdict, RouteNotYet):
                self._pause(min(left, RETRY_SECONDS))

    def _round(
        self, query: Query, shares: Sequence[Sequence[StoreAddress]], deadline: float
    ) -> list[Rollout | RouteError]:
        longest = LONG_POLL_SECONDS if len(shares) == 1 else SLICE_SECONDS
        return [self._ask_copies(query, copies, deadline, longest) for copies in shares]

    def _ask_copies(
        self, query: Query, copies: Sequence[StoreAddress], deadline: float, longest: float
    ) -> Rollout | RouteError:
        """The answer of the first copy that has one; of those that have none, the last one's excuse."""
        answer: Rollout | RouteError = StoreUnreachable(no_store(query))
        for store in copies:
            left = max(0.0, deadline - self._clock.monotonic())
            try:
                return self._fetch(store.url, query, min(left, longest))
            except (StoreUnreachable, StoreCatchingUp) as exc:
                answer = exc
            except RouteError as exc:
                return exc
        return answer


def shares_of(stores: Sequence[StoreAddress], partition: int | None, turn: int) -> list[list[StoreAddress]]:
    """Whom to ask in this turn: for every share of the partitions that matters those that hold it, a different one
    first in each turn. With a known partition that is a single share."""
    copies: dict[frozenset[int] | str | None, list[StoreAddress]] = {}
    for store in sorted(stores, key=lambda one: one.url):
        if store.holds(partition):
            known = store.partitions if partition is None else None
            same = store.url if store.partitions is None else known  # not known what it holds: it stands for itself
            copies.setdefault(same, []).append(store)
    return [group[turn % len(group) :] + group[: turn % len(group)] for group in copies.values()]


def merge(query: Query, answers: Sequence[Rollout | RouteError]) -> Rollout | RouteError:
    """One answer out of those of all shares. One identity found in two groups is ambiguous."""
    found = {one.ref.attempt: one for one in answers if isinstance(one, Rollout)}
    if len(found) > 1:
        where = ", ".join(f"{one.ref.attempt} in group {one.ref.effective_group}" for one in found.values())
        return AmbiguousAttempt(f"{query} is there as {where}: name the attempt")
    if found:
        return next(iter(found.values()))
    errors = [one for one in answers if isinstance(one, RouteError)]
    for kind in _WORST_FIRST:
        for error in errors:
            if isinstance(error, kind):
                return error
    return errors[0] if errors else StoreUnreachable(no_store(query))


def no_store(query: Query) -> str:
    """The sentence for nobody to ask."""
    where = "" if query.partition is None else f" that follows partition {query.partition}"
    return f"{query}: no live store{where} is in the members topic; start one with `moebus store`"
