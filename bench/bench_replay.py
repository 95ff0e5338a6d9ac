"""How far a trainer's log probabilities are from the rollout's, with the rollout's experts replayed and without (the
peer, in the same run): the same weights, a router rounded to bfloat16, and routers that are off by noise.

Usage: `python bench/bench_replay.py [rollouts]`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle import TINY, PaddleEngine, load_paddle, replay_logprobs
from moebus.engine.port import Generation, Prompt

TRAINERS: dict[str, dict[str, float]] = {
    "same weights": {},
    "router in bf16": {"router_bf16": True},
    "router + N(0, 0.01)": {"router_noise": 0.01},
    "router + N(0, 0.05)": {"router_noise": 0.05},
}


@dataclass
class Distance:
    """|delta log p| over all output tokens: mean and largest; seconds of a forward."""

    mean: float
    largest: float
    seconds: float


def rollouts(count: int) -> tuple[Mapping[str, npt.NDArray[np.float32]], list[tuple[Prompt, Generation]]]:
    draw = np.random.default_rng(1)
    prompts = [
        Prompt(f"r{index}", draw.integers(0, TINY.vocab_size, 20 + index % 20), 64, temperature=1.0, seed=index)
        for index in range(count)
    ]
    engine = PaddleEngine.create(TINY, seed=21)
    try:
        return engine.weights(), list(zip(prompts, engine.generate_many(prompts, 600), strict=True))
    finally:
        engine.close()


def distance(
    weights: Mapping[str, object], made: list[tuple[Prompt, Generation]], trainer: dict[str, float], *, replay: bool
) -> Distance:
    parts = []
    begun = time.perf_counter()
    for prompt, result in made:
        tokens = np.concatenate([prompt.token_ids, result.token_ids])
        routes = result.routes if replay else None
        logprobs = replay_logprobs(TINY, weights, tokens, routes, seed=3, **trainer)  # type: ignore[arg-type]
        parts.append(np.abs(logprobs[len(prompt.token_ids) - 1 :] - result.logprobs))
    seconds = (time.perf_counter() - begun) / len(made)
    every = np.concatenate(parts)
    return Distance(float(every.mean()), float(every.max()), seconds)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    load_paddle()
    weights, made = rollouts(count)
    tokens = sum(len(result.token_ids) for _, result in made)
    print(f"{count} rollouts, {tokens} output tokens; |delta log p| between rollout and trainer")
    heads = ("own: mean", "max", "replay: mean", "max", "ratio", "ms own", "ms replay")
    print(f"{'trainer':20}" + "".join(f"{head:>13}" for head in heads))
    for name, trainer in TRAINERS.items():
        own = distance(weights, made, trainer, replay=False)
        given = distance(weights, made, trainer, replay=True)
        cells = (f"{own.mean:.2e}", f"{own.largest:.2e}", f"{given.mean:.2e}", f"{given.largest:.2e}")
        times = (f"{own.mean / given.mean:.1f}", f"{own.seconds * 1e3:.1f}", f"{given.seconds * 1e3:.1f}")
        print(f"{name:20}" + "".join(f"{cell:>13}" for cell in (*cells, *times)))


if __name__ == "__main__":
    main()
