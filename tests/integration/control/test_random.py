"""Random commands, repeats, decisions, crashes and lost engines against one real worker."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from moebus.engine.simulated import SimulatedEngine
from moebus.schemas.responses import Code, Lifecycle, Phase
from tests.support.control_lab import Lab

COMMANDS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "pause": ("pause", None),
    "keep": ("pause", {"mode": "keep"}),
    "resume": ("resume", None),
    "sleep": ("sleep", None),
    "discard": ("sleep", {"tags": "weight", "level": "discard"}),
    "sleep kv": ("sleep", {"tags": "kv_cache"}),
    "wake": ("wakeup", None),
    "wake empty": ("wakeup", {"tags": "weight", "weights": "empty"}),
    "wake and resume": ("wakeup", {"resume": True}),
    "start": ("transfer_weights", {"step": "start"}),
    "finish": ("transfer_weights", {"step": "finish", "version": "t"}),
    "reset": ("reset_cache", None),
    "abort": ("abort_requests", {"all": True}),
    "begin": ("begin_run", {"run": "r"}),
}
EVENTS = [*COMMANDS, "update", "commit", "void", "repeat", "conflict", "restart", "lose", "late"]


class Story:
    """One worker and what is done to it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.engine: SimulatedEngine = lab.engine()
        self.host = lab.host(self.engine)
        self.sent: list[tuple[str, str, dict[str, Any] | None]] = []
        self.updates: list[str] = []

    def go(self, event: str) -> None:
        lab = self.lab
        if event in COMMANDS:
            self._send(*COMMANDS[event])
        elif event == "update":
            version = f"v{len(self.updates)}"
            self.updates.append(self._send("update_weights", {"version": version, "source": lab.file(version)}))
        elif event in ("commit", "void") and self.updates:
            lab.send("decide", {"request_id": self.updates[-1], "decision": event})
        elif event in ("repeat", "conflict") and self.sent:
            request_id, method, args = self.sent[len(self.sent) // 2]
            lab.send(method, args, id=request_id, **({"target": "w1"} if event == "conflict" else {}))
        elif event == "restart":
            lab.crash(self.host)
            lab.silence()
            self.host = lab.host(self.engine)
        elif event == "lose":
            self.engine.lose()
        elif event == "late":
            lab.clock.advance(700)
        lab.clock.advance(2.1)
        lab.turn()

    def _send(self, method: str, args: dict[str, Any] | None) -> str:
        request_id = self.lab.send(method, args)
        self.sent.append((request_id, method, args))
        return request_id

    def check(self) -> None:
        found, member = self.engine.inspect(), self.lab.member()
        if not found.paused:
            assert all(found.resident.values()), "it serves without memory"
            assert found.weights_valid, "it serves with weights that hold nothing"
            assert not found.tainted
            assert member is not None
            assert member.state is not None
            assert member.state.lifecycle is Lifecycle.RUNNING
        for request_id, _, _ in self.sent:
            finals = {
                str(one) for one in self.lab.answers(request_id, phase=Phase.DONE) if one.code is not Code.CONFLICT
            }
            assert len(finals) <= 1, "two final answers of one worker for one request"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(EVENTS), max_size=14))
def test_random_lives(events: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        lab = Lab(Path(directory))
        story = Story(lab)
        for event in events:
            story.go(event)
            story.check()
        lab.close()
