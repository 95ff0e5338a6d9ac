"""What becomes of the prefix cache with new weights: `cache` of update_weights and of a transfer's finish."""

from __future__ import annotations

import numpy as np
import pytest

from moebus.engine.port import Generation, Prompt
from moebus.engine.simulated import SimulatedEngine
from moebus.schemas.responses import Code
from tests.support.control_lab import Crash, CrashAt, Lab

PROMPT = np.arange(64)


def run(engine: SimulatedEngine) -> Generation:
    return engine.generate(Prompt("r", PROMPT, max_tokens=2), 30)


def update(lab: Lab, cache: str) -> None:
    request_id = lab.send("update_weights", {"version": "v2", "source": lab.file("v2"), "cache": cache})
    lab.turn()
    lab.decide(request_id)
    assert lab.answer(request_id).code is Code.OK


def transfer(lab: Lab, cache: str) -> None:
    for step in ("start", "update", "finish"):
        assert lab.ask("transfer_weights", {"step": step, "version": "v2", "cache": cache}).code is Code.OK


@pytest.mark.parametrize("how", [update, transfer])
@pytest.mark.parametrize("cache", ["reset", "recompute", "keep"])
def test_the_cache_is_treated_as_asked(lab: Lab, cache: str, how: object) -> None:
    assert callable(how)
    engine = lab.engine()
    lab.host(engine)
    assert (run(engine).cached_tokens, run(engine).cached_tokens > 0) == (0, True)
    lab.ask("pause")
    how(lab, cache)
    lab.ask("resume", expect={"version": "v2"})
    after = run(engine)
    if cache == "keep":
        assert after.cached_tokens > 0
        assert after.versions == ((0, "initial"), (after.cached_tokens, "v2"))
    else:
        assert (after.cached_tokens, after.versions) == (0, ((0, "v2"),))


@pytest.mark.parametrize("point", ["mid_effect", "after_effect"])
def test_a_crash_behind_the_finish_leaves_no_old_prefix(lab: Lab, point: str) -> None:
    engine, fault = lab.engine(), CrashAt(point)
    host = lab.host(engine, fault=fault)
    run(engine)
    lab.ask("pause")
    for step in ("start", "update"):
        lab.ask("transfer_weights", {"step": step, "version": "v2"})
    fault.armed = True
    request_id = lab.send("transfer_weights", {"step": "finish", "version": "v2"}, deadline_s=600)
    with pytest.raises(Crash):
        lab.turn()
    lab.crash(host)
    lab.silence()
    lab.host(engine)
    assert [answer.code for answer in lab.answers(request_id)] == [Code.OK]
    assert lab.ask("resume", expect={"version": "v2"}).code is Code.OK
    assert run(engine).versions == ((0, "v2"),)
