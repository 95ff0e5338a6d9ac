"""A stand-in of vLLM's `/v1/completions` with `--enable-return-routed-experts`, written from its public protocol:
tokens in, tokens and routes out. They are those of the simulated engine, so that a test knows them."""

from __future__ import annotations

from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from moebus.engine.simulated.config import SimulatedConfig
from moebus.engine.simulated.oracle import chain, chain_next, chain_root, expected_routes, next_token
from moebus.observability.health import Health
from moebus.observability.http import HttpServer
from moebus.observability.metrics import Metrics
from moebus.schemas.layouts import to_all_layers
from tests.support.answers import npy

VERSION = "initial"
CONFIG = SimulatedConfig(num_experts=16, top_k=4, moe_layers=(1, 2, 3))
HF_CONFIG = {"num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 4, "mlp_only_layers": [0]}
"""What the model's `config.json` says of it: layer 0 is dense."""


class Completions:
    """`url`; `starts`: what the requests named as `routed_experts_prompt_start`, in order."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        route = Route("/v1/completions", self._page, methods=["POST"])
        self._http = HttpServer(metrics=Metrics(), health=Health(), routes=[route]).start()
        self.url = self._http.url

    def close(self) -> None:
        self._http.stop()

    async def _page(self, request: Request) -> JSONResponse:
        body = await request.json()
        prompt, start = body["prompt"], body.get("routed_experts_prompt_start", 0)
        if not 0 <= start < len(prompt):
            return JSONResponse({"error": {"message": "routed_experts_prompt_start", "code": 400}}, 400)
        self.starts.append(start)
        return JSONResponse(answer(prompt, body.get("max_tokens", 16), start))


def answer(prompt: list[int], max_tokens: int, start: int) -> dict[str, Any]:
    """Greedy, until the length is reached; routes of all layers [rows, 4, top_k] from `start` on."""
    state = chain(chain_root(CONFIG.seed, VERSION), prompt)[-1]
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        tokens.append(next_token(CONFIG, state, 0.0, 0)[0])
        state = chain_next(state, tokens[-1])
    routes = expected_routes(CONFIG, VERSION, np.array(prompt + tokens))[:-1]
    wide = to_all_layers(routes, CONFIG.moe_layers, 4)[start:]
    choice = {
        "index": 0, "text": "", "finish_reason": "length", "token_ids": tokens, "prompt_token_ids": prompt,
        "routed_experts": npy(wide),
    }  # fmt: skip
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "total_tokens": len(prompt) + len(tokens)}
    return {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice], "usage": usage}
