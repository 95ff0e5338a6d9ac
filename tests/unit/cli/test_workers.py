"""The table of the fleet."""

from __future__ import annotations

import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import OutRecord
from moebus.broker.topics import Topics, ensure
from moebus.cli import _output
from moebus.schemas.members import MemberState, encode_member
from moebus.schemas.responses import Lifecycle, Residency, Weights, WorkerState
from moebus.schemas.tags import Tag
from tests.support.cli import MemoryCli


@pytest.mark.parametrize(("weights", "said"), [(Weights.EMPTY, True), (Weights.VALID, False)])
def test_empty_weights_are_said(weights: Weights, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, topics = MemoryBroker(), Topics("t")
    ensure(broker.admin(), topics)
    state = WorkerState(lifecycle=Lifecycle.PAUSED, tags={Tag.WEIGHT: Residency.RESIDENT}, weights=weights)
    member = MemberState(kind="worker", member_id="w", boot_id="b", state=state, ready=True, since=0, applied=0)
    value, headers = encode_member(member)
    writer = broker.writer("w")
    writer.append(OutRecord(topics.members, value, b"w", headers)).result(10)
    writer.close(1)
    monkeypatch.setattr(_output.out, "width", 240)
    assert ("(weights empty)" in MemoryCli(broker, "t", monkeypatch).run("workers").out) is said
