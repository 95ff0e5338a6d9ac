"""A route store with its HTTP page, announced in members, for tests of those who read from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moebus.broker.ports import Broker
from moebus.broker.topics import Topics
from moebus.consumers.store import RouteStore, StoreOptions, store_routes
from moebus.observability.health import Health
from moebus.observability.http import HttpServer
from moebus.observability.metrics import Metrics

OPTIONS = StoreOptions(map_bytes=64 << 20, commit_interval=0.005, sync=False)


@contextmanager
def serving(
    broker: Broker,
    topics: Topics,
    folder: Path,
    partitions: Sequence[int] | None = None,
    *,
    store_id: str = "store",
    options: StoreOptions = OPTIONS,
) -> Iterator[HttpServer]:
    """Runs a store; `.url` of what it yields is where it answers."""
    made: list[RouteStore] = []
    http = HttpServer(
        metrics=Metrics(), health=Health(), routes=store_routes(lambda: made[0] if made else None)
    ).start()
    store = RouteStore(broker, topics, folder, partitions, store_id=store_id, url=http.url, options=options)
    made.append(store)
    store.start()
    try:
        yield http
    finally:
        store.stop()
        http.stop()
