"""SGLang: its server driven by its own HTTP API, and the routes out of its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moebus.schemas.lazy import lazy_names

if TYPE_CHECKING:
    from moebus.engine.sglang.engine import SGLangEngine as SGLangEngine
    from moebus.engine.sglang.routes import RouteStream as RouteStream
    from moebus.engine.sglang.routes import decode_routes as decode_routes

_HOME = {
    "SGLangEngine": "moebus.engine.sglang.engine",
    "RouteStream": "moebus.engine.sglang.routes",
    "decode_routes": "moebus.engine.sglang.routes",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
