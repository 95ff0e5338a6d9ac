"""The parts of a gateway process put together: the application, its client, the stores it asks."""

from __future__ import annotations

import ipaddress
import os
import threading

from starlette.routing import BaseRoute, Mount

from moebus.broker.errors import BrokerUnavailable
from moebus.broker.ports import Broker, LogAdmin
from moebus.cli._gateway_routes import StoreProxy
from moebus.cli._service import Service, Work
from moebus.engine.legacy_signals import check_suffix
from moebus.observability.clock import SystemClock
from moebus.observability.settings import Settings
from moebus.producers.control import ControlClient
from moebus.producers.gateway import Backend, Legacy, gateway_app, legacy_mode
from moebus.schemas.errors import InvalidInput, MoebusError, SettingsError

_PROBE_SECONDS = 2.0
_DRAIN_SECONDS = 5.0


class GatewayService:
    """One gateway. The pages are there before the broker is: they answer 503 until then."""

    def __init__(self, service: Service) -> None:
        """Raises SettingsError: it would listen outside loopback without a token, or the legacy variable is wrong."""
        check_exposure(service.settings)
        self._service = service
        self._client: ControlClient | None = None
        self._stores = StoreProxy()
        self._legacy = legacy_of(service.settings, legacy_mode(os.environ))
        self._backend = Backend(lambda: self._client)

    def routes(self) -> list[BaseRoute]:
        app = gateway_app(
            self._backend,
            token=self._service.settings.gateway.token,
            legacy=self._legacy,
            route_backend=self._stores,
            metrics=self._service.metrics,
        )
        return [Mount("/", app=app)]

    def make(self, broker: Broker, url: str) -> Work:
        """Called once the broker answers and its topics are there."""
        client = ControlClient(broker, self._service.topics, metrics=self._service.metrics)
        work = _Work(client, self._backend, broker.admin(), self._stores)
        self._service.health.add_ready("broker", work.unreachable)
        self._stores.open(broker, self._service.topics, SystemClock())
        self._client = client
        return work


class _Work:
    def __init__(self, client: ControlClient, backend: Backend, admin: LogAdmin, stores: StoreProxy) -> None:
        self._client = client
        self._backend = backend
        self._admin = admin
        self._stores = stores
        self._stop = threading.Event()
        self._reason: str | None = None
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._probe, name="moebus-gateway-probe", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def failure(self) -> tuple[int, str] | None:
        ended = self._client.failure
        if ended is not None:
            return 1, f"the gateway reads no more answers: {type(ended).__name__}: {ended}"
        return None if self._failure is None else (1, self._failure)

    def unreachable(self) -> str | None:
        """Why commands cannot be issued now."""
        return self._reason

    def stop(self) -> None:
        self._stop.set()
        # Commands that are waited for are in the log; what they become can be read there by any process.
        self._backend.operations.wait_idle(_DRAIN_SECONDS)
        self._client.close()
        self._stores.close()
        self._thread.join(_PROBE_SECONDS * 2)
        self._admin.close()

    def _probe(self) -> None:
        """Asks for the broker's name every so often."""
        while not self._stop.wait(_PROBE_SECONDS):
            try:
                self._admin.cluster_id(_PROBE_SECONDS)
                self._reason = None
            except BrokerUnavailable as exc:
                self._reason = str(exc)
            except MoebusError as exc:
                self._failure = f"{type(exc).__name__}: {exc}"


def check_exposure(settings: Settings) -> None:
    """Raises SettingsError where anybody on the network could command the fleet."""
    if settings.gateway.token is None and not _loopback(settings.http.host):
        raise SettingsError(
            f"the gateway does not listen on {settings.http.host} without a token: set MOEBUS_GATEWAY__TOKEN"
        )


def legacy_of(settings: Settings, over_log: bool) -> Legacy:
    """How the legacy paths work. Raises SettingsError: a suffix that cannot end a name."""
    gateway = settings.gateway
    try:
        for suffix in gateway.legacy_suffixes:
            check_suffix(suffix)
    except InvalidInput as exc:
        raise SettingsError(f"setting gateway.legacy_suffixes: {exc.reason}") from exc
    return Legacy(over_log, gateway.legacy_suffixes, gateway.legacy_timeout)


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
