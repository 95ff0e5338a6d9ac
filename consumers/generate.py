"""`POST /v1/generate` of a worker whose engine runs in its process: prompt in, tokens and a RouteRef out."""

from __future__ import annotations

import itertools
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Annotated, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moebus.engine.port import EngineClosed, EngineTimeout, GeneratingEngine, Generation, Prompt
from moebus.observability.log import get_logger
from moebus.observability.metrics import Metrics
from moebus.producers.routing import RoutingPublisher, RoutingReceipt
from moebus.schemas.errors import InvalidInput, MoebusError
from moebus.schemas.rollout import check_group, check_rollout_id

_log = get_logger(__name__)
_numbers = itertools.count()
_MAX_BODY = 16 << 20  # 1,000,000 token ids of 16 characters: anything larger is a mistake
_TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class GenerateBody(BaseModel):
    """Body of the request. `timeout` in seconds covers the generation; `wait_routes` waits for the receipt too."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token_ids: list[_TokenId] = Field(min_length=1)
    rollout_id: str | None = None
    choice: int = Field(0, ge=0, le=65535)
    group: str | None = None
    max_tokens: int = Field(16, ge=0)
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(0, ge=0, le=2**63 - 1)
    stop_token_ids: list[_TokenId] = []
    timeout: float = Field(120.0, gt=0, le=3600)
    wait_routes: bool = False


class _Failed(Exception):
    def __init__(self, status: int, error: str, detail: str) -> None:
        super().__init__(detail)
        self.response = JSONResponse({"error": error, "detail": detail}, status_code=status)


class GetPublisher(Protocol):
    """The publisher may come later than the server (it waits for the broker)."""

    def __call__(self) -> RoutingPublisher | None: ...


def generate_route(engine: GeneratingEngine, publisher: GetPublisher, metrics: Metrics) -> Route:
    """The route to mount.

    Answers 200 with tokens, log probabilities, finish reason, weight versions and `route_ref` (None without a
    rollout id); 400 naming the field, 503 while admission is closed, 504 after `timeout`.
    """

    def handle(raw: bytes) -> Response:
        try:
            body = _read(raw)
            return JSONResponse(_generate(engine, publisher, metrics, body))
        except _Failed as exc:
            return exc.response
        except InvalidInput as exc:
            return _Failed(400, "InvalidInput", str(exc)).response
        except EngineClosed as exc:
            return _Failed(503, "EngineClosed", str(exc)).response
        except (EngineTimeout, FutureTimeout) as exc:
            return _Failed(504, "Timeout", str(exc)).response
        except (MoebusError, ValueError) as exc:
            return _Failed(500, type(exc).__name__, str(exc)).response

    async def page(request: Request) -> Response:
        raw = bytearray()
        async for piece in request.stream():
            raw += piece
            if len(raw) > _MAX_BODY:
                return _Failed(413, "InvalidInput", f"body: larger than {_MAX_BODY} bytes").response
        return await run_in_threadpool(handle, bytes(raw))

    return Route("/v1/generate", page, methods=["POST"])


def _read(raw: bytes) -> GenerateBody:
    try:
        return GenerateBody.model_validate_json(raw)
    except ValidationError as exc:
        first = exc.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise InvalidInput(field, first["msg"]) from exc


def _generate(
    engine: GeneratingEngine, publisher: GetPublisher, metrics: Metrics, body: GenerateBody
) -> dict[str, object]:
    sink = _publisher_for(publisher, body)
    prompt = _prompt(body)
    done = engine.generate(prompt, body.timeout)
    _count(metrics, done)
    receipt = None if sink is None else _publish(sink, body, prompt, done)
    if receipt is not None and body.wait_routes:
        receipt.result(body.timeout)
    return {
        "request_id": done.request_id,
        "token_ids": done.token_ids.tolist(),
        "logprobs": [float(x) for x in done.logprobs],
        "finish_reason": done.finish_reason,
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "versions": [list(v) for v in done.versions],
        "route_ref": None if receipt is None else receipt.ref.to_dict(),
    }


def _publisher_for(publisher: GetPublisher, body: GenerateBody) -> RoutingPublisher | None:
    sink = publisher()
    if body.rollout_id is None:
        return None
    check_rollout_id(body.rollout_id)  # before any token is computed
    if body.group is not None:
        check_group(body.group)
    if sink is None:
        raise _Failed(503, "NotReady", "routes cannot be published yet: the worker waits for its broker")
    return sink


def _prompt(body: GenerateBody) -> Prompt:
    request_id = f"{body.rollout_id}#{body.choice}" if body.rollout_id else f"anonymous-{next(_numbers)}"
    return Prompt(
        request_id=request_id,
        token_ids=np.asarray(body.token_ids, dtype=np.int64),
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids),
        capture_routes=body.rollout_id is not None,
    )


def _publish(sink: RoutingPublisher, body: GenerateBody, prompt: Prompt, done: Generation) -> RoutingReceipt | None:
    if body.rollout_id is None or done.routes is None:
        return None
    rows = done.routes.shape[0]
    tokens = np.concatenate([prompt.token_ids, done.token_ids])[:rows]
    return sink.submit(
        done.routes,
        body.rollout_id,
        choice=body.choice,
        group=body.group,
        token_ids=tokens,
        prompt_rows=min(rows, done.prompt_tokens),
        versions=done.versions,
        status="aborted" if done.finish_reason == "abort" else "complete",
        finish_reason=done.finish_reason,
    )


def _count(metrics: Metrics, done: Generation) -> None:
    metrics.inc("moebus_engine_requests_total", finish_reason=done.finish_reason)
    metrics.inc("moebus_engine_tokens_total", done.prompt_tokens - done.cached_tokens, kind="prompt")
    metrics.inc("moebus_engine_tokens_total", done.cached_tokens, kind="cached")
    metrics.inc("moebus_engine_tokens_total", len(done.token_ids), kind="output")
