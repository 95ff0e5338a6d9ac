"""What recording routes costs of decode throughput: the same engine, the same steps, with capture and without it.

Steps of one run alternate: on off off on, ..., so that whatever changes on the machine falls on both alike. A block is
128 steps; the 64 with capture in it fill and write out one batch of rows, so that its whole cost is inside. A step is
all that the engine does for one token of each request (scheduling, forward, sampling). Two figures of the same run:

- share: CPU time inside capture (generations, hook, hand-over, writing) over the CPU time of the very steps it was
  spent in, on the engine's thread. The steps without capture call functions in the same places that only take the ids
  and let them go at the end of the step, under the same meter: what that shows is the meter's own cost, that of coming
  back to Python behind a kernel, and that of freeing tensors which every step has to free; it is subtracted. Steady
  also on a busy machine, where OMP_NUM_THREADS=1 keeps threads from spinning for each other.
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
from moebus.engine.paddle.routing import OwnRouting
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
        self._step, self._lineup = scheduler._step, scheduler.lineup
        self._hidden, self._capture, self._found = runner._decoder.hidden, runner._capture, runner._generations
        self._without = OwnRouting(engine.config, self._take)
        self._ids: dict[int, Any] = {}
        scheduler._step = self  # type: ignore[method-assign]
        runner._decoder.hidden = self._forward  # type: ignore[method-assign]
        runner._capture = self  # type: ignore[assignment]
        runner._generations = self._generations  # type: ignore[method-assign]
        self.takes_whole = self._capture.takes_whole
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

    # -- in the place of the runner's parts

    def _forward(self, tokens: Any, positions: Any, attend: Any, route: Any) -> Any:
        if self._on:
            hook = route._hook
            route._hook = lambda layer, ids: self.meter.run(hook, layer, ids)
        return self._hidden(tokens, positions, attend, route if self._on else self._without)

    def _take(self, layer: int, ids: Any) -> None:
        self.empty.run(self._ids.__setitem__, layer, ids)

    def _generations(self, sequences: Any, history: Any, blocks: Any) -> Any:
        if self._on:
            return self.meter.run(self._found, sequences, history, blocks)
        return self.empty.run(self._nothing, blocks)

    def add(self, *what: Any, whole: bool) -> None:
        if self._on:
            self.meter.run(lambda: self._capture.add(*what, whole=whole))
        else:
            self.empty.run(self._let_go)

    def _nothing(self, *_: Any) -> None:
        """What comes first behind a kernel finds nothing of Python in the processor's caches, whatever it does."""

    def _let_go(self) -> None:
        self._ids.clear()

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
