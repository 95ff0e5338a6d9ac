"""What publishes: control commands and routes. Names are loaded when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

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


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
