"""The parts of a store process put together: the store and its HTTP."""

from __future__ import annotations

import sys
from pathlib import Path

from starlette.routing import BaseRoute

from moebus.broker.ports import Broker
from moebus.cli._service import Service, Work
from moebus.consumers.store import RouteStore, StoreOptions, store_routes
from moebus.observability.memory import keep_memory

_KEEP_BYTES = 64 << 20
SWITCH_SECONDS = 0.001
"""How long the thread that takes records in or tidies keeps Python's lock from those that answer (default: 5 ms)."""


class StoreService:
    """One store over one data folder."""

    def __init__(self, service: Service, data_dir: Path, store_id: str, partitions: tuple[int, ...] | None) -> None:
        """Raises SettingsError or InvalidInput, naming the setting that is wrong."""
        self._service = service
        self._data_dir = data_dir
        self._store_id = store_id
        self._partitions = partitions
        self._options = StoreOptions.of(service.settings.store)
        self._store: RouteStore | None = None

    def routes(self) -> list[BaseRoute]:
        return store_routes(lambda: self._store)

    def make(self, broker: Broker, url: str) -> Work:
        """Called once the broker answers and its topics are there."""
        service = self._service
        keep_memory(_KEEP_BYTES)
        sys.setswitchinterval(SWITCH_SECONDS)
        service.health.add_ready("store", lambda: self._store.waiting() if self._store else "not started yet")
        self._store = RouteStore(
            broker,
            service.topics,
            self._data_dir,
            self._partitions,
            store_id=self._store_id,
            url=url,
            options=self._options,
            metrics=service.metrics,
            run=service.settings.run,
        )
        return self._store
