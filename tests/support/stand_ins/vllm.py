"""A stand-in for `vllm serve` in dev mode, written from vLLM's public documentation and routers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tests.support.stand_ins import vllm_core
from tests.support.stand_ins.running import Running
from tests.support.stand_ins.vllm_core import Bugs, Core

_BOOTS = itertools.count(1_700_000_000)
_NAMES = itertools.count(1)


class VllmStandIn:
    """One server at one port over its lives; `core` and `started` are of the present one."""

    def __init__(self, bugs: Bugs | None = None, weights: str = "w0") -> None:
        self.bugs = bugs or Bugs()
        self._weights = weights
        self.core = Core(weights, self.bugs)
        self.started = float(next(_BOOTS))
        self._app = FastAPI()
        for add in (_traffic, _memory, _weights, _facts, _looks):
            add(self._app, self)
        self.running = Running(self._app)
        self.faults = self.running.faults

    def reset(self, bugs: Bugs) -> None:
        """Another server as far as anybody can tell, at the same port."""
        self.bugs = bugs
        self.faults.clear()
        self._begin()

    @property
    def url(self) -> str:
        return self.running.url

    def kill(self) -> None:
        self.core.stop()
        self.running.kill()

    def leave(self) -> None:
        self.core.stop()
        self.running.leave()

    def boot(self) -> None:
        self._begin()
        self.running.boot(self._app)

    def unplug(self) -> None:
        """Out of reach, with its memory as it is."""
        self.running.kill()

    def plug(self) -> None:
        self.running.boot(self._app)

    def _begin(self) -> None:
        self.core.stop()
        self.core = Core(self._weights, self.bugs)
        self.started = float(next(_BOOTS))

    def restart(self) -> None:
        self.kill()
        self.boot()


async def _on(at: VllmStandIn, what: Callable[[], Any]) -> Any:
    return await asyncio.wrap_future(at.core.call(what))


def _ok() -> Response:
    return Response(status_code=200)


async def _body(request: Request) -> dict[str, Any]:
    found = await request.json()
    if not isinstance(found, dict):
        raise HTTPException(400, "Invalid JSON format")
    return found


def _traffic(app: FastAPI, at: VllmStandIn) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> dict[str, Any]:
        body = await _body(request)
        name = str(request.headers.get("x-request-id") or next(_NAMES))
        one = vllm_core.Request(f"cmpl-{name}-0", int(body.get("max_tokens", 16)))
        await _on(at, lambda: at.core.add(one))
        done: dict[str, Any] = await asyncio.wrap_future(one.done)
        return {"id": one.name, "choices": [{"index": 0, "text": done["weights"], **done}]}

    @app.post("/pause")
    async def pause(mode: str = "abort", clear_cache: bool = True) -> JSONResponse:
        if mode not in ("abort", "wait", "keep"):
            return JSONResponse({"error": f"Invalid pause mode: {mode}"}, 400)
        await _on(at, lambda: at.core.pause(mode, clear_cache))
        return JSONResponse({"status": "paused"})

    @app.post("/resume")
    async def resume() -> dict[str, str]:
        await _on(at, at.core.resume)
        return {"status": "resumed"}

    @app.post("/abort_requests")
    async def abort(request: Request) -> dict[str, Any]:
        names = (await _body(request)).get("request_ids")
        return {"status": "aborted", "aborted": await _on(at, lambda: at.core.abort(names or None))}


def _memory(app: FastAPI, at: VllmStandIn) -> None:
    @app.post("/sleep")
    async def sleep(level: int = 1, mode: str = "abort") -> Response:
        await _on(at, lambda: at.core.sleep(level, mode))
        return _ok()

    @app.post("/wake_up")
    async def wake(tags: list[str] | None = Query(None)) -> Response:  # noqa: B008
        await _on(at, lambda: at.core.wake(tags))
        return _ok()

    @app.post("/reset_prefix_cache")
    async def reset(reset_running_requests: bool = False, reset_external: bool = False) -> Response:
        await _on(at, lambda: at.core.reset_cache(reset_running_requests))
        return _ok()


def _weights(app: FastAPI, at: VllmStandIn) -> None:
    @app.post("/collective_rpc")
    async def rpc(request: Request) -> dict[str, Any]:
        body = await _body(request)
        if body.get("method") != "reload_weights":
            raise HTTPException(400, "Missing 'method' in request body")
        await _on(at, lambda: at.core.reload(body.get("kwargs", {}).get("weights_path")))
        return {"results": [None]}

    @app.post("/init_weight_transfer_engine")
    async def init(request: Request) -> dict[str, str]:
        info = (await _body(request)).get("init_info")
        if info is None:
            raise HTTPException(400, "Missing 'init_info' in request body")
        await _on(at, lambda: at.core.init_transfer(info))
        return {"message": "Weight transfer initialized"}

    @app.post("/start_weight_update")
    async def start() -> dict[str, str]:
        await _on(at, at.core.start_update)
        return {"message": "Weight update started"}

    @app.post("/update_weights")
    async def update(request: Request) -> dict[str, str]:
        info = (await _body(request)).get("update_info")
        if info is None:
            raise HTTPException(400, "Missing 'update_info' in request body")
        await _on(at, lambda: at.core.update(info))
        return {"message": "Weights updated"}

    @app.post("/finish_weight_update")
    async def finish(request: Request) -> dict[str, str]:
        version = (await _body(request)).get("weight_version")
        await _on(at, lambda: at.core.finish_update(None if at.bugs.no_labels else version))
        return {"message": "Weight update finished"}


def _looks(app: FastAPI, at: VllmStandIn) -> None:
    async def is_paused(_: Request) -> JSONResponse:
        return JSONResponse({"is_paused": await _on(at, lambda: at.core.paused)})

    async def is_sleeping(_: Request) -> JSONResponse:
        return JSONResponse({"is_sleeping": await _on(at, lambda: at.core.paused or bool(at.core.asleep))})

    async def metrics(_: Request) -> PlainTextResponse:
        lines = ["# HELP process_start_time_seconds Start time"]
        if not at.bugs.several_api_servers:
            lines.append(f"process_start_time_seconds {at.started:.2f}")
        if not at.bugs.no_stats:
            lines += _gauges(at.core)
        return PlainTextResponse("\n".join(lines))

    async def version(_: Request) -> JSONResponse:
        _labelled(at)
        return JSONResponse({"weight_version": await _on(at, lambda: at.core.version)})

    looks = {"/is_paused": is_paused, "/is_sleeping": is_sleeping, "/metrics": metrics, "/weight_info": version}
    for path, look in looks.items():  # without FastAPI's handling, as most of what a test asks are these
        app.router.routes.insert(0, Route(path, look))


def _facts(app: FastAPI, at: VllmStandIn) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "m", "object": "model", "root": vllm_core.OWN_MODEL, "parent": None}]}

    @app.get("/server_info")
    async def info(config_format: str = "text") -> dict[str, Any]:
        model = {"model": "m", "enable_sleep_mode": not at.bugs.no_sleep_mode}
        return {"vllm_config": {"model_config": model} if config_format == "json" else str(model)}

    @app.post("/update_weight_version")
    async def name(request: Request) -> dict[str, Any]:
        _labelled(at)
        new = str((await _body(request))["new_version"])
        await _on(at, lambda: setattr(at.core, "version", new))
        return {"success": True, "new_version": new}


def _labelled(at: VllmStandIn) -> None:
    if at.bugs.no_labels:
        raise HTTPException(404, "Not Found")


def _gauges(core: Core) -> list[str]:
    state = "awake" if len(core.asleep) < 2 else "weights_offloaded" if core.level == 1 else "discard_all"
    states = ("awake", "weights_offloaded", "discard_all")
    return [
        *(f'vllm:engine_sleep_state{{engine="0",sleep_state="{one}"}} {float(one == state)}' for one in states),
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {float(core.shown[0])}',
        f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {float(core.shown[1])}',
    ]
