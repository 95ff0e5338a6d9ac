"""What consumes: the trainer's reader of routes, the control worker, the store. Names load when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

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


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOME)
