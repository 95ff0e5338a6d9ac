"""Rules of the Engine port: pause, resume, deadlines, the end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from moebus.engine.port import (
    EngineClosed,
    EngineFailed,
    EngineTimeout,
    PauseMode,
)
from moebus.schemas.tags import Tag
from tests.contract.engine_rig import MODES, EngineRules, Rig, same
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.wait import wait_until


class LifecycleRules(EngineRules):
    @pytest.mark.parametrize("mode", MODES)
    def test_pause_closes_admission_and_repeats(self, rig: Rig, mode: PauseMode) -> None:
        for _ in range(2):
            result = rig.engine.pause(mode, Left())
            assert (result.aborted, result.finished, result.frozen) == (0, 0, 0)
            assert result.idle_confirmed
            assert rig.engine.inspect().paused
            with pytest.raises(EngineClosed):
                rig.run()
        rig.engine.resume()
        rig.engine.resume()
        assert not rig.engine.inspect().paused
        assert rig.run().finish_reason == "length"

    def test_pause_abort_ends_what_runs(self, rig: Rig) -> None:
        call = rig.held()
        pause = Background(lambda: rig.engine.pause("abort", Left()))
        wait_until(lambda: rig.engine.inspect().paused, what="admission closed")
        rig.gate.open()
        assert pause.result().aborted == 1
        assert call.result().finish_reason == "abort"
        assert rig.engine.inspect().in_flight == 0

    def test_pause_wait_lets_it_finish(self, rig: Rig) -> None:
        call = rig.held()
        pause = Background(lambda: rig.engine.pause("wait", Left()))
        wait_until(lambda: rig.engine.inspect().paused, what="admission closed")
        rig.gate.open()
        assert pause.result().finished == 1
        assert call.result().finish_reason == "length"

    def test_pause_keep_freezes_and_resume_goes_on(self, rig: Rig) -> None:
        whole = rig.run(rig.prompt(max_tokens=12))
        call = rig.frozen()
        state = rig.engine.inspect()
        assert (state.in_flight, state.frozen) == (1, 1)
        assert rig.engine.pause("keep", Left()).frozen == 1
        assert not call.done
        rig.engine.resume()
        assert same(call.result(), whole)

    @pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("wait", "length")])
    def test_frozen_requests_can_be_drained(self, rig: Rig, mode: PauseMode, reason: str) -> None:
        call = rig.frozen()
        result = rig.engine.pause(mode, Left())
        assert result.frozen == 0
        assert result.aborted + result.finished == 1
        assert call.result().finish_reason == reason
        assert rig.engine.inspect().paused

    def test_frozen_requests_can_be_aborted_by_id(self, rig: Rig) -> None:
        call = rig.frozen()
        assert rig.engine.abort_requests(["r"]) == ["r"]
        assert call.result().finish_reason == "abort"

    @pytest.mark.parametrize("mode", MODES)
    def test_a_pause_in_vain_opens_admission_again(self, rig: Rig, mode: PauseMode) -> None:
        call = rig.held()
        with pytest.raises(EngineTimeout):
            rig.engine.pause(mode, Left(0.02))
        assert not rig.engine.inspect().paused
        rig.gate.open()
        call.result()
        assert rig.run(rig.prompt("again")).finish_reason == "length"
        assert rig.engine.pause(mode, Left()).idle_confirmed

    def test_inspect_is_quick_during_a_step(self, rig: Rig) -> None:
        call = rig.held()
        begun = time.monotonic()
        state = rig.engine.inspect()
        rig.engine.identity()
        rig.engine.capabilities()
        assert time.monotonic() - begun < 1.0
        assert state.in_flight == 1
        rig.gate.open()
        call.result()

    def test_memory_is_left_alone_while_serving(self, rig: Rig) -> None:
        before = rig.engine.inspect()
        staged = rig.engine.stage("next", None, None, Left())
        for refused in (
            lambda: rig.engine.sleep(Tag.KV_CACHE, "discard", Left()),
            lambda: rig.engine.sleep(Tag.WEIGHT, "discard", Left()),
            lambda: rig.engine.commit(staged, "reset", Left()),
        ):
            with pytest.raises(EngineFailed, match="pause"):
                refused()
        assert rig.engine.inspect() == before

    def test_reset_cache_drops_prefixes_also_while_serving(self, rig: Rig) -> None:
        rig.run()
        assert rig.engine.reset_cache() > 0
        assert rig.engine.reset_cache() == 0
        assert rig.run().cached_tokens == 0

    def test_a_passed_deadline_has_no_effect(self, rig: Rig) -> None:
        rig.engine.pause("abort", Left())
        before = rig.engine.inspect()
        for late in (
            lambda: rig.engine.sleep(Tag.WEIGHT, "offload", Left(-1)),
            lambda: rig.engine.sleep(Tag.KV_CACHE, "offload", Left(-1)),
            lambda: rig.engine.stage("v", None, None, Left(-1)),
        ):
            with pytest.raises(EngineTimeout):
                late()
        assert rig.engine.inspect() == before

    def test_identity_is_of_one_engine(self, rig: Rig, tmp_path: Path) -> None:
        other = self.new_rig(tmp_path)
        try:
            assert rig.engine.identity() == rig.engine.identity()
            assert rig.engine.identity() != other.engine.identity()
        finally:
            other.engine.close()

    def test_close_ends_requests_and_repeats(self, rig: Rig) -> None:
        call = rig.held()
        closing = Background(rig.engine.close)
        rig.gate.open()
        closing.result()
        assert call.result().finish_reason in ("abort", "length")
        rig.engine.close()
        with pytest.raises(EngineClosed, match="shut down"):
            rig.run()
