"""Nothing that a caller wrote is ignored: unknown parameters, fields and oversized bodies are refused by name."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moebus.producers.gateway.bodies import error_body
from moebus.schemas.base import echo
from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.jsonwire import decode_object

MAX_BODY = 16 << 20
Check = Callable[[Request], Awaitable[None]]


def only(*known: str) -> Check:
    """A dependency that refuses every other query parameter, and one given twice."""

    async def check(request: Request) -> None:
        seen: set[str] = set()
        for name, _ in request.query_params.multi_items():
            if name not in known:
                raise InvalidInput(name, f"unknown parameter; known are {', '.join(known) or 'none'}")
            if name in seen:
                raise InvalidInput(name, "given twice")
            seen.add(name)

    return check


async def json_object(request: Request) -> None:
    """A dependency of paths that take a body: one JSON object, no field twice, no number that JSON does not have."""
    raw = await request.body()
    if not raw.strip():
        raise InvalidInput("body", "missing")
    try:
        decoded = decode_object(raw)
    except BadRecord as error:
        raise InvalidInput("body", error.detail) from None
    if decoded.faults:
        raise InvalidInput(*decoded.faults[0])


async def no_body(request: Request) -> None:
    """A dependency of paths that take no body; an empty object counts as none."""
    raw = (await request.body()).strip()
    if raw in (b"", b"{}", b"null"):
        return
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidInput("body", "this path takes none, and this is not JSON") from None
    if isinstance(found, dict) and found:
        raise InvalidInput(next(iter(found)), "unknown field; this path takes no body")
    if found != {}:
        raise InvalidInput("body", "this path takes none")


def first_problem(errors: Sequence[Any]) -> InvalidInput:
    """The first error of FastAPI's validation as ours: `loc` is (`body` | `query` | `path` | `header`, name, ...)."""
    first = errors[0]
    names = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return InvalidInput("body", "not JSON")
    field = ".".join(names) or "body"
    cause = (first.get("ctx") or {}).get("error")
    if first["type"] == "extra_forbidden":
        return InvalidInput(field, "unknown field")
    if first["type"] == "missing":
        return InvalidInput(field, "missing")
    if isinstance(cause, InvalidInput):
        return InvalidInput(field if names else cause.field, cause.reason)
    text = str(first["msg"]).removeprefix("Value error, ")
    return InvalidInput(field, f"{text[:1].lower()}{text[1:]}, not {echo(first.get('input'))}")


class JsonBodies:
    """ASGI middleware: every body is read as JSON, whatever its type is said to be (FastDeploy does not look at it),
    and one above `MAX_BODY` bytes is refused before it is taken in."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY:
            refusal = error_body("InvalidInput", f"body: larger than {MAX_BODY} bytes")
            await JSONResponse(refusal, status_code=413)(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > MAX_BODY:  # without a length it cannot be known before
                raise InvalidInput("body", f"larger than {MAX_BODY} bytes")
            return message

        others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        json_scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
        await self._app(json_scope, counted, send)
