"""What recording routes costs of decode throughput: the same engine, the same steps, with capture and without it.

Windows of 16 steps with and without capture alternate within one run; a window is as long as captured rows wait before
they are written, so that its share of that is in it. Two figures, both paired in one run:

- share: CPU time spent inside capture (hook, slots, the writing) / CPU time of the very steps it was spent in. Steady
  also on a busy machine.
- paired: median over neighbouring windows of (with - without) / without, by the wall clock. Needs a quiet machine: a
  window's own spread is many times the difference otherwise; it is printed beside it.

Usage: `python bench/bench_capture.py [pairs]`
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from moebus.engine.paddle import TINY, ModelConfig, PaddleEngine, load_paddle
from moebus.engine.paddle.capture import FLUSH_STEPS, RouteMissing
from moebus.engine.paddle.runner import Runner
from moebus.engine.port import Prompt

SMALL_MOE = ModelConfig(
    vocab_size=4096, hidden_size=256, num_layers=4, first_dense_layers=0, num_heads=8, num_kv_heads=2, num_experts=16,
    top_k=4, moe_intermediate_size=256, block_size=16, num_blocks=512, max_batch=8,
)  # fmt: skip
MODELS = {"tiny (3 layers, hidden 64)": TINY, "small (4 layers, hidden 256)": SMALL_MOE}
WARM_UP = 2


class Nothing:
    """Takes the place of a step's capture: a hook that does nothing."""

    def __call__(self, layer: int, ids: Any) -> None:
        pass

    def finish(self) -> None:
        pass


class Metered:
    """A step's capture whose CPU time is added up."""

    def __init__(self, inner: Any, book: list[float]) -> None:
        self._inner = inner
        self._book = book

    def __call__(self, layer: int, ids: Any) -> None:
        begun = time.thread_time()
        self._inner(layer, ids)
        self._book[0] += time.thread_time() - begun

    def finish(self) -> None:
        begun = time.thread_time()
        self._inner.finish()
        self._book[0] += time.thread_time() - begun


class Alternating:
    """Stands before the runner's forward: decode steps run with and without capture, a window each, and are timed."""

    def __init__(self, runner: Runner, batch: int) -> None:
        self._forward, self._capture = runner.forward, runner._step_capture
        runner.forward = self  # type: ignore[method-assign]
        runner._step_capture = self._chosen  # type: ignore[method-assign, assignment]
        self._on = True
        self._batch = batch
        self._steps = 0
        self.inside = [0.0]
        self.cpu = 0.0
        self.wall: dict[bool, list[float]] = {True: [], False: []}

    def __call__(self, sequences: Any, count: int) -> Any:
        if count != 1 or len(sequences) != self._batch:
            return self._forward(sequences, count)
        window = self._steps // FLUSH_STEPS
        if window == 2 * WARM_UP and self._steps % FLUSH_STEPS == 0:
            self.inside[0] = self.cpu = 0.0
        self._on = window % 4 in (0, 3)  # on off, off on, ...: neither always comes first
        if self._steps % FLUSH_STEPS == 0:
            self.wall[self._on].append(0.0)
        self._steps += 1
        wall, cpu = time.perf_counter(), time.thread_time()
        logits = self._forward(sequences, count)
        self.wall[self._on][-1] += time.perf_counter() - wall
        self.cpu += (time.thread_time() - cpu) * self._on
        self._on = True
        return logits

    def _chosen(self, *where: Any) -> Any:
        if not self._on:
            return Nothing()
        begun = time.thread_time()
        metered = Metered(self._capture(*where), self.inside)
        self.inside[0] += time.thread_time() - begun
        return metered


def measure(config: ModelConfig, batch: int, pairs: int) -> Alternating:
    """The times of `pairs` pairs of windows, after some to warm up."""
    steps = 2 * (pairs + WARM_UP) * FLUSH_STEPS + 8
    engine = PaddleEngine.create(replace(config, max_batch=batch, max_position=4096, num_blocks=1024), seed=1)
    timed = Alternating(engine._scheduler._runner, batch)
    prompts = [
        Prompt(f"r{index}", (np.arange(16) * 7 + index) % config.vocab_size, max_tokens=steps) for index in range(batch)
    ]
    try:
        engine.generate_many(prompts, 3600)
    except RouteMissing:
        pass  # the rows of every second window: what this is about
    finally:
        engine.close()
    return timed


def paired(times: dict[bool, list[float]], pairs: int) -> tuple[float, float, float]:
    """Median seconds of a step without capture; the median of the pairs' difference and half the spread of its middle
    half, both as fractions of that."""
    on, off = (np.asarray(times[kind][WARM_UP : WARM_UP + pairs]) / FLUSH_STEPS for kind in (True, False))
    low, middle, high = np.quantile((on - off) / np.median(off), (0.25, 0.5, 0.75))
    return float(np.median(off)), float(middle), float(high - low) / 2


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    load_paddle()
    print(f"{'model':30} {'batch':>5} {'tok/s':>7} {'share':>7} {'us/step':>8} {'paired':>8} {'spread':>8}")
    for name, config in MODELS.items():
        for batch in (1, 8):
            timed = measure(config, batch, pairs)
            off, cost, spread = paired(timed.wall, pairs)
            inside = timed.inside[0] / (pairs * FLUSH_STEPS) * 1e6
            share = timed.inside[0] / timed.cpu
            print(f"{name:30} {batch:5} {batch / off:7.0f} {share:7.2%} {inside:8.0f} {cost:8.2%} {spread:8.2%}")


if __name__ == "__main__":
    main()
