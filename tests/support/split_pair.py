"""A prefill engine, a decode engine, and one that does both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moebus.engine.paddle import Handover, ModelConfig, PaddleEngine
from moebus.engine.port import Generation, Prompt
from tests.support.exact_cases import handed_over
from tests.support.gate import Gate
from tests.support.generate import random_prompts
from tests.support.paddle import SMALL

PROMPT = replace(random_prompts(1, (43, 44), SMALL.vocab_size, 3, max_tokens=12, temperature=1.0)[0], seed=9)


@dataclass
class Pair:
    """A prefill engine, a decode engine with a gate, and one engine that does both."""

    first: PaddleEngine
    second: PaddleEngine
    gate: Gate
    one: PaddleEngine

    def hand(self, prompt: Prompt = PROMPT) -> Handover:
        return handed_over(self.first.prefill(prompt, 30))

    def run(self, prompt: Prompt = PROMPT) -> Generation:
        return self.second.decode(self.hand(prompt), prompt, 30)

    def free(self) -> bool:
        return all(e.cache.pool.available == e.cache.pool.total for e in (self.first, self.second))


@contextlib.contextmanager
def pair_of(root: Path, second: ModelConfig) -> Iterator[Pair]:
    gate = Gate()
    roots = (str(root),)
    engines = [PaddleEngine.create(SMALL, seed=1, allowed_roots=roots) for _ in range(2)]
    made = Pair(engines[0], PaddleEngine.create(second, seed=1, hook=gate, allowed_roots=roots), gate, engines[1])
    try:
        yield made
    finally:
        gate.open()
        for engine in (*engines, made.second):
            engine.close()


def equal(result: Generation, expected: Generation) -> None:
    assert result.token_ids.tolist() == expected.token_ids.tolist()
    assert np.array_equal(result.routes, expected.routes)  # type: ignore[arg-type]
    assert np.abs(result.logprobs - expected.logprobs).max(initial=0) < 2e-5
    for name in ("request_id", "prompt_tokens", "finish_reason", "versions", "cached_tokens"):
        assert getattr(result, name) == getattr(expected, name), name
