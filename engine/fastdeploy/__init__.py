"""FastDeploy: its server driven by its own HTTP API, and the routes out of its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebus.schemas.lazy import lazy_names

if TYPE_CHECKING:
    from moebus.engine.fastdeploy.engine import FastDeployEngine as FastDeployEngine
    from moebus.engine.fastdeploy.routes import RouteStream as RouteStream
    from moebus.engine.fastdeploy.routes import decode_routes as decode_routes

_HOME = {
    "FastDeployEngine": "moebus.engine.fastdeploy.engine",
    "RouteStream": "moebus.engine.fastdeploy.routes",
    "decode_routes": "moebus.engine.fastdeploy.routes",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
