"""Publishing routes: `RoutingPublisher` and its receipts. Names are loaded when they are first used: the process that
sends needs few of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebus.schemas.lazy import lazy_names

if TYPE_CHECKING:
    from moebus.producers.routing.aio import AsyncRoutingPublisher as AsyncRoutingPublisher
    from moebus.producers.routing.errors import NotSampled as NotSampled
    from moebus.producers.routing.errors import PublisherClosed as PublisherClosed
    from moebus.producers.routing.errors import PublisherSuspended as PublisherSuspended
    from moebus.producers.routing.errors import RoutesDropped as RoutesDropped
    from moebus.producers.routing.publisher import RoutingPublisher as RoutingPublisher
    from moebus.producers.routing.receipt import FenceReceipt as FenceReceipt
    from moebus.producers.routing.receipt import FenceStored as FenceStored
    from moebus.producers.routing.receipt import Receipt as Receipt
    from moebus.producers.routing.receipt import RoutingReceipt as RoutingReceipt
    from moebus.producers.routing.receipt import Stored as Stored
    from moebus.producers.routing.responses import ResponseReceipts as ResponseReceipts
    from moebus.producers.routing.stats import PublisherStats as PublisherStats

_HERE = "moebus.producers.routing"
_HOME = {
    "AsyncRoutingPublisher": f"{_HERE}.aio",
    "FenceReceipt": f"{_HERE}.receipt",
    "FenceStored": f"{_HERE}.receipt",
    "NotSampled": f"{_HERE}.errors",
    "PublisherClosed": f"{_HERE}.errors",
    "PublisherStats": f"{_HERE}.stats",
    "PublisherSuspended": f"{_HERE}.errors",
    "Receipt": f"{_HERE}.receipt",
    "ResponseReceipts": f"{_HERE}.responses",
    "RoutesDropped": f"{_HERE}.errors",
    "RoutingPublisher": f"{_HERE}.publisher",
    "RoutingReceipt": f"{_HERE}.receipt",
    "Stored": f"{_HERE}.receipt",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
