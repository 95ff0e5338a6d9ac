"""A stand-in of SGLang's HTTP server, written from its public documentation and sources (docs/engines/sglang.md names
the versions). It has no model: requests are names in queues, weights are a string."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

GB = {"weights": 15.0, "kv_cache": 40.0, "cuda_graph": 2.0}
TAGS = ("weights", "kv_cache", "cuda_graph")


@dataclass
class Faults:
    """What is wrong with this server, besides the network's faults (`Running.faults`)."""

    pause_reaches_one: bool = False
    """Before sglang#24462: of several tokenizer processes only the one that is asked pauses."""
    retracted_block_flush: bool = True
    """sglang#33783: what waits counts as work, also while paused."""
    refused_flushes: int = 0
    """So many calls of /flush_cache are refused; -1: all of them."""
    lazy_release: float = 0.0
    """slime#579: /release_memory_occupation answers before the memory is gone; seconds until it is."""
    load: str = ""
    """`missing`: the new weights cannot be read; `middle`: reading breaks off after the first tensor."""
    abort_ignored: bool = False
    forgets_version: bool = False
    """miles#2244: after an update it goes on naming an old version."""


@dataclass
class StandIn:
    """The server's state, for tests to look at and to change."""

    memory_saver: bool = True
    cpu_backup: bool = False
    routed_experts: bool = True
    tokenizers: int = 1
    hides_tokenizers: bool = False
    dp_size: int = 1
    version: str = "0.5.19"
    start: int = 1
    faults: Faults = field(default_factory=Faults)
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)
    paused: list[bool] = field(default_factory=list)
    engine_paused: bool = False
    asleep: set[str] = field(default_factory=set)
    releasing: set[str] = field(default_factory=set)
    weights: str = "initial"
    weight_version: str = "default"
    session: bool = False
    no_sessions: bool = False
    groups: set[str] = field(default_factory=set)
    cached: int = 7
    dead: bool = False
    calls: list[tuple[str, Any]] = field(default_factory=list)
    traffic: bool = False
    turn: int = 0

    def __post_init__(self) -> None:
        self.paused = [False] * self.tokenizers

    def restart(self) -> None:
        """A new process at the same address: first weights, open, nothing asleep, the first version again."""
        self.running, self.waiting, self.held = [], [], []
        self.paused = [False] * self.tokenizers
        self.engine_paused, self.asleep, self.session, self.dead = False, set(), False, False
        self.weights, self.weight_version, self.cached = "initial", "default", 7
        self.start += 1

    def arrive(self, name: str) -> None:
        """A request, through the next of the tokenizer processes."""
        self.turn = (self.turn + 1) % self.tokenizers
        if self.paused[self.turn]:
            self.held.append(name)
        elif self.engine_paused:
            self.waiting.append(name)
        else:
            self.running.append(name)

    def serves(self) -> bool:
        return not self.engine_paused and not all(self.paused) and not self.asleep

    def abort(self, prefix: str) -> None:
        if self.faults.abort_ignored:
            return
        for queue in (self.running, self.waiting):
            for name in [name for name in queue if name.startswith(prefix)]:
                queue.remove(name)
                self.ended[name] = "abort"

    def idle(self) -> bool:
        return not self.running and not self.waiting

    def die(self, why: str) -> None:
        """As a failed assertion in the scheduler: the whole server ends."""
        self.dead = True
        raise _Dead(why)


class _Dead(Exception):
    pass


def application(at: StandIn) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def dead_is_dead(request: Request, call_next: Any) -> Response:
        if at.dead:
            return Response(status_code=503)
        answer: Response = await call_next(request)
        return answer

    @app.exception_handler(_Dead)
    async def died(request: Request, why: Exception) -> Response:
        return JSONResponse({"detail": str(why)}, status_code=500)

    _told(app, at)
    _traffic(app, at)
    _memory(app, at)
    _weights(app, at)
    return app


