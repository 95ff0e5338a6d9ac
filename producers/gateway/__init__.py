"""The HTTP gateway: FastDeploy's control paths and those of the fleet, over the log. Needs the extra `gateway`."""

from __future__ import annotations

from moebus.producers.gateway.app import gateway_app
from moebus.producers.gateway.backend import Backend
from moebus.producers.gateway.legacy import Legacy, legacy_mode
from moebus.producers.gateway.routes import RouteBackend

__all__ = ["Backend", "Legacy", "RouteBackend", "gateway_app", "legacy_mode"]
