"""Which life of a server this is (design section 3.1, engine identity)."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

from moebus.engine.http.server import EngineServer
from moebus.engine.port import EngineFailed, EngineRefused, EngineUnreachable, Unsupported

LONGEST = 128


class Lives:
    """`current()` changes whenever the server's memory was lost.

    `boot` reads what the server itself says of its start (a start time, a process id); None where it says nothing:
    then every lost connection counts as a lost memory, and so does a restart of the worker. While the server does not
    answer nothing is proven, and nothing can be served either: the last identity stays.
    """

    def __init__(self, server: EngineServer, boot: Callable[[], str | None]) -> None:
        self._server = server
        self._boot = boot
        self._lock = threading.Lock()
        self._watcher = uuid.uuid4().hex[:12]
        self._last: str | None = None

    def current(self) -> str:
        """At most 128 characters. Raises EngineUnreachable: the server has never answered."""
        try:
            fact = self._boot()
        except EngineUnreachable:
            if self._last is None:
                raise
            return self._last
        except (Unsupported, EngineFailed, EngineRefused):
            fact = None
        return self.judged(fact)

    def judged(self, fact: str | None) -> str:
        """As `current`, where the caller has just read `boot` itself."""
        place = self._server.url.partition("://")[2][-64:]
        with self._lock:
            life = fact if fact is not None else f"{self._watcher}-{self._server.losses}"
            self._last = f"{place}/{life}"[:LONGEST]
            return self._last
