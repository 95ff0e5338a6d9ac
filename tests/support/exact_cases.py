"""Every way a token's keys, values and routes can come about, at any size: what was gathered must equal a recompute.

`tests/unit/engine/test_exactness.py` runs the cases small, `bench/bench_exactness.py` at 50,000 token-layers each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO

import numpy as np

from moebus.engine.paddle import Handover, ModelConfig, PaddleEngine
from moebus.engine.port import Generation, Prompt
from moebus.engine.prompts import choices
from tests.support.background import Background
from tests.support.exact import check_exact
from tests.support.generate import random_prompts, whole
from tests.support.wait import wait_until

CONFIG = ModelConfig(
    vocab_size=128, hidden_size=32, num_layers=7, first_dense_layers=1, num_heads=4, num_kv_heads=2, num_experts=8,
    top_k=2, intermediate_size=48, moe_intermediate_size=16, max_position=2048, block_size=8, num_blocks=512,
    max_batch=8,
)  # fmt: skip
TIMEOUT = 300.0


@dataclass
class Report:
    """What a case did. `compared`: token-layers. `seen`: times the mechanism it is about was at work."""

    compared: int = 0
    seen: int = 0


Case = Callable[[int], Report]
"""Takes the number of its round, which seeds it."""


@contextmanager
def engine_of(**changes: int) -> Iterator[PaddleEngine]:
    engine = PaddleEngine.create(replace(CONFIG, **changes), seed=21)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()


def run(engine: PaddleEngine, prompts: list[Prompt], report: Report) -> list[Generation]:
    """All of them in flight together, and compared."""
    results = engine.generate_many(prompts, TIMEOUT)
    report.compared += check_exact(engine, prompts, results)
    return results


def prompts_of(count: int, sizes: tuple[int, int], seed: int, max_tokens: int = 8) -> list[Prompt]:
    return random_prompts(count, sizes, CONFIG.vocab_size, seed, max_tokens=max_tokens, temperature=1.0)


def no_cache(turn: int) -> Report:
    report = Report()
    with engine_of() as engine:
        engine.reset_cache()
        results = run(engine, prompts_of(8, (60, 100), turn), report)
        assert sum(result.cached_tokens for result in results) == 0
        report.seen += len(results)
    return report


def prefix_hits(turn: int) -> Report:
    report = Report()
    with engine_of() as engine:
        heads = prompts_of(4, (40, 80), turn)
        for more in (0, 10):
            draw = np.random.default_rng(turn)
            tails = [np.append(p.token_ids, draw.integers(0, 128, more + 1)) for p in heads]
            longer = [replace(p, token_ids=tail) for p, tail in zip(heads, tails, strict=True)]
            report.seen += sum(result.cached_tokens for result in run(engine, longer, report))
    return report


def cpu_swap(turn: int) -> Report:
    report = Report()
    with engine_of(num_blocks=32, max_batch=2, cpu_blocks=256) as engine:
        prompts = prompts_of(6, (60, 90), turn)
        for pair in (prompts[:2], prompts[2:4], prompts[4:], prompts[:2], prompts[2:4]):
            run(engine, pair, report)
            wait_until(lambda: engine.inspect().participants[0].in_flight == 0, timeout=60, what="swaps at rest")
        report.seen = engine.cache.swapped_in
    return report


def preemption(turn: int) -> Report:
    report = Report()
    with engine_of(num_blocks=18, max_batch=6) as engine:
        run(engine, prompts_of(6, (20, 40), turn, max_tokens=40), report)
        report.seen = engine.preemptions
    return report


def chunked_prefill(turn: int) -> Report:
    report = Report()
    with engine_of(prefill_chunk=13) as engine:
        prompts = prompts_of(8, (30, 120), turn, max_tokens=12)
        run(engine, prompts, report)
        report.seen += sum(len(prompt.token_ids) // 13 for prompt in prompts)
    return report


def four_choices(turn: int) -> Report:
    report = Report()
    with engine_of(max_batch=16) as engine:
        engine.reset_cache()
        prompts = [one for prompt in prompts_of(3, (60, 90), turn, max_tokens=10) for one in choices(prompt, 4)]
        results = run(engine, prompts, report)
        report.seen += sum(result.cached_tokens > 50 for result in results)
        assert sum(result.cached_tokens == 0 for result in results) == 3
    return report


def many_turns(turn: int) -> Report:
    """Conversations of 50 turns (10 in round 0); a turn's prompt is all there was before and a few new tokens."""
    report, draw = Report(), np.random.default_rng(turn)
    with engine_of() as engine:
        prompts = prompts_of(2, (10, 20), turn)
        for _ in range(50 if turn else 10):
            results = run(engine, prompts, report)
            report.seen += sum(result.cached_tokens > 0 for result in results)
            prompts = [
                replace(prompt, token_ids=np.concatenate([whole(prompt, result), draw.integers(0, 128, 4)]))
                for prompt, result in zip(prompts, results, strict=True)
            ]
    return report


def split(turn: int) -> Report:
    """Prompts are prefilled in one engine and decoded in another, each handed over as bytes; some begin with what one
    of the engines or both have in their caches."""
    report = Report()
    with engine_of() as first, engine_of(block_size=16, num_blocks=256) as second:
        heads = prompts_of(6, (40, 80), turn)
        for round_of in range(3):
            asked = [replace(p, token_ids=p.token_ids[: len(p.token_ids) - 8 * (2 - round_of)]) for p in heads]
            if round_of == 1:
                second.reset_cache()
            handed = [handed_over(first.prefill(one, TIMEOUT)) for one in asked]
            calls = [_decoding(second, *both) for both in zip(handed, asked, strict=True)]
            results = [call.result(TIMEOUT) for call in calls]
            report.compared += check_exact(second, asked, results)
            report.seen += sum(len(one.token_ids) for one in handed)
    return report


def _decoding(engine: PaddleEngine, handover: Handover, prompt: Prompt) -> Background[Generation]:
    return Background(lambda: engine.decode(handover, prompt, TIMEOUT))


def handed_over(handover: Handover) -> Handover:
    """What arrives at the other end."""
    stream = BytesIO()
    handover.write_to(stream)
    stream.seek(0)
    return Handover.read_from(stream)


def all_at_once(turn: int) -> Report:
    """Chunks, preemption, both tiers of the cache and choices, in one engine under pressure."""
    report = Report()
    with engine_of(num_blocks=30, max_batch=6, cpu_blocks=128, prefill_chunk=24) as engine:
        bases = prompts_of(2, (40, 70), turn % 3, max_tokens=20)
        run(engine, [one for base in bases for one in choices(base, 3)], report)
        wait_until(lambda: engine.inspect().participants[0].in_flight == 0, timeout=60, what="swaps at rest")
        run(engine, prompts_of(3, (50, 80), 100 + turn, max_tokens=12), report)
        wait_until(lambda: engine.inspect().participants[0].in_flight == 0, timeout=60, what="swaps at rest")
        run(engine, [one for base in bases for one in choices(base, 2)], report)
        report.seen = min(engine.preemptions, engine.cache.swapped_in)
    return report


CASES: dict[str, Case] = {
    "no cache": no_cache,
    "prefix hits": prefix_hits,
    "CPU swap": cpu_swap,
    "preemption": preemption,
    "chunked prefill": chunked_prefill,
    "prefill / decode": split,
    "n = 4": four_choices,
    "many turns": many_turns,
    "all at once": all_at_once,
}
