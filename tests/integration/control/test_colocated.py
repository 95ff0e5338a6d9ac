"""The colocated loop through the worker, on both engines: sleep all, wake the weights empty, update, wake the cache,
resume; between the rounds the device belongs to the trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from moebus.engine.paddle import PaddleEngine
from moebus.engine.port import GeneratingEngine, Prompt
from moebus.engine.simulated import SimulatedEngine
from moebus.schemas.responses import Code, Lifecycle, Weights
from tests.support.control_lab import Lab
from tests.support.paddle import SMALL, needs_paddle, write_weights

PROMPT = Prompt("r", np.arange(40), max_tokens=6)
Made = tuple[GeneratingEngine, Callable[[Path, int], None]]


def _simulated(lab: Lab, root: Path) -> Made:
    engine = SimulatedEngine(allowed_roots=(str(root),), clock=lab.clock.monotonic)
    return engine, _write_bytes


def _write_bytes(path: Path, seed: int) -> None:
    path.write_bytes(b"%d" % seed)


def _paddle(lab: Lab, root: Path) -> Made:
    return PaddleEngine.create(SMALL, seed=1, allowed_roots=(str(root),)), write_weights


@pytest.fixture(params=[_simulated, pytest.param(_paddle, marks=[needs_paddle, pytest.mark.paddle])])
def made(request: pytest.FixtureRequest, lab: Lab, tmp_path: Path) -> Iterator[Made]:
    engine, write = request.param(lab, tmp_path)
    lab.host(engine)
    yield engine, write
    engine.close()


@pytest.mark.parametrize("level", ["offload", "discard"])
def test_rounds_of_sleep_update_and_wake(lab: Lab, tmp_path: Path, made: Made, level: str) -> None:
    engine, write = made
    held = engine.inspect().bytes_by_tag
    outputs = set()
    for turn in range(3):
        path = tmp_path / f"{turn}.safetensors"
        write(path, turn)
        slept = lab.ask("sleep", {"level": level})
        assert slept.result is not None
        assert slept.code is Code.OK
        assert slept.result["tags"] == {str(t): {"outcome": "done", "freed_bytes": size} for t, size in held.items()}
        assert sum(engine.inspect().bytes_by_tag.values()) == 0, "the trainer has the device"
        early = lab.ask("update_weights", {"version": f"v{turn}", "source": str(path)})
        assert early.message == "weight is asleep; wake it first"
        woken = lab.ask("wakeup", {"tags": "weight", "weights": "empty"})
        assert woken.state is not None
        assert woken.state.weights is Weights.EMPTY
        update = lab.send("update_weights", {"version": f"v{turn}", "source": str(path)})
        lab.turn()
        lab.decide(update)
        assert lab.answer(update).code is Code.OK
        assert lab.ask("resume").message == "kv_cache is asleep"
        assert lab.ask("wakeup", {"tags": "kv_cache"}).code is Code.OK
        opened = lab.ask("resume", expect={"version": f"v{turn}"})
        assert opened.state is not None
        assert (opened.code, opened.state.lifecycle) == (Code.OK, Lifecycle.RUNNING)
        result = engine.generate(PROMPT, 30)
        assert (result.versions, result.cached_tokens) == (((0, f"v{turn}"),), 0)
        outputs.add(tuple(result.token_ids.tolist()))
        assert engine.inspect().bytes_by_tag == held
    assert len(outputs) == 3, "each round had weights of its own"
