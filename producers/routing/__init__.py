"""Publishing routes: `RoutingPublisher` and its receipts."""

from moebus.producers.routing.aio import AsyncRoutingPublisher
from moebus.producers.routing.errors import NotSampled, PublisherClosed, PublisherSuspended, RoutesDropped
from moebus.producers.routing.publisher import RoutingPublisher
from moebus.producers.routing.receipt import FenceReceipt, FenceStored, Receipt, RoutingReceipt, Stored
from moebus.producers.routing.responses import ResponseReceipts
from moebus.producers.routing.stats import PublisherStats

__all__ = [
    "AsyncRoutingPublisher",
    "FenceReceipt",
    "FenceStored",
    "NotSampled",
    "PublisherClosed",
    "PublisherStats",
    "PublisherSuspended",
    "Receipt",
    "ResponseReceipts",
    "RoutesDropped",
    "RoutingPublisher",
    "RoutingReceipt",
    "Stored",
]
