"""Answers of other engines' servers, made from routes: in the forms of their public protocols."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt

from moebus.schemas.layouts import to_all_layers
from moebus.schemas.model_card import ModelCard
from tests.support.routes import make_routes

DEPTH = 7
CARD = ModelCard(num_experts=16, top_k=2, moe_layers=(1, 2, 5), num_hidden_layers=DEPTH)
PROMPT = [11, 12, 13, 14, 15]
OUTPUT = [21, 22, 23]
ROWS = len(PROMPT) + len(OUTPUT) - 1
Array = npt.NDArray[np.integer[Any]]


def routes_of(rows: int = ROWS, card: ModelCard = CARD, seed: int = 3) -> Array:
    """Routes of a rollout [rows, moe_layers, top_k]."""
    return make_routes(rows, card, seed)


def wide(routes: Array, card: ModelCard = CARD) -> Array:
    """All layers, zeros where none routes [rows, depth, top_k]."""
    return to_all_layers(routes, card.moe_layers, card.num_hidden_layers or DEPTH)


def bare(array: Array, dtype: str = "int32") -> str:
    """base64 of integers without a header."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()).decode()


def npy(array: npt.NDArray[Any], dtype: str | None = "uint8") -> str:
    """base64 of a `.npy` file."""
    file = io.BytesIO()
    np.save(file, array if dtype is None else array.astype(dtype), allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


def described(array: Array, dtype: str = "uint8", start: int | None = 0) -> dict[str, Any]:
    """An object with data, shape, dtype and start."""
    return {"data": bare(array, dtype), "shape": list(array.shape), "dtype": dtype, "start": start}


def vllm(value: object, *, output: list[int] | None = None, finish: str | None = "stop", **more: Any) -> dict[str, Any]:
    """An answer of `/v1/completions` with `return_token_ids`. `more`: further fields of the answer."""
    tokens = OUTPUT if output is None else output
    choice = {
        "index": 0, "text": "", "finish_reason": finish, "token_ids": tokens, "prompt_token_ids": PROMPT,
        "routed_experts": value,
    }  # fmt: skip
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(tokens), "total_tokens": len(PROMPT) + len(tokens)}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage, **more}


def sglang(
    value: object, *, output: list[int] | None = None, finish: str | None = "stop", **meta: Any
) -> dict[str, Any]:
    """An answer of `/generate`. `meta`: further fields of `meta_info`."""
    tokens = OUTPUT if output is None else output
    info: dict[str, Any] = {
        "id": "r1", "finish_reason": None if finish is None else {"type": finish}, "prompt_tokens": len(PROMPT),
        "completion_tokens": len(tokens), "cached_tokens": 0, "weight_version": "default", **meta,
    }  # fmt: skip
    if value is not None:
        info["routed_experts"] = value
    return {"text": "", "output_ids": tokens, "meta_info": info}


def fastdeploy(value: object, *, output: list[int] | None = None, finish: str | None = "stop") -> dict[str, Any]:
    """An answer of `/v1/chat/completions` with `return_token_ids`."""
    tokens = OUTPUT if output is None else output
    message = {"role": "assistant", "content": "", "prompt_token_ids": PROMPT, "completion_token_ids": tokens}
    answer: dict[str, Any] = {
        "id": "chatcmpl-data-7:2:1:0-d9f16c5c-65f6-4815-b44d-14e2c581907c", "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": len(PROMPT), "completion_tokens": len(tokens)},
    }  # fmt: skip
    return answer if value is None else {**answer, "routed_experts": value}
