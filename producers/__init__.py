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
    from moebus.producers.transfer_step import TransferBroken as TransferBroken
    from moebus.producers.transfer_step import TransferStep as TransferStep
    from moebus.producers.weight_transfer import WeightTransferClient as WeightTransferClient

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
    "TransferBroken": "moebus.producers.transfer_step",
    "TransferStep": "moebus.producers.transfer_step",
    "WeightTransferClient": "moebus.producers.weight_transfer",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
