"""FastDeploy's control paths, for the whole fleet."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse
from pydantic import Field, JsonValue

from moebus.producers.gateway.backend import Backend, Wanted
from moebus.producers.gateway.bodies import Body, control_body, error_body
from moebus.producers.gateway.idempotency import Caller, Identity
from moebus.producers.gateway.strict import json_object, no_body, only
from moebus.schemas.base import StrictModel
from moebus.schemas.control import MAX_DEADLINE_S
from moebus.schemas.control_args import CacheMode, Method
from moebus.schemas.errors import InvalidInput
from moebus.schemas.tags import parse_tags

Tags = Annotated[str | None, Query(description="weight, kv_cache, separated by a comma; both where it is left out")]
_WHOLE = [Depends(no_body)]
_NO_QUERY = [Depends(only())]
_OBJECT = [Depends(json_object), *_NO_QUERY]


class UpdateBody(StrictModel):
    """Body of `/v1/update_weights`. `timeout`: seconds in which it may run (default 600)."""

    version: str
    verify_checksum: bool | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)] | None = None
    rsync_config: dict[str, JsonValue] | None = None
    source: str | None = None
    digest: str | None = None
    cache: CacheMode | None = None

    def args(self) -> dict[str, Any]:
        """Args of the command: FastDeploy's own fields are for the engine."""
        if self.rsync_config is not None and "etcd_server" not in self.rsync_config:
            raise InvalidInput("rsync_config.etcd_server", "missing")
        options = {"verify_checksum": self.verify_checksum, "rsync_config": self.rsync_config}
        given = {name: value for name, value in options.items() if value is not None}
        args = {"version": self.version, "source": self.source, "digest": self.digest, "cache": self.cache}
        return {name: value for name, value in args.items() if value is not None} | (
            {"options": given} if given else {}
        )


class AbortBody(StrictModel):
    """Body of `/v1/abort_requests`."""

    abort_all: bool = False
    req_ids: list[str] | None = None

    def args(self) -> dict[str, Any]:
        if not self.abort_all and not self.req_ids:
            raise InvalidInput("req_ids", "must provide abort_all=true or req_ids")
        return {"all": True} if self.abort_all else {"ids": self.req_ids}


def sleep_args(tags: str | None) -> dict[str, Any]:
    """Sleep there discards. Raises InvalidInput, field `tags`."""
    return {"tags": [str(tag) for tag in parse_tags(tags, aliases=False)], "level": "discard"}


def wakeup_args(tags: str | None) -> dict[str, Any]:
    """Wakeup there resumes. Raises InvalidInput, field `tags`."""
    return {"tags": [str(tag) for tag in parse_tags(tags, aliases=False)], "weights": "restore", "resume": True}


async def command(
    backend: Backend, caller: Identity, method: Method, args: dict[str, Any] | None, timeout: float | None = None
) -> tuple[dict[str, Any], int]:
    """Body and HTTP status of a command that was issued and waited for."""
    wanted = Wanted(method, args, timeout=timeout, request_id=caller.request_id, traceparent=caller.traceparent)
    outcome = await backend.perform(wanted)
    return control_body(outcome), outcome.http_status


def router(backend: Backend) -> APIRouter:
    """The seven paths under `/v1`."""
    pages = APIRouter(tags=["FastDeploy"])
    _plain(pages, backend)
    _with_tags(pages, backend)
    _with_body(pages, backend)
    return pages


def _plain(pages: APIRouter, backend: Backend) -> None:
    @pages.post("/v1/pause", response_model=Body, dependencies=[*_WHOLE, *_NO_QUERY])
    async def pause(caller: Caller) -> JSONResponse:
        """Closes admission; running requests end with what they have."""
        return JSONResponse(*await command(backend, caller, Method.PAUSE, {"mode": "abort"}))

    @pages.post("/v1/resume", response_model=Body, dependencies=[*_WHOLE, *_NO_QUERY])
    async def resume(caller: Caller) -> JSONResponse:
        """Opens admission; needs all memory resident and the weights valid."""
        return JSONResponse(*await command(backend, caller, Method.RESUME, None))

    @pages.get("/v1/is_paused", response_model=Body, dependencies=_NO_QUERY)
    async def is_paused() -> JSONResponse:
        """Whether every live worker is closed to requests."""
        paused = await backend.paused()
        if paused is None:
            return JSONResponse(error_body("no_targets", "no live worker is in the members topic"), 404)
        return JSONResponse(Body(status="success", result={"is_paused": paused}).model_dump(mode="json"))


def _with_tags(pages: APIRouter, backend: Backend) -> None:
    @pages.post("/v1/sleep", response_model=Body, dependencies=[*_WHOLE, Depends(only("tags"))])
    async def sleep(caller: Caller, tags: Tags = None) -> JSONResponse:
        """Pauses and gives device memory back, without a copy of it."""
        return JSONResponse(*await command(backend, caller, Method.SLEEP, sleep_args(tags)))

    @pages.post("/v1/wakeup", response_model=Body, dependencies=[*_WHOLE, Depends(only("tags"))])
    async def wakeup(caller: Caller, tags: Tags = None) -> JSONResponse:
        """Takes device memory again, loads the weights from their source, and resumes where everything is there."""
        return JSONResponse(*await command(backend, caller, Method.WAKEUP, wakeup_args(tags), WAKEUP_SECONDS))


def _with_body(pages: APIRouter, backend: Backend) -> None:
    @pages.post("/v1/update_weights", response_model=Body, dependencies=_OBJECT)
    async def update_weights(caller: Caller, body: UpdateBody) -> JSONResponse:
        """New weights on every worker or on none."""
        return JSONResponse(*await command(backend, caller, Method.UPDATE_WEIGHTS, body.args(), body.timeout))

    @pages.post("/v1/abort_requests", response_model=Body, dependencies=_OBJECT)
    async def abort_requests(caller: Caller, body: AbortBody) -> JSONResponse:
        """Ends these requests, or every one."""
        return JSONResponse(*await command(backend, caller, Method.ABORT_REQUESTS, body.args()))


WAKEUP_SECONDS = 300.0
"""As long as FastDeploy waits: weights are loaded."""
