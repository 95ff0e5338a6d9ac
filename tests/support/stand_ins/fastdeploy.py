"""A stand-in of FastDeploy's API server, written from its public documentation (docs/engines/fastdeploy.md names the
versions). It has no model: requests are names, weights are a string, each rank has a version."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

TAGS = ("weight", "kv_cache")


@dataclass
class Faults:
    """What is wrong with this server, besides the network's faults. `fails`: methods that answer 500 with a text."""

    fails: dict[str, str] = field(default_factory=dict)
    half_paused: bool = False
    """A pause fails after its flag is set: the next one answers 200 without a drain."""
    lagging_rank: bool = False
    """The last rank keeps the old version and says so."""
    no_evidence: bool = False
    """sleep and wakeup answer 200 and no rank has answered."""
    slow_wake: bool = False
    """wakeup waits for `StandIn.go`."""


@dataclass
class StandIn:
    """The server's state, for tests to look at and to change. `served`: requests that came to their own end."""

    ranks: int = 2
    strategy: str = "rsync"
    dynamic: bool = True
    v1: bool = True
    routing: bool = True
    cudagraph: bool = True
    port: int = 8180
    faults: Faults = field(default_factory=Faults)
    paused: bool = False
    asleep: set[str] = field(default_factory=set)
    running: list[str] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    weights: str = "initial"
    calls: list[tuple[str, Any]] = field(default_factory=list)
    start: int = 1
    overtaken: bool = False
    go: Event = field(default_factory=Event)
    intake: asyncio.Lock = field(default_factory=asyncio.Lock)

    def restart(self) -> None:
        self.paused, self.asleep, self.running, self.weights = False, set(), [], "initial"
        self.start += 1

    def abort_all(self) -> None:
        for name in self.running:
            self.ended[name] = "abort"
        self.running = []


class _Failed(Exception):
    pass


def application(at: StandIn) -> FastAPI:
    app = FastAPI()
    _told(app, at)
    _control(app, at)
    return app


def _told(app: FastAPI, at: StandIn) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    @app.get("/config-info")
    async def config_info() -> dict[str, Any]:
        return {
            "load_config": {"dynamic_load_weight": at.dynamic, "load_strategy": at.strategy},
            "routing_replay_config": {"enable_routing_replay": at.routing},
            "parallel_config": {"tensor_parallel_size": at.ranks},
            "scheduler_config": {"name": "local", "splitwise_role": "mixed"},
            "env_config": {"FD_ENABLE_V1_UPDATE_WEIGHTS": int(at.v1), "ENABLE_V1_KVCACHE_SCHEDULER": 1},
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "m", "object": "model", "created": 1_700_000_000 + at.start}]}

    @app.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> Response:
        async with at.intake:  # what comes in during a control call waits behind it, in order
            if at.paused:
                return JSONResponse({"error": "Request is aborted since LLM Engine is paused."}, status_code=500)
            at.admitted.append(body["user"])
            at.running.append(body["user"])
        return JSONResponse({"id": body["user"], "choices": []})


def _control(app: FastAPI, at: StandIn) -> None:
    @app.post("/v1/pause")
    async def pause() -> Response:
        return await _run(at, "pause", {}, lambda: _pause(at))

    @app.post("/v1/resume")
    async def resume() -> Response:
        return await _run(at, "resume", {}, lambda: _resume(at))

    @app.get("/v1/is_paused")
    async def is_paused() -> Response:
        return await _run(at, "is_paused", None, lambda: {"is_paused": at.paused})

    @app.post("/v1/sleep")
    async def sleep(tags: str = "weight,kv_cache") -> Response:
        return await _run(at, "sleep", {"tags": tags}, lambda: _sleep(at, tags))

    @app.post("/v1/wakeup")
    async def wakeup(tags: str = "weight,kv_cache") -> Response:
        return await _run(at, "wakeup", {"tags": tags}, lambda: _wakeup(at, tags))

    @app.post("/v1/update_weights")
    async def update(request: Request) -> Response:
        body = await request.json()
        return await _run(at, "update_weights", body, lambda: _update(at, body))

    @app.post("/v1/abort_requests")
    async def abort(body: dict[str, Any]) -> Response:
        if not body.get("abort_all") and "req_ids" not in body:
            return JSONResponse({"error": "must provide abort_all=true or req_ids"}, status_code=400)
        return await _run(at, "abort_requests", body, lambda: _abort(at, body))


