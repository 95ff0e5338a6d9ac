"""Paths of routes: whoever builds the gateway says how stores are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import JSONResponse

from moebus.producers.gateway.backend import Backend
from moebus.producers.gateway.bodies import Body
from moebus.producers.gateway.strict import only
from moebus.schemas.rollout import MAX_CHOICE, MAX_EPOCH

MAX_LIMIT = 10_000
_ERRORS: dict[int | str, dict[str, Any]] = {
    404: {"model": Body, "description": "RouteNotYet"},
    409: {"model": Body, "description": "AmbiguousAttempt"},
    410: {"model": Body, "description": "RouteNeverComing, RouteDeleted"},
    422: {"model": Body, "description": "RouteCorrupt"},
}
_FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {}}, "description": "[rows, layers, top_k], .npy"}
}
Choice = Annotated[int, Query(ge=0, le=MAX_CHOICE)]
Attempt = Annotated[str | None, Query(description="Where there are several")]
Run = Annotated[str, Query(description="The run")]
Prefix = Annotated[str, Query(description="`a:1` covers `a:1` and `a:1:...`, never `a:10`")]


@dataclass(frozen=True, slots=True)
class Npy:
    """A rollout as a .npy file, and header fields that describe it."""

    body: bytes
    headers: Mapping[str, str]


class RouteBackend(Protocol):
    """Asks stores; blocking, thread-safe. Raises InvalidInput, RouteError and BrokerUnavailable."""

    def rollout(self, run: str, rollout_id: str, choice: int, attempt: str | None) -> Npy: ...

    def listing(self, run: str, prefix: str | None, limit: int, after: str | None) -> dict[str, Any]: ...

    def delete(self, run: str, prefix: str, epoch: int) -> dict[str, Any]: ...


def router(backend: Backend, stores: RouteBackend) -> APIRouter:
    """`/v1/routes`."""
    pages = APIRouter(tags=["Routes"], responses=_ERRORS)

    async def answer(run: str, rollout_id: str, choice: int, attempt: str | None) -> Response:
        found = await backend.reads.run(lambda: stores.rollout(run, rollout_id, choice, attempt))
        return Response(found.body, media_type="application/octet-stream", headers=dict(found.headers))

    @pages.get(
        "/v1/routes/{run}/{rollout_id:path}",
        response_class=Response,
        responses=_FILE,
        dependencies=[Depends(only("choice", "attempt"))],
    )
    async def rollout(run: str, rollout_id: str, choice: Choice = 0, attempt: Attempt = None) -> Response:
        """The expert ids of one rollout."""
        return await answer(run, rollout_id, choice, attempt)

    @pages.get(
        "/v1/rollout",
        response_class=Response,
        responses=_FILE,
        dependencies=[Depends(only("run", "rollout_id", "choice", "attempt"))],
    )
    async def rollout_by_query(
        run: Run,
        rollout_id: Annotated[str, Query(description="Any text of 1 to 255 bytes")],
        choice: Choice = 0,
        attempt: Attempt = None,
    ) -> Response:
        """The same, for ids with a part `.` or `..`, or a line break, which paths do not carry."""
        return await answer(run, rollout_id, choice, attempt)

    @pages.get("/v1/routes", dependencies=[Depends(only("run", "prefix", "limit", "after"))])
    async def listing(
        run: Run,
        prefix: Annotated[str | None, Query(description="As for DELETE; all where it is left out")] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_LIMIT)] = 1000,
        after: Annotated[str | None, Query(description="`after` of the page before")] = None,
    ) -> JSONResponse:
        """Whole attempts that the stores hold."""
        return JSONResponse(await backend.reads.run(lambda: stores.listing(run, prefix, limit, after)))

    @pages.delete("/v1/routes", dependencies=[Depends(only("run", "prefix", "epoch"))])
    async def delete(run: Run, prefix: Prefix, epoch: Annotated[int, Query(ge=0, le=MAX_EPOCH)] = 0) -> JSONResponse:
        """Deletes every rollout below the prefix, epoch <= `epoch`, in all stores, and refuses late records of it."""
        return JSONResponse(await backend.reads.run(lambda: stores.delete(run, prefix, epoch)))

    return pages
