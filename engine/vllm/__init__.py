"""vLLM: its server driven by its own HTTP API, and the routes out of its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebus.schemas.lazy import lazy_names

if TYPE_CHECKING:
    from moebus.engine.vllm.engine import VllmEngine as VllmEngine
    from moebus.engine.vllm.routes import RouteStream as RouteStream
    from moebus.engine.vllm.routes import decode_routes as decode_routes

_HOME = {
    "VllmEngine": "moebus.engine.vllm.engine",
    "RouteStream": "moebus.engine.vllm.routes",
    "decode_routes": "moebus.engine.vllm.routes",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
