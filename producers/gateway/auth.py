"""The bearer token of the gateway."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import SecretStr

from moebus.schemas.errors import FatalError

_Given = Annotated[
    HTTPAuthorizationCredentials | None,
    Depends(HTTPBearer(auto_error=False, description="The gateway's token (MOEBUS_GATEWAY__TOKEN)")),
]
Authorize = Callable[..., Awaitable[None]]


class Unauthorized(FatalError):
    """No token, or another one; `status` is the HTTP number."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def bearer(token: SecretStr) -> Authorize:
    """A dependency that lets only requests with this token pass: 401 without one, 403 with another."""
    wanted = token.get_secret_value().encode()

    async def authorize(given: _Given) -> None:
        if given is None:
            raise Unauthorized(401, "a bearer token is needed: Authorization: Bearer TOKEN")
        if not hmac.compare_digest(given.credentials.encode(), wanted):
            raise Unauthorized(403, "this bearer token is not the gateway's")

    return authorize
