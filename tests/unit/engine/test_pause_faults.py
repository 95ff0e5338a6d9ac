"""Whatever fails inside a pause leaves admission as it was, and the next pause is a true one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moebus.engine.admission import Admission
from moebus.engine.paddle import PaddleEngine
from moebus.engine.port import Deadline, EngineClosed, PauseMode, Prompt
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.gate import Gate
from tests.support.paddle import SMALL, needs_paddle
from tests.support.wait import wait_until

MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")
PROMPT = Prompt("r", np.arange(30), max_tokens=8)


class Broken(Exception):
    """What a device or a clock raises."""


def fail(*_: object) -> Any:
    raise Broken("the device is gone")


class BrokenDeadline:
    """Raises when it is asked for the `at`th time."""

    def __init__(self, at: int = 1) -> None:
        self._at = at

    def remaining(self) -> float:
        self._at -= 1
        if self._at <= 0:
            raise Broken("no clock")
        return 30.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
def test_admission_is_as_before(mode: PauseMode, before: tuple[bool, bool]) -> None:
    admission = Admission()
    ticket = admission.enter("a")
    admission.closed, admission.frozen = before
    with pytest.raises(Broken):
        admission.pause(mode, BrokenDeadline())
    assert (admission.closed, admission.frozen) == before
    admission.leave(ticket, aborted=False)
    with pytest.raises(Broken):
        admission.pause("keep", Left(), still=fail)
    assert (admission.closed, admission.frozen) == before
    assert admission.pause(mode, Left()).idle_confirmed


def test_a_shutdown_in_the_middle_stays() -> None:
    admission = Admission()
    admission.enter("a")

    def shut_down_and_fail() -> bool:
        admission.shut_down()
        return fail()  # type: ignore[no-any-return]

    with pytest.raises(Broken):
        admission.pause("keep", Left(), still=shut_down_and_fail)
    with pytest.raises(EngineClosed, match="shut down"):
        admission.enter("a")


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def engine(gate: Gate) -> Iterator[PaddleEngine]:
    made = PaddleEngine.create(replace(SMALL, cpu_blocks=16), seed=1, hook=gate)
    yield made
    gate.open()
    made.close()


def _synchronize(engine: PaddleEngine, patch: pytest.MonkeyPatch) -> Deadline:
    patch.setattr(engine.device, "synchronize", fail)
    return Left()


def _flush(engine: PaddleEngine, patch: pytest.MonkeyPatch) -> Deadline:
    patch.setattr(engine._capture, "flush", fail)
    return Left()


def _drain(engine: PaddleEngine, patch: pytest.MonkeyPatch) -> Deadline:
    patch.setattr(engine._tiers, "drain", fail)
    return Left()


def _still(engine: PaddleEngine, patch: pytest.MonkeyPatch) -> Deadline:
    patch.setattr(engine._admission, "_empty", fail)
    patch.setattr(engine._scheduler, "still", fail)
    return Left()


def _hook(engine: PaddleEngine, patch: pytest.MonkeyPatch) -> Deadline:
    patch.setattr(engine, "hook", fail)
    return Left()


Break = Callable[[PaddleEngine, pytest.MonkeyPatch], Deadline]
BREAKS: list[Break] = [_synchronize, _flush, _drain, _still, _hook]


@needs_paddle
@pytest.mark.paddle
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("broken", BREAKS)
def test_a_serving_engine_goes_on_serving(
    engine: PaddleEngine, monkeypatch: pytest.MonkeyPatch, broken: Break, mode: PauseMode
) -> None:
    with monkeypatch.context() as patch:
        deadline = broken(engine, patch)
        with pytest.raises(Broken):
            engine.pause(mode, deadline)
        assert not engine.inspect().paused
    assert engine.generate(PROMPT, 30).finish_reason == "length"
    assert engine.pause(mode, Left()).idle_confirmed
    with pytest.raises(EngineClosed):
        engine.generate(PROMPT, 30)


@needs_paddle
@pytest.mark.paddle
@pytest.mark.parametrize("broken", BREAKS)
def test_a_paused_engine_stays_paused(engine: PaddleEngine, monkeypatch: pytest.MonkeyPatch, broken: Break) -> None:
    engine.pause("abort", Left())
    with monkeypatch.context() as patch:
        deadline = broken(engine, patch)
        with pytest.raises(Broken):
            engine.pause("abort", deadline)
        assert engine.inspect().paused
    with pytest.raises(EngineClosed):
        engine.generate(PROMPT, 30)
    engine.resume()
    assert engine.generate(PROMPT, 30).finish_reason == "length"


@needs_paddle
@pytest.mark.paddle
@pytest.mark.parametrize("broken", [_synchronize, _drain])
def test_requests_that_a_failed_keep_held_go_on(
    engine: PaddleEngine, gate: Gate, monkeypatch: pytest.MonkeyPatch, broken: Break
) -> None:
    expected = engine.generate(PROMPT, 30)
    gate.close_after("step", 2)
    call = Background(lambda: engine.generate(PROMPT, 30))
    gate.wait_held()
    with monkeypatch.context() as patch:
        deadline = broken(engine, patch)
        pause = Background(lambda: engine.pause("keep", deadline))
        wait_until(lambda: engine.inspect().paused, what="admission closed")
        gate.open()
        with pytest.raises(Broken):
            pause.result()
    assert call.result().token_ids.tolist() == expected.token_ids.tolist()
    assert engine.inspect().in_flight == 0


@needs_paddle
@pytest.mark.paddle
@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_frozen_requests_stay_frozen_when_draining_them_fails(
    engine: PaddleEngine, gate: Gate, monkeypatch: pytest.MonkeyPatch, mode: PauseMode
) -> None:
    gate.close_after("step", 2)
    call = Background(lambda: engine.generate(PROMPT, 30))
    gate.wait_held()
    freeze = Background(lambda: engine.pause("keep", Left()))
    wait_until(lambda: engine.inspect().paused, what="admission closed")
    gate.open()
    assert freeze.result().frozen == 1
    with pytest.raises(Broken):
        engine.pause("wait", BrokenDeadline())
    state = engine.inspect()
    assert (state.paused, state.frozen, call.done) == (True, 1, False)
    result = engine.pause(mode, Left())
    assert result.aborted + result.finished == 1
    assert call.result().finish_reason == ("abort" if mode == "abort" else "length")
