"""Listing what the stores hold, page by page, over all shares of the partitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moebus.consumers.reader.ask import shares_of
from moebus.consumers.reader.directory import StoreAddress
from moebus.consumers.reader.errors import StoreUnreachable
from moebus.consumers.reader.store_client import StorePage
from moebus.schemas.errors import InvalidInput
from moebus.schemas.route_ref import RouteRef

FetchPage = Callable[[str, "str | None", int], StorePage]
"""(url, cursor within that store, most entries) -> a page."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One whole attempt that a store holds. `at_ms`: append time of its END, Unix milliseconds."""

    ref: RouteRef
    status: str
    epoch: int
    partition: int
    at_ms: int

    def as_dict(self) -> dict[str, object]:
        """The fields of the RouteRef and the others, as one JSON object."""
        return {
            **self.ref.to_dict(),
            "group": self.ref.effective_group,
            "status": self.status,
            "epoch": self.epoch,
            "partition": self.partition,
            "at_ms": self.at_ms,
        }


@dataclass(frozen=True, slots=True)
class Page:
    """`after`: cursor of the next page, None after the last one."""

    rollouts: tuple[Listed, ...]
    after: str | None


def list_page(stores: Sequence[StoreAddress], fetch: FetchPage, after: str | None, limit: int) -> Page:
    """One page. Shares come one after the other; within each, rollouts in order of their ids.

    Raises:
        InvalidInput: field `after`, not a cursor of an earlier page.  RouteError: StoreUnreachable among them.
    """
    shares = [copies[0] for copies in shares_of(stores, None, 0)]
    if not shares:
        raise StoreUnreachable("no live store is in the members topic; start one with `moebus store`")
    index, cursor = _split(after, len(shares))
    found: list[Listed] = []
    while index < len(shares) and len(found) < limit:
        page = fetch(shares[index].url, cursor, limit - len(found))
        found += [_listed(entry) for entry in page.rollouts]
        index, cursor = (index, page.next) if page.next else (index + 1, None)
    return Page(tuple(found), f"{index}.{cursor or ''}" if index < len(shares) else None)


def _split(after: str | None, shares: int) -> tuple[int, str | None]:
    if after is None:
        return 0, None
    number, _, cursor = after.partition(".")
    if not number.isascii() or not number.isdigit() or int(number) >= shares:
        raise InvalidInput("after", f"{after[:40]!r} is not a cursor of an earlier page")
    return int(number), cursor or None


def _listed(entry: dict[str, Any]) -> Listed:
    extra = {name: entry.pop(name) for name in ("status", "epoch", "partition", "at_ms")}
    if "group64" in entry:  # the same group in a form that every text survives
        del entry["group"]
    return Listed(RouteRef.from_dict(entry), **extra)