def _told(app: FastAPI, at: StandIn) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        return {"model_path": "/models/m", "is_generation": True, "weight_version": at.weight_version}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        while at.releasing:  # one loop serves all: it answers once the release before it is through
            await asyncio.sleep(0.005)
        usage = {"weight": GB["weights"], "kvcache": GB["kv_cache"], "graph": GB["cuda_graph"], "token_capacity": 9}
        shown = {} if at.hides_tokenizers else {"tokenizer_worker_num": at.tokenizers}
        state = {"memory_usage": usage, "startup_time": float(at.start), "last_gen_throughput": 0.0}
        return {
            "model_path": "/models/m", "version": at.version, "random_seed": 4711 + at.start, "dp_size": at.dp_size,
            "tp_size": 1, "enable_memory_saver": at.memory_saver, "enable_weights_cpu_backup": at.cpu_backup,
            "enable_return_routed_experts": at.routed_experts, **shown,
            "weight_version": at.weight_version,
            "internal_states": [dict(state) for _ in range(at.dp_size)],
        }  # fmt: skip

    @app.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        if at.traffic and at.serves():
            at.arrive(f"more-{len(at.running)}")
        at.turn = 0 if not at.traffic else at.turn
        ranks: list[dict[str, int]] = [
            {"dp_rank": rank, "num_running_reqs": 0, "num_waiting_reqs": 0} for rank in range(at.dp_size)
        ]
        ranks[0] |= {"num_running_reqs": len(at.running), "num_waiting_reqs": len(at.waiting)}
        return {"dp_rank_count": at.dp_size, "loads": ranks}


def _traffic(app: FastAPI, at: StandIn) -> None:  # noqa: C901 - one function a route
    @app.post("/pause_generation")
    async def pause(body: dict[str, Any]) -> dict[str, str]:
        at.calls.append(("/pause_generation", body))
        mode = body.get("mode", "abort")
        reached = [0] if at.faults.pause_reaches_one else range(at.tokenizers)
        for number in reached:
            at.paused[number] = True
        if mode == "abort":
            at.abort("")
        else:
            at.engine_paused = True
            if mode == "retract":
                at.waiting, at.running = [*at.running, *at.waiting], []
        return {"message": "Generation paused successfully.", "status": "ok"}

    @app.post("/continue_generation")
    async def resume(body: dict[str, Any]) -> dict[str, str]:
        at.calls.append(("/continue_generation", body))
        at.engine_paused = False
        at.paused = [False] * at.tokenizers
        at.running += at.waiting + at.held
        at.waiting, at.held = [], []
        return {"message": "Generation continued successfully.", "status": "ok"}

    @app.post("/abort_request")
    async def abort(body: dict[str, Any]) -> Response:
        at.calls.append(("/abort_request", body))
        if body.get("abort_all"):
            at.abort("")
        elif body.get("rid"):
            at.abort(body["rid"])
        return Response(status_code=200)

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush() -> Response:
        blocked = bool(at.running) or (bool(at.waiting) and (at.faults.retracted_block_flush or not at.engine_paused))
        at.calls.append(("/flush_cache", None))
        if at.faults.refused_flushes:
            at.faults.refused_flushes -= 1 if at.faults.refused_flushes > 0 else 0
            blocked = True
        if blocked:
            return PlainTextResponse("Flush cache failed.", status_code=400)
        at.cached = 0
        return PlainTextResponse("Cache flushed.")


def _memory(app: FastAPI, at: StandIn) -> None:
    @app.api_route("/release_memory_occupation", methods=["GET", "POST"])
    async def release(body: dict[str, Any]) -> None:
        at.calls.append(("/release_memory_occupation", body))
        if not at.idle():
            at.die("release_memory_occupation should be called only when server is idle.")
        tags = set(body.get("tags") or TAGS)
        if at.asleep & tags:
            at.die("paused twice")
        if at.faults.lazy_release:
            at.releasing |= tags
            asyncio.get_running_loop().call_later(at.faults.lazy_release, lambda: _let_go(at, tags))
        else:
            _let_go(at, tags)

    @app.api_route("/resume_memory_occupation", methods=["GET", "POST"])
    async def resume(body: dict[str, Any]) -> None:
        at.calls.append(("/resume_memory_occupation", body))
        tags = set(body.get("tags") or TAGS)
        if not tags <= at.asleep:
            at.die(f"KeyError: {sorted(tags - at.asleep)}")
        at.asleep -= tags
        if "weights" in tags and not at.cpu_backup:
            at.weights = "garbage"


