"""The parts of a worker process put together: control host, publisher, HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from moebus.broker.ports import Broker
from moebus.cli._service import Service, Work
from moebus.consumers.control import ControlWorkerHost, WorkerSpec
from moebus.consumers.generate import generate_route
from moebus.engine.http import ServerEngine
from moebus.engine.port import Engine, GeneratingEngine
from moebus.observability.log import get_logger
from moebus.producers.routing import RoutingPublisher
from moebus.schemas.errors import MoebusError
from moebus.schemas.model_card import ModelCard

_CLOSE_SECONDS = 5.0
_log = get_logger(__name__)


class Side(Protocol):
    """What a worker has beside its control loop, by the kind of its engine."""

    @property
    def engine(self) -> Engine: ...

    def routes(self) -> list[BaseRoute]: ...

    def open(self, broker: Broker) -> None:
        """Called once the broker answers and its topics are there."""
        ...

    def trouble(self) -> str | None:
        """Why the engine does not answer now."""
        ...

    def close(self) -> None: ...


class InProcess:
    """An engine of this process: it takes prompts here, and this process publishes its routes."""

    def __init__(self, service: Service, engine: GeneratingEngine, card: ModelCard, run: str) -> None:
        self.engine = engine
        self._service = service
        self._card = card
        self._run = run
        self._publisher: RoutingPublisher | None = None

    def routes(self) -> list[BaseRoute]:
        return [generate_route(self.engine, lambda: self._publisher, self._service.metrics)]

    def open(self, broker: Broker) -> None:
        """The publisher opens its own connection: by default in a process of its own, beside this one's lock."""
        service = self._service
        self._publisher = RoutingPublisher.from_settings(
            run=self._run, card=self._card, settings=service.settings, metrics=service.metrics
        )
        service.health.add_ready("publisher", self._publisher.problem)

    def trouble(self) -> str | None:
        return None

    def close(self) -> None:
        left = [] if self._publisher is None else self._publisher.close(_CLOSE_SECONDS)
        if left:
            text = f"{len(left)} rollouts are unsent: {', '.join(left[:20])}{', ...' if len(left) > 20 else ''}"
            _log.error("routes.unsent", text, count=len(left))


class Sidecar:
    """A server of its own: it takes prompts itself, and whoever asks it publishes the routes."""

    def __init__(self, engine: ServerEngine) -> None:
        self.engine = engine

    def routes(self) -> list[BaseRoute]:
        return [Route("/v1/generate", self._refuse, methods=["POST"])]

    def _refuse(self, _: Request) -> Response:
        detail = f"this worker only drives a {self.engine.kind} server; send prompts to {self.engine.url}"
        return JSONResponse({"error": "Unsupported", "detail": detail}, status_code=501)

    def open(self, broker: Broker) -> None:
        pass

    def trouble(self) -> str | None:
        return self.engine.trouble

    def close(self) -> None:
        pass


def make_work(service: Service, side: Side, worker_id: str, labels: dict[str, str]) -> Callable[[Broker, str], Work]:
    """What `Service.run` calls once the broker is there."""

    def make(broker: Broker, url: str) -> Work:
        side.open(broker)
        spec = WorkerSpec(worker_id, side.engine, labels, http=url, trouble=side.trouble)
        host = ControlWorkerHost(
            broker,
            service.topics,
            [spec],
            metrics=service.metrics,
            health=service.health,
            heartbeat=service.settings.worker.heartbeat,
        )
        return _Work(host, side)

    return make


class _Work:
    def __init__(self, host: ControlWorkerHost, side: Side) -> None:
        self._host = host
        self._side = side

    def start(self) -> None:
        self._host.start()

    def failure(self) -> tuple[int, str] | None:
        error = self._host.error
        if error is not None:
            return (error.exit_code if isinstance(error, MoebusError) else 1), f"{type(error).__name__}: {error}"
        return None if self._host.alive else (1, "the control loop has ended")

    def stop(self) -> None:
        # Commands first: what they end (aborted requests) still publishes routes.
        self._host.stop()
        self._side.close()
