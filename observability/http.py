"""The HTTP server that every process has: `/metrics`, `/healthz`, `/readyz` and the process's own routes.

Needs the extra `http` (starlette, uvicorn). Binds to loopback unless told otherwise.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from moebus.observability.health import Health
from moebus.observability.metrics import Metrics
from moebus.schemas.errors import SettingsError

_START_SECONDS = 10.0


class HttpServer:
    """Runs in a thread of its own. `port=0` takes a free one; `url` says which."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        health: Health,
        routes: Sequence[BaseRoute] = (),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Binds at once, so that a port in use is an error here.

        Raises:
            SettingsError: the address cannot be bound.
        """
        self._socket = _bind(host, port)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        app = Starlette(
            routes=[*standard_routes(metrics, health), *routes],
            exception_handlers={HTTPException: _http_error, Exception: _server_error},
        )
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2, server_header=False
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="moebus-http", daemon=True)

    @property
    def url(self) -> str:
        """`http://host:port`; a wildcard address is shown as loopback."""
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def start(self) -> HttpServer:
        """Returns once the socket listens."""
        self._socket.listen(128)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Finishes running requests for up to 2 s and closes; a second call does nothing."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_START_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        self._server.run(sockets=[self._socket])


def standard_routes(metrics: Metrics, health: Health) -> list[Route]:
    """`/metrics`, `/healthz`, `/readyz`."""

    def page_metrics(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def page_live(_: Request) -> Response:
        return _health(health.live())

    def page_ready(_: Request) -> Response:
        return _health(health.ready())

    return [Route("/metrics", page_metrics), Route("/healthz", page_live), Route("/readyz", page_ready)]


def _health(failed: dict[str, str]) -> Response:
    return JSONResponse({"ok": not failed, "failed": failed}, status_code=503 if failed else 200)


async def _http_error(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    return JSONResponse({"error": "Http", "detail": exc.detail}, status_code=exc.status_code, headers=exc.headers)


async def _server_error(_: Request, exc: Exception) -> Response:
    return JSONResponse({"error": type(exc).__name__, "detail": str(exc)}, status_code=500)


def _bind(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it; asyncio sets it only where the protocol number is given. Without it an answer in two
    # pieces (head, body) waits 40 ms for the peer's delayed acknowledgement.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        raise SettingsError(f"cannot listen on {host}:{port} ({exc.strerror}); choose another --http-port") from exc
    return sock
