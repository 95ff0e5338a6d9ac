"""Paths of the fleet: workers, any command, outcomes, history."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import JSONResponse
from pydantic import Field, JsonValue

from moebus.producers.control.outcome import position_text
from moebus.producers.gateway.backend import Backend, Wanted
from moebus.producers.gateway.bodies import Accepted, Body, History, OutcomeBody, Workers, outcome_body
from moebus.producers.gateway.idempotency import KEY, Caller, Identity
from moebus.producers.gateway.strict import json_object, only
from moebus.schemas.base import StrictModel
from moebus.schemas.control import Expect
from moebus.schemas.errors import FatalError, InvalidInput

MAX_HISTORY = 1000
_UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"model": Body, "description": "Not known"}}


class UnknownWorker(FatalError):
    """No worker of this id is in the members topic."""


class ControlBody(StrictModel):
    """A command, as in the log; the gateway is its issuer. `min_ok`: so many good answers are enough."""

    method: str
    args: dict[str, JsonValue] | None = None
    target: str | list[str] | None = None
    deadline_s: float | None = None
    request_id: str | None = None
    run: str | None = None
    expect: Expect | None = None
    min_ok: Annotated[int, Field(ge=1)] | None = None

    def wanted(self, caller: Identity) -> Wanted:
        """Raises InvalidInput where body and header name different ids."""
        if self.request_id is not None and caller.request_id not in (None, self.request_id):
            raise InvalidInput("request_id", f"another one than in the header {KEY}")
        return Wanted(
            self.method,
            self.args,
            target=self.target,
            timeout=self.deadline_s,
            request_id=self.request_id or caller.request_id,
            traceparent=caller.traceparent,
            run=self.run,
            expect=self.expect,
            min_ok=self.min_ok,
        )


def router(backend: Backend) -> APIRouter:
    """`/v1/workers` and `/v1/control`."""
    pages = APIRouter(tags=["Fleet"])
    _workers(pages, backend)
    _control(pages, backend)
    return pages


def _workers(pages: APIRouter, backend: Backend) -> None:
    @pages.get("/v1/workers", response_model=Workers, dependencies=[Depends(only())])
    async def workers() -> JSONResponse:
        """Every worker: state, memory, labels, the operation in progress, whether it is live."""
        views = [view.as_dict() for view in await backend.members() if view.state.kind == "worker"]
        return JSONResponse({"workers": views})

    @pages.get(
        "/v1/workers/{worker_id}",
        response_model=dict[str, JsonValue],
        responses=_UNKNOWN,
        dependencies=[Depends(only())],
    )
    async def worker(worker_id: Annotated[str, Path(description="Its id")]) -> JSONResponse:
        """One worker."""
        for view in await backend.members():
            if view.state.kind == "worker" and view.member_id == worker_id:
                return JSONResponse(view.as_dict())
        raise UnknownWorker(f"no worker {worker_id} is in the members topic")


def _control(pages: APIRouter, backend: Backend) -> None:
    @pages.post(
        "/v1/control", response_model=Accepted, status_code=202, dependencies=[Depends(json_object), Depends(only())]
    )
    async def issue(caller: Caller, body: ControlBody) -> JSONResponse:
        """Issues any command and returns once it is in the log; its outcome is at `/v1/control/{id}`."""
        operation = await backend.start(body.wanted(caller))
        accepted = Accepted(
            request_id=operation.request_id,
            position=position_text(operation.position),
            appended_ms=operation.position.timestamp_ms,
        )
        where = {"location": f"/v1/control/{quote(operation.request_id, safe='')}"}
        return JSONResponse(accepted.model_dump(mode="json"), 202, headers=where)

    @pages.get("/v1/control", response_model=History, dependencies=[Depends(only("limit"))])
    async def history(limit: Annotated[int, Query(ge=1, le=MAX_HISTORY)] = 20) -> JSONResponse:
        """The last commands, by anybody, oldest first."""
        return JSONResponse({"operations": [entry.as_dict() for entry in await backend.history(limit)]})

    @pages.get(
        "/v1/control/{request_id:path}",
        response_model=OutcomeBody,
        responses=_UNKNOWN,
        dependencies=[Depends(only())],
    )
    async def outcome(request_id: str) -> JSONResponse:
        """The outcome of any command, by anybody, as the log tells it; 200 also where the command failed."""
        return JSONResponse(outcome_body(await backend.find(request_id)))
