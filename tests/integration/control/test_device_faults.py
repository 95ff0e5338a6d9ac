"""A device that fails inside a pause: the worker answers so, and what it then says of the engine is true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moebus.engine.paddle import PaddleEngine
from moebus.engine.port import EngineClosed, Prompt
from moebus.schemas.responses import Code
from tests.support.control_lab import Lab
from tests.support.paddle import SMALL, needs_paddle

pytestmark = [needs_paddle, pytest.mark.paddle]
PROMPT = Prompt("r", np.arange(20), max_tokens=4)


@pytest.fixture
def engine(lab: Lab) -> Iterator[PaddleEngine]:
    made = PaddleEngine.create(SMALL, seed=3)
    lab.host(made)
    yield made
    made.close()


def gone() -> Any:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("method", ["pause", "sleep"])
def test_what_fails_in_a_pause_leaves_it_serving(
    lab: Lab, engine: PaddleEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(engine.device, "synchronize", gone)
        answer = lab.ask(method)
        assert answer.code is Code.FAILED
        assert answer.message is not None
        assert "the device is gone" in answer.message
        assert answer.state is not None
        assert answer.state.lifecycle == "RUNNING"
        assert not engine.inspect().paused
    assert engine.generate(PROMPT, 30).finish_reason == "length"
    answer = lab.ask(method)
    assert answer.code is Code.OK
    with pytest.raises(EngineClosed):
        engine.generate(PROMPT, 30)
