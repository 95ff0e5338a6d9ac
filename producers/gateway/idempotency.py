"""What a caller says of a command in headers."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Request

from moebus.schemas.control_args import check_request_id
from moebus.schemas.errors import InvalidInput

KEY = "Idempotency-Key"


@dataclass(frozen=True, slots=True)
class Identity:
    """`request_id`: the caller's own, None where it has none."""

    request_id: str | None
    traceparent: str | None

    def named(self) -> str:
        """The id of the command."""
        return self.request_id or f"control-{uuid.uuid4()}"


async def _identity(
    request: Request,
    idempotency_key: Annotated[
        str | None, Header(alias=KEY, description="Request id: the same one again joins the first command")
    ] = None,
    traceparent: Annotated[str | None, Header(description="W3C trace context, kept in the log")] = None,
) -> Identity:
    if idempotency_key is not None:
        try:
            check_request_id(idempotency_key)
        except InvalidInput as error:
            raise InvalidInput(KEY, error.reason) from None
        request.state.request_id = idempotency_key
    return Identity(idempotency_key, traceparent)


Caller = Annotated[Identity, Depends(_identity)]
