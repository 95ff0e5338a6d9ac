"""Routes through the gateway: it asks the stores that announce themselves in the members topic."""

from __future__ import annotations

import io
import time
from typing import Any

import httpx
import numpy as np

from moebus.broker.ports import Broker
from moebus.broker.topics import Topics
from moebus.consumers.reader.ask import LOOKUP_SECONDS, Asker, Query
from moebus.consumers.reader.directory import MembersDirectory
from moebus.consumers.reader.errors import StoreUnreachable
from moebus.consumers.reader.listing import list_page
from moebus.consumers.reader.rollout import Rollout
from moebus.consumers.reader.store_client import StoreClient
from moebus.observability.clock import Clock
from moebus.producers.gateway.routes import Npy
from moebus.schemas.attempt import parse_attempt
from moebus.schemas.errors import InvalidInput
from moebus.schemas.rollout import check_prefix, check_run, rollout_key
from moebus.schemas.route_answer import RouteAnswer
from moebus.schemas.route_errors import StoreCatchingUp

_DELETE_SECONDS = 30.0
_NO_STORE = "no live store is in the members topic; start one with `moebus store`"


class StoreProxy:
    """A RouteBackend; answers StoreCatchingUp before `open`. Thread-safe."""

    def __init__(self) -> None:
        self._client = StoreClient()
        self._http = httpx.Client(trust_env=False)
        self._directory: MembersDirectory | None = None
        self._asker: Asker | None = None

    def open(self, broker: Broker, topics: Topics, clock: Clock) -> None:
        """Finds stores from now on."""
        self._directory = MembersDirectory(broker, topics.members, clock)
        self._asker = Asker(self._directory, self._client.get, clock, time.sleep)

    def close(self) -> None:
        self._client.close()
        self._http.close()
        if self._directory is not None:
            self._directory.close()

    def rollout(self, run: str, rollout_id: str, choice: int, attempt: str | None) -> Npy:
        rollout_key(check_run(run), rollout_id, choice)
        if attempt is not None:
            parse_attempt(attempt)
        if self._asker is None:
            raise StoreCatchingUp("the gateway waits for its broker")
        found = self._asker.get(Query(run, rollout_id, choice, attempt), 0.0)
        file = io.BytesIO()
        np.save(file, found.routes, allow_pickle=False)
        return Npy(file.getvalue(), _headers(found))

    def listing(self, run: str, prefix: str | None, limit: int, after: str | None) -> dict[str, Any]:
        check_run(run)
        if prefix is not None:
            check_prefix(prefix)
        page = list_page(
            self._found().stores(LOOKUP_SECONDS),
            lambda url, cursor, count: self._client.page(url, run, prefix, cursor, count),
            after,
            limit,
        )
        return {"rollouts": [one.as_dict() for one in page.rollouts], "after": page.after}

    def delete(self, run: str, prefix: str, epoch: int) -> dict[str, Any]:
        """Any store appends it to every partition; the next one is asked where one does not answer."""
        params = {"run": check_run(run), "prefix": check_prefix(prefix), "epoch": str(epoch)}
        why = _NO_STORE
        for store in self._found().stores(LOOKUP_SECONDS):
            try:
                answer = self._http.delete(f"{store.url}/v1/routes", params=params, timeout=_DELETE_SECONDS + 5)
            except httpx.TransportError as exc:
                why = f"{store.url} does not answer: {exc or type(exc).__name__}"
                continue
            if answer.status_code == 200:
                return dict(answer.json())
            why = f"{store.url}: HTTP {answer.status_code} {answer.text[:200]}"
            if answer.status_code == 400:
                raise InvalidInput("prefix", why)
        raise StoreUnreachable(why)

    def _found(self) -> MembersDirectory:
        if self._directory is None:
            raise StoreCatchingUp("the gateway waits for its broker")
        return self._directory


def _headers(found: Rollout) -> dict[str, str]:
    """Those of a store that say what the rows are."""
    answer = RouteAnswer(
        ref=found.ref, start=found.start, rows=len(found.routes), layers=found.layers, top_k=found.top_k,
        num_experts=found.num_experts, status=found.status, finish_reason=found.finish_reason, epoch=found.epoch,
        versions=found.versions, card_digest=found.card_digest,
    )  # fmt: skip
    return {
        name: text for name, text in answer.to_headers().items() if name not in ("moebus-partition", "moebus-applied")
    }
