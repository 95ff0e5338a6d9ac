"""The parts of a worker process put together: control host, publisher, HTTP."""

from __future__ import annotations

from starlette.routing import BaseRoute

from moebus.broker.ports import Broker
from moebus.cli._service import Service, Work
from moebus.consumers.control import ControlWorkerHost, WorkerSpec
from moebus.consumers.generate import generate_route
from moebus.engine.port import GeneratingEngine
from moebus.producers.routing import RoutingPublisher
from moebus.schemas.errors import MoebusError
from moebus.schemas.model_card import ModelCard

_CLOSE_SECONDS = 5.0


class WorkerService:
    """One engine, its control worker, and the publisher of its routes."""

    def __init__(
        self,
        service: Service,
        engine: GeneratingEngine,
        card: ModelCard,
        worker_id: str,
        labels: dict[str, str],
        run: str,
    ) -> None:
        self._service = service
        self._engine = engine
        self._card = card
        self._worker_id = worker_id
        self._labels = labels
        self._run = run
        self._publisher: RoutingPublisher | None = None

    def routes(self) -> list[BaseRoute]:
        return [generate_route(self._engine, lambda: self._publisher, self._service.metrics)]

    def make(self, broker: Broker, url: str) -> Work:
        """Called once the broker answers and its topics are there."""
        service = self._service
        self._publisher = RoutingPublisher(
            broker,
            service.topics,
            run=self._run,
            card=self._card,
            options=service.settings.publisher,
            metrics=service.metrics,
        )
        host = ControlWorkerHost(
            broker,
            service.topics,
            [WorkerSpec(self._worker_id, self._engine, self._labels, http=url)],
            metrics=service.metrics,
            health=service.health,
            heartbeat=service.settings.worker.heartbeat,
        )
        return _Work(host, self._publisher)


class _Work:
    def __init__(self, host: ControlWorkerHost, publisher: RoutingPublisher) -> None:
        self._host = host
        self._publisher = publisher

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
        self._publisher.close(_CLOSE_SECONDS)
