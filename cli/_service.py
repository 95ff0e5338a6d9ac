"""The frame of a long-running process: page first, wait for the broker, work, drain on SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starlette.routing import BaseRoute

from moebus.broker import open_broker
from moebus.broker.errors import BrokerUnavailable
from moebus.broker.ports import Broker
from moebus.broker.topics import Topics
from moebus.observability.health import Health
from moebus.observability.http import HttpServer
from moebus.observability.log import get_logger
from moebus.observability.metrics import Metrics
from moebus.observability.settings import Settings

_log = get_logger(__name__)
_PROBE_SECONDS = 5.0


class Work(Protocol):
    """What a service does once its broker is there. `start` returns, `stop` drains within a few seconds."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def failure(self) -> tuple[int, str] | None:
        """(exit code, reason) once it can no longer go on; None while well."""
        ...


@dataclass
class Service:
    """Everything a process of moebus has: settings, metrics, health, and a flag that ends it."""

    name: str
    settings: Settings
    metrics: Metrics = field(default_factory=Metrics)
    health: Health = field(default_factory=Health)
    stopping: threading.Event = field(default_factory=threading.Event)

    @property
    def topics(self) -> Topics:
        return Topics(self.settings.topic_prefix)

    def run(self, make: Callable[[Broker, str], Work], routes: Sequence[BaseRoute] = ()) -> int:
        """Serves until SIGTERM or SIGINT; returns the exit code.

        `make(broker, url)` builds the work after the broker answered and the topics are there.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stopping.set())
        waiting = ["it has not been reached yet"]
        self.health.add_ready("broker", lambda: waiting[0] if waiting else None)
        http = HttpServer(
            metrics=self.metrics,
            health=self.health,
            routes=routes,
            host=self.settings.http.host,
            port=self.settings.http.port,
        ).start()
        _log.info("service.started", f"{self.name} serves {http.url}/metrics", url=http.url)
        broker = open_broker(self.settings.kafka)
        try:
            return self._work(broker, self.settings.http.url or http.url, make, waiting)
        finally:
            broker.close()
            http.stop()
            _log.info("service.stopped", f"{self.name} has stopped")

    def _work(self, broker: Broker, url: str, make: Callable[[Broker, str], Work], waiting: list[str]) -> int:
        if not self._wait_for_topics(broker, waiting):
            return 0
        waiting.clear()
        work = make(broker, url)
        work.start()
        failure = None
        ready = False
        while failure is None and not self.stopping.wait(0.2):
            failure = work.failure()
            ready = self._say_readiness(ready, url)
        if failure is not None:
            _log.error("service.failed", failure[1], exit_code=failure[0])
        work.stop()
        return failure[0] if failure else 0

    def _say_readiness(self, before: bool, url: str) -> bool:
        """One line each time the process becomes able or unable to do its work."""
        reasons = self.health.ready()
        if not reasons and not before:
            _log.info("service.ready", f"{self.name} works", url=url)
        elif reasons and before:
            _log.warning("service.unready", "; ".join(reasons.values()), url=url)
        return not reasons

    def _wait_for_topics(self, broker: Broker, waiting: list[str]) -> bool:
        """False when told to stop first. Says every time the reason changes why it waits."""
        admin = broker.admin()
        said = ""
        try:
            while not self.stopping.is_set():
                reason = self._missing(broker, admin.describe)
                if reason is None:
                    return True
                waiting[0] = reason
                if reason != said:
                    _log.warning("service.waiting", f"{reason}; {self.name} waits and goes on by itself")
                    said = reason
                self.stopping.wait(1.0)
            return False
        finally:
            admin.close()

    def _missing(self, broker: Broker, describe: Callable[[Sequence[str], float], Mapping[str, object]]) -> str | None:
        try:
            found = describe(self.topics.names(), _PROBE_SECONDS)
        except BrokerUnavailable as exc:
            return str(exc)
        missing = sorted(set(self.topics.names()) - set(found))
        if not missing:
            return None
        return f"topics are missing ({', '.join(missing)}): run `moebus topics ensure`"


def with_http(settings: Settings, host: str | None, port: int | None) -> Settings:
    """Settings with the address of the page from the command line over them."""
    given = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    return settings.model_copy(update={"http": settings.http.model_copy(update=given)})