def _let_go(at: StandIn, tags: set[str]) -> None:
    at.releasing -= tags
    at.asleep |= tags
    if "kv_cache" in tags:
        at.cached = 0


def _weights(app: FastAPI, at: StandIn) -> None:  # noqa: C901 - one function a route
    @app.post("/update_weights_from_disk")
    async def disk(body: dict[str, Any]) -> Response:
        at.calls.append(("/update_weights_from_disk", body))
        if at.faults.load == "missing":
            text = f"Failed to get weights iterator: {body['model_path']} does not exist."
            return JSONResponse({"success": False, "message": text, "num_paused_requests": 0}, status_code=400)
        if at.faults.load == "middle":
            at.weights = "mixed"
            text = "Failed to update weights: unexpected end of file.\nRolling back to original weights."
            return JSONResponse({"success": False, "message": text, "num_paused_requests": 0}, status_code=400)
        if body.get("flush_cache", True) and not at.idle():
            at.die("Cache flush failed after updating weights")
        at.weights = body["model_path"]
        return _loaded(at, body)

    @app.post("/init_weights_update_group")
    async def init(body: dict[str, Any]) -> dict[str, Any]:
        at.calls.append(("/init_weights_update_group", body))
        at.groups.add(body.get("group_name", "weight_update_group"))
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    @app.post("/destroy_weights_update_group")
    async def destroy(body: dict[str, Any]) -> dict[str, Any]:
        at.calls.append(("/destroy_weights_update_group", body))
        at.groups.discard(body.get("group_name", "weight_update_group"))
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    @app.post("/begin_weight_update")
    async def begin(body: dict[str, Any]) -> Any:
        if at.no_sessions:  # before sglang#28001
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        at.calls.append(("/begin_weight_update", body))
        if at.session:
            at.die("begin_weight_update called while a weight-update session is already open")
        at.session = True
        return {"success": True, "message": "Success"}

    @app.post("/end_weight_update")
    async def end(body: dict[str, Any]) -> Any:
        if at.no_sessions:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        at.calls.append(("/end_weight_update", body))
        if not at.session:
            at.die("end_weight_update called without begin_weight_update")
        at.session = False
        return {"success": True, "message": "Success"}

    @app.post("/update_weights_from_distributed")
    async def distributed(body: dict[str, Any]) -> Response:
        return _received(at, "/update_weights_from_distributed", body)

    @app.post("/update_weights_from_tensor")
    async def tensor(body: dict[str, Any]) -> Response:
        return _received(at, "/update_weights_from_tensor", body)

    @app.post("/update_weights_from_ipc")
    async def ipc(body: dict[str, Any]) -> Response:
        return _received(at, "/update_weights_from_ipc", body)

    @app.post("/update_weight_version")
    async def version(body: dict[str, Any]) -> dict[str, Any]:
        at.calls.append(("/update_weight_version", body))
        if body.get("abort_all_requests", True):
            at.abort("")
        if not at.faults.forgets_version:
            at.weight_version = body["new_version"]
        return {"success": True, "message": "Weight version updated", "new_version": body["new_version"]}


def _received(at: StandIn, path: str, body: dict[str, Any]) -> Response:
    at.calls.append((path, body))
    if not at.session and not at.no_sessions:
        at.die(f"{path} requires an open begin_weight_update session")
    if at.faults.load == "middle":
        at.weights = "mixed"
        text = "Failed to update parameter online. The full weights of the ModelRunner are partially updated."
        return JSONResponse({"success": False, "message": text}, status_code=400)
    if body.get("flush_cache", True) and not at.idle():
        at.die("Cache flush failed after updating weights")
    at.weights = "received"
    return _loaded(at, body)


def _loaded(at: StandIn, body: dict[str, Any]) -> Response:
    if body.get("weight_version") is not None and not at.faults.forgets_version:
        at.weight_version = body["weight_version"]
    return JSONResponse({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})