async def _run(at: StandIn, method: str, given: Any, do: Any) -> Response:
    """One control method: they are carried out one by one, in the order in which they came in."""
    request_id = f"control-{uuid.uuid4()}"
    while method == "wakeup" and at.overtaken:  # until the pause that was sent behind it has come and gone
        at.overtaken = ("pause", {}) not in at.calls[-1:]
        await asyncio.sleep(0.002)
    async with at.intake:
        if given is not None:
            at.calls.append((method, given))
        if method == "wakeup" and at.faults.slow_wake:
            while not at.go.is_set():
                await asyncio.sleep(0.002)
        try:
            if method in at.faults.fails:
                raise _Failed(at.faults.fails[method])
            result = do()
        except _Failed as why:
            text = f"Failed to run control method {method}: {request_id} {why}"
            return JSONResponse({"request_id": request_id, "status": "error", "error_message": text}, status_code=500)
    return JSONResponse({"request_id": request_id, "status": "success", "error_message": None, "result": result})


def _pause(at: StandIn) -> None:
    if at.paused:
        return
    at.paused = True
    if at.faults.half_paused:
        raise _Failed("Engine worker queue timed out after 60 seconds, worker may hanged!")
    at.abort_all()


def _resume(at: StandIn) -> None:
    at.paused = False


def _checked(tags: str) -> set[str]:
    asked = tags.split(",")
    for tag in asked:
        if tag not in TAGS:
            raise _Failed(f"Unsupported tag [{tag}] in [{asked}], expected one of {list(TAGS)}")
    return set(asked)


def _sleep(at: StandIn, tags: str) -> list[None] | None:
    asked = _checked(tags)
    _pause(at)
    if not asked & at.asleep:  # K20: a tag that sleeps already ends the whole call
        at.asleep |= asked
        if "weight" in asked:
            at.weights = "gone"
    return None if at.faults.no_evidence else [None] * at.ranks


def _wakeup(at: StandIn, tags: str) -> list[None] | None:
    asked = _checked(tags)
    if asked == {"weight"} and at.cudagraph and "kv_cache" in at.asleep:
        raise _Failed("kv_cache must be woken before weight when CUDA graph is on")
    if "weight" in asked & at.asleep:
        if at.strategy == "rsync":
            raise _Failed("Unsupported strategy: rsync")
        at.weights = "own source"
    at.asleep -= asked
    _resume(at)
    return None if at.faults.no_evidence else [None] * at.ranks


def _update(at: StandIn, body: dict[str, Any]) -> list[dict[str, Any]]:
    if not at.paused:
        raise _Failed("Pause LLM Engine first before calling updating weights")
    if at.strategy != "rsync":
        raise _Failed(f"Unsupported strategy: {at.strategy}")
    if body.get("version") == "gone":
        raise _Failed("step gone was never published")
    if body.get("version") == "torn":
        at.weights = "mixed"
        raise _Failed("Error response from ctrl_w2e_rank1_6000: shape mismatch")
    at.weights = str(body.get("version"))
    told = [{"rank": rank, "version": at.weights, "total_cost": 0.1} for rank in range(at.ranks)]
    if at.faults.lagging_rank:
        told[-1]["version"] = "step-0"
    return told


def _abort(at: StandIn, body: dict[str, Any]) -> dict[str, Any]:
    asked = list(at.running) if body.get("abort_all") else body["req_ids"]
    aborted = [name for name in asked if name in at.running]
    for name in aborted:
        at.running.remove(name)
        at.ended[name] = "abort"
    missing = [name for name in asked if name not in aborted]
    return {"aborted": [{"request_id": name, "output_token_count": 3} for name in aborted], "not_found": missing}
