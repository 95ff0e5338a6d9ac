"""A gateway in front of real control workers beside simulated engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import SecretStr
from starlette.routing import Mount

from moebus.broker.ports import Broker
from moebus.broker.topics import Topics
from moebus.consumers.control import ControlWorkerHost, WorkerSpec
from moebus.engine.simulated import SimulatedEngine
from moebus.observability.health import Health
from moebus.observability.http import HttpServer
from moebus.observability.metrics import Metrics
from moebus.producers.control import ControlClient
from moebus.producers.gateway import Backend, Legacy, RouteBackend, gateway_app
from tests.support.openapi import Described
from tests.support.wait import wait_until

NAMES = ("worker-1", "worker-2")


@dataclass
class Stand:
    """`http` asks the gateway; `client` is the one that it uses."""

    http: httpx.Client
    client: ControlClient
    backend: Backend
    engines: Sequence[SimulatedEngine]

    def post(self, path: str, **given: Any) -> httpx.Response:
        return self.http.post(path, **given)

    def get(self, path: str, **given: Any) -> httpx.Response:
        return self.http.get(path, **given)

    def is_paused(self) -> bool:
        answer = self.get("/v1/is_paused")
        assert answer.status_code == 200, answer.text
        paused = answer.json()["result"]["is_paused"]
        assert isinstance(paused, bool)
        return paused


@contextmanager
def page(
    backend: Backend,
    *,
    token: str | None = None,
    legacy: Legacy | None = None,
    routes: RouteBackend | None = None,
    headers: Mapping[str, str] | None = None,
) -> Iterator[httpx.Client]:
    """The application behind a real server; every answer is held against its schema."""
    app = gateway_app(backend, token=None if token is None else SecretStr(token), legacy=legacy, route_backend=routes)
    server = HttpServer(metrics=Metrics(), health=Health(), routes=[Mount("/", app=app)]).start()
    try:
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False, headers=headers) as http:
            http.event_hooks = {"response": [Described(app.openapi()).check]}
            yield http
    finally:
        server.stop()


@contextmanager
def stand(
    broker: Broker, topics: Topics, engines: Sequence[SimulatedEngine], *, legacy: Legacy | None = None
) -> Iterator[Stand]:
    """Workers `worker-1`, ... beside `engines`, a client, and the page."""
    specs = [WorkerSpec(f"worker-{n}", engine, {"role": "rollout"}) for n, engine in enumerate(engines, 1)]
    host = ControlWorkerHost(broker, topics, specs)
    host.start()
    client = ControlClient(broker, topics, issuer="gateway")
    backend = Backend(lambda: client)
    try:
        with client, page(backend, legacy=legacy) as http:
            wait_until(lambda: sum(w.live and w.state.ready for w in client.workers()) == len(specs), 60, "ready")
            yield Stand(http, client, backend, engines)
    finally:
        host.stop()
