"""Reading routes: `RoutingReader`, `RouteBatch` and the stream of whole rollouts."""

from moebus.consumers.reader.aio import AsyncRolloutStream, AsyncRoutingReader
from moebus.consumers.reader.batch import RouteBatch
from moebus.consumers.reader.dense import PaddedRoutes, RouteShard
from moebus.consumers.reader.directory import FixedStores, MembersDirectory, StoreAddress
from moebus.consumers.reader.errors import StoreUnreachable
from moebus.consumers.reader.item import StreamItem
from moebus.consumers.reader.listing import Listed, Page
from moebus.consumers.reader.reader import RoutingReader
from moebus.consumers.reader.rollout import Rollout
from moebus.consumers.reader.shard import MegatronShard, stage_layers
from moebus.consumers.reader.stream import RolloutStream, StreamOptions

__all__ = [
    "AsyncRolloutStream",
    "AsyncRoutingReader",
    "FixedStores",
    "Listed",
    "MegatronShard",
    "MembersDirectory",
    "PaddedRoutes",
    "Page",
    "Rollout",
    "RolloutStream",
    "RouteBatch",
    "RouteShard",
    "RoutingReader",
    "StoreAddress",
    "StoreUnreachable",
    "StreamItem",
    "StreamOptions",
    "stage_layers",
]
