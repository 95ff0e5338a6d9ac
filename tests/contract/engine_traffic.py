"""Rules of the Engine port under traffic: random control while requests keep coming."""

from __future__ import annotations

import random
from threading import Event

from moebus.engine.port import EngineClosed, Generation, PauseMode, Prompt
from moebus.schemas.tags import ALL_TAGS, Tag
from tests.contract.engine_rig import LEVELS, EngineRules, Rig, same
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.wait import wait_until

MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")


class TrafficRules(EngineRules):
    def test_random_control_under_traffic(self, rig: Rig) -> None:
        alone = rig.run(rig.prompt(size=30, max_tokens=8))
        stop, draw = Event(), random.Random(5)
        clients = [Background(lambda name=name: _client(rig, name, stop)) for name in "abcd"]  # type: ignore[misc]
        updates = 0
        for _ in range(40):
            enough = len(rig.gate.calls) + draw.randrange(2, 8)
            wait_until(lambda enough=enough: len(rig.gate.calls) >= enough, what="some steps")  # type: ignore[misc]
            mode = draw.choice(MODES)
            drained = rig.engine.pause(mode, Left())
            state = rig.engine.inspect()
            assert state.paused
            assert state.in_flight == state.frozen == drained.frozen
            assert mode == "keep" or not drained.frozen
            action = draw.choice(["cache", "sleep", "update", "abort", "none"])
            if action == "cache":
                rig.engine.reset_cache()
            elif action == "abort":
                rig.engine.abort_requests(["a", "c"])
            elif action == "update":
                updates += 1
                rig.update(f"v{updates}", None)
            elif action == "sleep":
                _nap(rig, draw, ALL_TAGS if not state.frozen else (Tag.WEIGHT,))
            rig.engine.resume()
        stop.set()
        done = [result for client in clients for result in client.result()]
        assert len(done) > 10
        assert {result.finish_reason for result in done} <= {"abort", "length"}
        for result in done:
            rows = 30 + len(result.token_ids) - 1 if len(result.token_ids) else 0
            assert result.routes is not None
            assert len(result.routes) == rows
            if result.finish_reason == "length" and result.versions == alone.versions:
                assert same(result, alone)
        assert updates > 0
        assert rig.engine.inspect().in_flight == 0


def _client(rig: Rig, name: str, stop: Event) -> list[Generation]:
    prompt: Prompt = rig.prompt(name, size=30, max_tokens=8)
    results = []
    while not stop.is_set():
        try:
            results.append(rig.engine.generate(prompt, 30.0))
        except EngineClosed:
            stop.wait(0.001)
    return results


def _nap(rig: Rig, draw: random.Random, tags: tuple[Tag, ...]) -> None:
    chosen = [tag for tag in tags if draw.random() < 0.7]
    for tag in chosen:
        assert rig.engine.sleep(tag, draw.choice(LEVELS), Left()) > 0
    for tag in chosen:
        assert rig.engine.wakeup(tag, "restore", Left()) > 0
