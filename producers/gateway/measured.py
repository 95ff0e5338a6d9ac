"""How long the gateway's requests take."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moebus.observability.metrics import Metrics


class Measured:
    """ASGI middleware. The label `path` is that of the route, never the caller's own text."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            path = str(getattr(scope.get("route"), "path", "other"))
            self._metrics.observe(
                "moebus_gateway_request_duration_seconds", time.monotonic() - started, path=path, status=str(status)
            )
