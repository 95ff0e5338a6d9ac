"""Sleep and wake, 20 times per tag and level: bytes by Paddle's own counter, times, and whether the engine is the same.

The peer is a plain copy of the same weights from one array to another, in the same run. An engine that is not the same
afterwards (counter, tokens, routes, digest) ends the run with an error. Usage: `python bench/bench_sleep.py [cycles]`
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np

from moebus.engine.paddle import TINY, PaddleEngine
from moebus.engine.paddle.weights import weights_digest
from moebus.engine.port import Generation, Level, Prompt
from moebus.engine.waiting import Never
from moebus.schemas.tags import ALL_TAGS, Tag

CONFIG = replace(
    TINY, vocab_size=4096, hidden_size=256, num_layers=4, num_heads=8, intermediate_size=512, moe_intermediate_size=256,
    num_blocks=1024,
)  # fmt: skip
CASES: list[tuple[tuple[Tag, ...], Level]] = [
    (tags, level) for tags in ((Tag.WEIGHT,), (Tag.KV_CACHE,), tuple(ALL_TAGS)) for level in ("offload", "discard")
]
PROMPT = Prompt("r", np.arange(100) * 7 % CONFIG.vocab_size, max_tokens=16)


def cycle(engine: PaddleEngine, tags: tuple[Tag, ...], level: Level) -> tuple[float, float, int]:
    """Seconds to sleep and to wake, and the bytes of the counter in between."""
    begun = time.perf_counter()
    for tag in tags:
        engine.sleep(tag, level, Never())
    asleep, held = time.perf_counter(), engine.device.memory_allocated()
    for tag in tags:
        engine.wakeup(tag, "restore", Never())
    return asleep - begun, time.perf_counter() - asleep, held


def same(one: Generation, other: Generation) -> bool:
    return np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.routes, other.routes)  # type: ignore[arg-type]


def main() -> int:
    cycles = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    engine = PaddleEngine.create(CONFIG, seed=1)
    counter, first = engine.device.memory_allocated, engine.generate(PROMPT, 60)
    weights = [np.array(one) for one in engine.weights().values()]
    begun = time.perf_counter()
    copied = [one.copy() for one in weights]
    plain = (time.perf_counter() - begun) * 1e3
    size = sum(one.nbytes for one in copied) / 2**20
    print(f"weights {size:.1f} MiB (a plain copy: {plain:.1f} ms); {cycles} cycles each")
    heads = f"{'MiB awake':>10} {'asleep':>8} {'after':>10} {'sleep ms':>9} {'wake ms':>8} {'same':>5}"
    print(f"{'tags':18} {'level':8} {heads}")
    failed = 0
    for tags, level in CASES:
        engine.pause("abort", Never())
        awake = counter()
        times = [cycle(engine, tags, level) for _ in range(cycles)]
        after = counter()
        engine.resume()
        digest = weights_digest(dict(engine.weights())) == engine.inspect().weights_digest
        good = after == awake and digest and same(engine.generate(PROMPT, 60), first)
        failed += not good
        down, up = (float(np.median([one[at] for one in times])) * 1e3 for at in (0, 1))
        sizes = f"{awake / 2**20:10.2f} {times[-1][2] / 2**20:8.2f} {after / 2**20:10.2f}"
        print(f"{','.join(map(str, tags)):18} {level:8} {sizes} {down:9.1f} {up:8.1f} {'yes' if good else 'NO':>5}")
    engine.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
