"""What consumes: the trainer's reader of routes, the control worker, the store. Names load when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebus.schemas.lazy import lazy_names

if TYPE_CHECKING:
    from moebus.consumers.reader import AsyncRoutingReader as AsyncRoutingReader
    from moebus.consumers.reader import MegatronShard as MegatronShard
    from moebus.consumers.reader import Rollout as Rollout
    from moebus.consumers.reader import RouteBatch as RouteBatch
    from moebus.consumers.reader import RouteShard as RouteShard
    from moebus.consumers.reader import RoutingReader as RoutingReader

_HOME = {
    "AsyncRoutingReader": "moebus.consumers.reader",
    "MegatronShard": "moebus.consumers.reader",
    "Rollout": "moebus.consumers.reader",
    "RouteBatch": "moebus.consumers.reader",
    "RouteShard": "moebus.consumers.reader",
    "RoutingReader": "moebus.consumers.reader",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
