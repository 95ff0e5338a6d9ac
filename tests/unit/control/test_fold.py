"""The index of the log and the desired state, from records alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moebus.broker.ports import LogRecord
from moebus.consumers.control.fold import Member, fold
from moebus.consumers.control.identity import Identities, Standing
from moebus.consumers.control.lifecycle import State
from moebus.consumers.control.log_index import Entry, Kind, LogIndex, hello_of
from moebus.consumers.control.state_record import from_record, to_record
from moebus.engine.simulated.engine import CAPABILITIES
from moebus.schemas.responses import Lifecycle, Residency, Weights

PAUSE = {"request_id": "p", "method": "pause"}
UPDATE = {"request_id": "u", "method": "update_weights", "args": {"version": "v2", "source": "/w/v2"}}


def decision(verdict: str, of: str = "u", by: str = "d") -> dict[str, Any]:
    return {"request_id": by, "method": "decide", "args": {"request_id": of, "decision": verdict}}


def read(*records: dict[str, Any] | bytes | None) -> tuple[LogIndex, list[Entry]]:
    index = LogIndex()
    entries = []
    for offset, record in enumerate(records):
        value = json.dumps(record).encode() if isinstance(record, dict) else record
        entries.append(index.add(LogRecord("t", 0, offset, 1000 * offset, None, value)))
    return index, entries


def desired(*records: dict[str, Any] | bytes | None, labels: dict[str, str] | None = None) -> State:
    index, entries = read(*records)
    return fold(index, Member("w1", labels or {}, CAPABILITIES), entries, State())


def test_kinds() -> None:
    index, entries = read(None, b"{", {"request_id": "x"}, PAUSE, UPDATE, decision("void"))
    assert [entry.kind for entry in entries] == [
        Kind.NULL, Kind.BAD, Kind.INVALID, Kind.COMMAND, Kind.COMMAND, Kind.DECIDE,
    ]  # fmt: skip
    assert (entries[5].verdict, entries[5].update) == ("void", 4)
    assert len(index.identities) == 3


def test_identities() -> None:
    ids = Identities()
    assert ids.standing("r", "d1") is Standing.FIRST
    ids.bind("r", "d1", 3)
    ids.bind("r", "d2", 4)
    assert (ids.standing("r", "d1"), ids.standing("r", "d2")) == (Standing.REPEAT, Standing.CONFLICT)
    assert ids.get("r") is not None


def test_hello() -> None:
    hello = {"request_id": "h", "method": "hello", "args": {"worker": "w", "boot": "b", "engine": "e"}}
    _, entries = read(hello, hello, PAUSE)
    assert [getattr(hello_of(entry), "worker", None) for entry in entries] == ["w", None, None]


@pytest.mark.parametrize(
    ("records", "phase"),
    [
        ([], Lifecycle.RUNNING),
        ([PAUSE], Lifecycle.PAUSED),
        ([PAUSE, {"request_id": "r", "method": "resume"}], Lifecycle.RUNNING),
        ([PAUSE, {"request_id": "p", "method": "resume"}], Lifecycle.PAUSED),
        ([PAUSE, {"request_id": "r", "method": "resume"}, PAUSE], Lifecycle.RUNNING),
        ([PAUSE, decision("void", "p")], Lifecycle.RUNNING),
        ([{**PAUSE, "target": "w2"}], Lifecycle.RUNNING),
        ([{**PAUSE, "target": "role=rollout"}], Lifecycle.PAUSED),
        ([{**PAUSE, "deadline_s": 0.001}], Lifecycle.PAUSED),
        ([{**PAUSE, "run": "never"}], Lifecycle.RUNNING),
        ([{**PAUSE, "force": 1}], Lifecycle.RUNNING),
        ([PAUSE, {"request_id": "r", "method": "resume", "expect": {"after": -1}}], Lifecycle.PAUSED),
        ([PAUSE, UPDATE], Lifecycle.UPDATING),
        ([PAUSE, UPDATE, {"request_id": "r", "method": "resume"}, decision("void")], Lifecycle.PAUSED),
    ],
)
def test_phase(records: list[dict[str, Any]], phase: Lifecycle) -> None:
    assert desired(*records, labels={"role": "rollout"}).phase is phase


@pytest.mark.parametrize(
    ("records", "version"),
    [
        ([PAUSE, UPDATE], None),
        ([PAUSE, UPDATE, decision("commit")], "v2"),
        ([PAUSE, UPDATE, decision("void")], None),
        ([PAUSE, UPDATE, decision("void"), decision("commit", by="d2")], None),
        ([PAUSE, UPDATE, decision("commit"), decision("void", by="d2")], "v2"),
        ([UPDATE, decision("commit")], None),
        ([PAUSE, UPDATE, decision("commit"), {"request_id": "b", "method": "begin_run", "args": {"run": "r"}}], None),
    ],
)
def test_version(records: list[dict[str, Any]], version: str | None) -> None:
    state = desired(*records)
    assert (state.version, state.version_offset) == (version, 1 if version else None)


def test_a_run_starts_afresh() -> None:
    sleep = {"request_id": "s", "method": "sleep", "args": {"tags": "weight"}}
    state = desired(sleep, {"request_id": "b", "method": "begin_run", "args": {"run": "r"}})
    assert state == State(phase=Lifecycle.PAUSED, run="r")


def test_state_records_round_trip_and_tolerate_others() -> None:
    state = State(
        phase=Lifecycle.UPDATING, fault=Lifecycle.BEHIND, weight=Residency.ASLEEP, weights=Weights.EMPTY, version="v",
        version_offset=0, run="r", transferring=True, pending=4, missed=5, holds="h", reason="why",
    )  # fmt: skip
    assert from_record(to_record(state)) == state
    assert to_record(State()) == {}
    assert from_record({"phase": "NEW", "pending": True, "version": 3, "transferring": "yes", "other": 1}) == State()
