"""What publishes: control commands and routes. Names are loaded when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebus.schemas.lazy import lazy_names

if TYPE_CHECKING:
    from moebus.producers.control import AsyncControlClient as AsyncControlClient
    from moebus.producers.control import ControlClient as ControlClient
    from moebus.producers.control import FleetError as FleetError
    from moebus.producers.control import FleetPartial as FleetPartial
    from moebus.producers.control import FleetTimeout as FleetTimeout
    from moebus.producers.control import Outcome as Outcome
    from moebus.producers.routing import AsyncRoutingPublisher as AsyncRoutingPublisher
    from moebus.producers.routing import FenceReceipt as FenceReceipt
    from moebus.producers.routing import RoutingPublisher as RoutingPublisher
    from moebus.producers.routing import RoutingReceipt as RoutingReceipt

_HOME = {
    "AsyncControlClient": "moebus.producers.control",
    "ControlClient": "moebus.producers.control",
    "FleetError": "moebus.producers.control",
    "FleetPartial": "moebus.producers.control",
    "FleetTimeout": "moebus.producers.control",
    "Outcome": "moebus.producers.control",
    "AsyncRoutingPublisher": "moebus.producers.routing",
    "FenceReceipt": "moebus.producers.routing",
    "RoutingPublisher": "moebus.producers.routing",
    "RoutingReceipt": "moebus.producers.routing",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
