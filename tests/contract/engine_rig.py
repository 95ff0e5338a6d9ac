"""The rig of the Engine port's contract suite: one engine with a gate in its hook and a way to write weight files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from moebus.engine.port import (
    GeneratingEngine,
    Generation,
    Level,
    PauseMode,
    Prompt,
)
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.gate import Gate
from tests.support.wait import wait_until

LEVELS: tuple[Level, ...] = ("offload", "discard")
MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")


@dataclass
class Rig:
    """An engine under test. `write_weights(path, seed)` makes a good source; `moe_layers`, `top_k` of its routes."""

    engine: GeneratingEngine
    gate: Gate
    root: Path
    write_weights: Callable[[Path, int], None]
    moe_layers: int
    top_k: int
    started: list[Background[Generation]] = field(default_factory=list)

    def prompt(self, request_id: str = "r", size: int = 20, max_tokens: int = 6, **kwargs: object) -> Prompt:
        tokens = (np.arange(size, dtype=np.int64) * 7 + 3) % 101
        return Prompt(request_id, tokens, max_tokens=max_tokens, **kwargs)  # type: ignore[arg-type]

    def run(self, prompt: Prompt | None = None) -> Generation:
        return self.engine.generate(prompt or self.prompt(), 30.0)

    def start(self, prompt: Prompt) -> Background[Generation]:
        self.started.append(Background(lambda: self.engine.generate(prompt, 30.0)))
        return self.started[-1]

    def held(self, steps: int = 3, prompt: Prompt | None = None) -> Background[Generation]:
        """A request that has done `steps` steps and is held before its next one."""
        self.gate.close_after("step", steps)
        call = self.start(prompt or self.prompt(max_tokens=12))
        self.gate.wait_held()
        return call

    def frozen(self) -> Background[Generation]:
        """A request frozen by `keep` after 3 to 4 steps; the engine is paused."""
        call = self.held()
        pause = Background(lambda: self.engine.pause("keep", Left()))
        wait_until(lambda: self.engine.inspect().paused, what="admission closed")
        self.gate.open()
        assert pause.result().frozen == 1
        return call

    def update(self, version: str, source: Path | None, **kwargs: object) -> None:
        staged = self.engine.stage(version, None if source is None else str(source), None, Left())
        self.engine.commit(staged, kwargs.get("cache", "reset"), Left())  # type: ignore[arg-type]


def same(one: Generation, other: Generation) -> bool:
    assert one.routes is not None
    assert other.routes is not None
    return np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.routes, other.routes)


class EngineRules:
    """A subclass gives `new_rig`."""

    def new_rig(self, root: Path) -> Rig:
        raise NotImplementedError

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[Rig]:
        rig = self.new_rig(tmp_path)
        yield rig
        rig.gate.open()
        rig.engine.close()
        for call in rig.started:
            wait_until(lambda call=call: call.done, what="a request ended by close")  # type: ignore[misc]
