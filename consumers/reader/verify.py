"""Reading what the stores hold and saying of each rollout whether it is what it should be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moebus.consumers.reader.checks import check_ref
from moebus.consumers.reader.listing import Listed
from moebus.consumers.reader.reader import RoutingReader
from moebus.schemas.route_errors import RouteDeleted, RouteError

PAGE = 1000
PATIENCE = 10.0
"""Seconds that a store which just started, or goes over to another, is waited for."""


@dataclass(frozen=True, slots=True)
class Verified:
    """`fault`: None where it is right, else the error's name and text. `nbytes`: of its rows."""

    listed: Listed
    fault: str | None
    nbytes: int


def listed_all(reader: RoutingReader, prefix: str | None, limit: int | None = None) -> Iterator[Listed]:
    """Every whole attempt below a prefix, page by page. Raises as `RoutingReader.page`."""
    after: str | None = None
    left = limit
    while left is None or left > 0:
        page = reader.page(prefix, limit=PAGE if left is None else min(PAGE, left), after=after)
        yield from page.rollouts
        after = page.after
        left = None if left is None else left - len(page.rollouts)
        if after is None:
            return


def verify(reader: RoutingReader, prefix: str | None, limit: int | None = None) -> Iterator[Verified]:
    """Reads each: record checksums (at the store), shape, ids, the model card of the reader, rows and token hash of
    its listing. One that is deleted meanwhile is left out.

    Raises:
        RouteError: StoreUnreachable, StoreCatchingUp.  BrokerUnavailable.
    """
    for listed in listed_all(reader, prefix, limit):
        ref = listed.ref
        try:
            group = ref.effective_group
            found = check_ref(reader.get(ref.rollout_id, ref.choice, ref.attempt, group=group, wait=PATIENCE), ref)
        except RouteDeleted:
            continue
        except RouteError as error:
            if error.http == 503:
                raise
            yield Verified(listed, f"{error.name}: {error}", 0)
            continue
        yield Verified(listed, None, found.routes.nbytes)
