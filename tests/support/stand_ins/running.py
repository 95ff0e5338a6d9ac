"""A stand-in under uvicorn on a thread, on loopback, with faults of the network that any server may show."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.support.wait import wait_until

Cut = Literal["before", "after"]


@dataclass
class Faults:
    """Of the network, by path. `cut`: the connection breaks before or after the effect. `hold`: the answer waits for
    `release()`. `answer`: this (status, body) instead, without the effect."""

    cut: dict[str, Cut] = field(default_factory=dict)
    hold: set[str] = field(default_factory=set)
    answer: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    token: str | None = None
    calls: list[str] = field(default_factory=list)

    def release(self) -> None:
        self.hold.clear()

    def clear(self) -> None:
        for one in (self.cut, self.hold, self.answer, self.calls):
            one.clear()
        self.token = None

    def count(self, path: str) -> int:
        return sum(call.partition("?")[0].endswith(f" {path}") for call in self.calls)


class Running:
    """`url`; `kill()` closes the port, `boot(app)` opens it again with another life of the server."""

    def __init__(self, app: FastAPI) -> None:
        self.faults = Faults()
        self._port = 0
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.boot(app)

    @property
    def alive(self) -> bool:
        return self._server is not None and self._thread is not None and self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def boot(self, app: FastAPI) -> None:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        listener.listen(64)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(_Network(app, self.faults), log_level="critical", lifespan="off", access_log=False)
        server = uvicorn.Server(config)
        self._server = server
        self._thread = threading.Thread(target=_serve, args=(server, listener), daemon=True)
        self._thread.start()
        wait_until(lambda: server.started, 30.0, "the stand-in serves")

    def leave(self) -> None:
        """Ends without waiting for it: at the end of a test."""
        if self._server is not None:
            self._server.force_exit = self._server.should_exit = True
        self.faults.release()

    def kill(self) -> None:
        """Ends at once, whatever runs."""
        if self._server is None or self._thread is None:
            return
        self.leave()
        self._thread.join(30.0)
        assert not self._thread.is_alive()
        self._server = None


def _serve(server: uvicorn.Server, listener: socket.socket) -> None:
    asyncio.run(server.serve(sockets=[listener]))
    listener.close()


class _Network:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, faults: Faults) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        faults, path = self._faults, scope["path"]
        query = scope["query_string"].decode()
        faults.calls.append(f"{scope['method']} {path}{'?' if query else ''}{query}")
        if faults.token is not None and _token(scope) != f"Bearer {faults.token}":
            await _answer(send, 401, b'{"error": "Unauthorized"}')
        elif path in faults.answer:
            await _answer(send, *faults.answer[path])
        elif path in faults.cut:
            if faults.cut[path] == "after":
                await self._app(scope, receive, _nowhere)
            await _break(send)
        else:
            await self._app(scope, receive, self._held(path, send))

    def _held(self, path: str, send: Send) -> Callable[[Message], Any]:
        async def later(message: Message) -> None:
            while path in self._faults.hold:
                await asyncio.sleep(0.005)
            await send(message)

        return later


def _token(scope: Scope) -> str:
    return next((value.decode() for name, value in scope["headers"] if name == b"authorization"), "")


async def _nowhere(message: Message) -> None:
    """Swallows an answer."""


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _break(send: Send) -> None:
    """An answer that promises more than it sends: uvicorn closes the connection in the middle of it."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"64")]})
    await send({"type": "http.response.body", "body": b"{", "more_body": True})
    raise ConnectionAbortedError("the stand-in cuts this connection")
