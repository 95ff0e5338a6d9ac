"""What recording routes costs of decode throughput: the same engine, the same steps, with capture and without it.

Steps of one run alternate: on off off on, ..., so that whatever changes on the machine falls on both alike. A block is
128 steps; the 64 with capture in it fill and write out one batch of rows, so that its whole cost is inside. A step is
all that the engine does for one token of each request (scheduling, forward, sampling). Two figures of the same run:

- share: CPU time inside capture (generations, hook, hand-over, writing) over the CPU time of the very steps it was
  spent in, on the engine's thread. The steps without capture have a hook that takes the ids and lets them go at the
  end of the step, under the same meter: what that shows is the meter's own cost, and that of freeing tensors which
  every step has to free; it is subtracted. Steady also on a busy machine.
- paired: median over blocks of (with - without) / without by the wall clock, with the interval that holds the median
  of the blocks in 95 of 100 repetitions. It needs a quiet machine.

Each round has an engine of its own; the table gives the median over rounds and, in brackets, the lowest and highest.
Usage: `python bench/bench_capture.py [rounds] [blocks]`
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moebus.engine.paddle import TINY, ModelConfig, PaddleEngine, load_paddle
from moebus.engine.paddle.capture import FLUSH_STEPS, RouteMissing
from moebus.engine.port import Prompt

SMALL_MOE = ModelConfig(
    vocab_size=4096, hidden_size=256, num_layers=4, first_dense_layers=0, num_heads=8, num_kv_heads=2, num_experts=16,
    top_k=4, moe_intermediate_size=256, block_size=16, num_blocks=512, max_batch=8,
)  # fmt: skip
MODELS = {"tiny (3 layers, hidden 64)": TINY, "small (4 layers, hidden 256)": SMALL_MOE}
BLOCK = 2 * FLUSH_STEPS
WARM_UP = 2


class Meter:
    """Adds up CPU time of the calling thread and counts how often it did."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.times = 0

    def run(self, call: Any, *args: Any) -> Any:
        begun = time.thread_time()
        result = call(*args)
        self.seconds += time.thread_time() - begun
        self.times += 1
        return result


def without(*_: Any) -> Any:
    """The hook, and the hand-over, of a step without capture."""
    ids: dict[int, Any] = {}
    return ids.__setitem__, ids.clear


@dataclass
class Found:
    """Of one round. `paired`: one entry per block. `step`: median seconds of a step without capture."""

    inside: float
    share: float
    paired: np.ndarray[Any, Any]
    step: float


class Alternating:
    """Stands before the scheduler's step: decode steps run with and without capture and are timed."""

    def __init__(self, engine: PaddleEngine, batch: int) -> None:
        scheduler, runner = engine._scheduler, engine._scheduler._runner
        self._step, self._hook, self._lineup = scheduler._step, runner._hook, scheduler.lineup
        scheduler._step = self  # type: ignore[method-assign]
        runner._hook = self._chosen  # type: ignore[method-assign, assignment]
        self._batch = batch
        self._steps = 0
        self._on = True
        self.meter, self.empty = Meter(), Meter()
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __call__(self) -> None:
        running = self._lineup.running
        if len(running) != self._batch or any(one.pending != 1 for one in running):
            self._step()
            return
        if self._steps == WARM_UP * BLOCK:
            self.meter, self.empty = Meter(), Meter()
        self._on = self._steps % 4 in (0, 3)
        self._steps += 1
        wall, cpu = time.perf_counter(), time.thread_time()
        self._step()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.thread_time() - cpu)
        self._on = True

    def _chosen(self, *where: Any) -> Any:
        meter = self.meter if self._on else self.empty
        hook, captured = meter.run(self._hook if self._on else without, *where)
        return lambda layer, ids: meter.run(hook, layer, ids), lambda: meter.run(captured)

    def found(self, blocks: int) -> Found:
        on = np.isin(np.arange(BLOCK) % 4, (0, 3))
        wall, cpu = (
            np.asarray(x[WARM_UP * BLOCK :][: blocks * BLOCK]).reshape(-1, BLOCK) for x in (self.wall, self.cpu)
        )
        with_it, without = wall[:, on].sum(axis=1), wall[:, ~on].sum(axis=1)
        spent = self.meter.seconds - self.meter.times * self.empty.seconds / self.empty.times
        steps = cpu[:, on].size
        step = float(np.median(without)) / FLUSH_STEPS
        return Found(spent / steps, spent / float(cpu[:, on].sum()), (with_it - without) / without, step)


def measure(config: ModelConfig, batch: int, blocks: int) -> Found:
    """`blocks` blocks, after some to warm up."""
    steps = (blocks + WARM_UP) * BLOCK
    longest = steps + 40
    needed = batch * -(-longest // config.block_size)
    config = replace(config, max_batch=batch, max_position=longest, num_blocks=needed + 1)
    engine = PaddleEngine.create(config, seed=1)
    timed = Alternating(engine, batch)
    prompts = [
        Prompt(f"r{index}", (np.arange(16) * 7 + index) % config.vocab_size, max_tokens=steps + 2)
        for index in range(batch)
    ]
    try:
        engine.generate_many(prompts, 3600)
    except RouteMissing:
        pass  # the rows of every second step: what this is about
    finally:
        engine.close()
    return timed.found(blocks)


def spread(values: Any, form: str) -> str:
    low, middle, high = min(values), float(np.median(values)), max(values)
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"


def interval(values: np.ndarray[Any, Any]) -> str:
    """The median and its 95 % interval, by the order of the values."""
    ordered = np.sort(values)
    half = 0.98 * np.sqrt(len(ordered))
    low, high = (int(np.clip(round(len(ordered) / 2 + at), 0, len(ordered) - 1)) for at in (-half, half))
    return f"{np.median(ordered):.2%} [{ordered[low]:.2%}, {ordered[high]:.2%}]"


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    blocks = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    load_paddle()
    print(f"{rounds} rounds of {blocks} blocks of {BLOCK} steps")
    print(f"{'model':29} {'batch':>5} {'tok/s':>6} {'us/step':>20} {'share':>22} {'paired':>24}")
    for name, config in MODELS.items():
        for batch in (1, 8):
            found = [measure(config, batch, blocks) for _ in range(rounds)]
            speed = batch / float(np.median([one.step for one in found]))
            inside, share = ([getattr(one, field) for one in found] for field in ("inside", "share"))
            paired = interval(np.concatenate([one.paired for one in found]))
            micro = spread([one * 1e6 for one in inside], ".1f")
            print(f"{name:29} {batch:5} {speed:6.0f} {micro:>20} {spread(share, '.2%'):>22} {paired:>24}", flush=True)


if __name__ == "__main__":
    main()
