"""Checks of a Prompt, and the one rule for how many route rows a request has."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from moebus.engine.port import EngineFailed, Prompt
from moebus.schemas.errors import InvalidInput


def route_rows(prompt_tokens: int, sampled: int, *, prefilled: bool = True) -> int:
    """Rows of routes of a request: the last sampled token was never forwarded.

    `prompt_tokens + sampled - 1`; without a sampled token all of the prompt if it was prefilled, else 0.
    """
    if sampled:
        return prompt_tokens + sampled - 1
    return prompt_tokens if prefilled else 0


def choices(prompt: Prompt, count: int) -> list[Prompt]:
    """`count` samples of one prompt: request ids `id#0`, `id#1`, ..., each with a seed of its own.

    Raises:
        InvalidInput: `count` is below 1.
    """
    if count < 1:
        raise InvalidInput("n", f"{count} choices; at least one is needed")
    return [
        replace(prompt, request_id=f"{prompt.request_id}#{choice}", seed=prompt.seed + choice)
        for choice in range(count)
    ]


def tell_token(prompt: Prompt, token: int, logprob: float) -> None:
    """Calls `prompt.on_token`. Raises EngineFailed, with what it raised."""
    if prompt.on_token is None:
        return
    try:
        prompt.on_token(token, logprob)
    except Exception as error:
        raise EngineFailed(f"on_token of {prompt.request_id!r} raised {type(error).__name__}: {error}") from error


def check_prompt(prompt: Prompt, vocab_size: int, max_position: int) -> None:
    """Raises InvalidInput, naming the field, unless the engine can run this prompt."""
    if not prompt.request_id or not isinstance(prompt.request_id, str):
        raise InvalidInput("request_id", "a non-empty string is needed")
    _check_tokens(prompt.token_ids, vocab_size)
    if prompt.max_tokens < 0:
        raise InvalidInput("max_tokens", f"{prompt.max_tokens} is negative")
    longest = len(prompt.token_ids) + prompt.max_tokens
    if longest > max_position:
        raise InvalidInput("max_tokens", f"prompt and output together ({longest}) exceed {max_position} positions")
    if not (math.isfinite(prompt.temperature) and prompt.temperature >= 0):
        raise InvalidInput("temperature", f"{prompt.temperature} is not a finite number of at least 0")
    if not 0 < prompt.top_p <= 1:
        raise InvalidInput("top_p", f"{prompt.top_p} is not in (0, 1]")
    if prompt.seed < 0:
        raise InvalidInput("seed", f"{prompt.seed} is negative")


def _check_tokens(tokens: object, vocab_size: int) -> None:
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype != np.int64:
        raise InvalidInput("token_ids", "an int64 array of one dimension is needed")
    if tokens.size == 0:
        raise InvalidInput("token_ids", "empty; at least one token is needed")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise InvalidInput("token_ids", f"a token is outside 0..{vocab_size - 1}")
