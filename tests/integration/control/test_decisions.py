"""Stage and decide: the first decision in the log ends an update for every target."""

from __future__ import annotations

from typing import Any

import pytest

from moebus.engine.port import EngineRefused
from moebus.engine.simulated import SimulatedEngine
from moebus.schemas.responses import Code, Lifecycle, Phase
from tests.support.control_lab import Lab


@pytest.fixture
def engine(lab: Lab) -> SimulatedEngine:
    engine = lab.engine()
    lab.host(engine)
    lab.ask("pause")
    return engine


def stage(lab: Lab, version: str = "v2", **fields: Any) -> str:
    request_id = lab.send("update_weights", {"version": version, "source": lab.file(version)}, **fields)
    lab.turn()
    return request_id


def test_void(lab: Lab, engine: SimulatedEngine) -> None:
    update = stage(lab)
    lab.decide(update, "void")
    answer = lab.answer(update)
    assert (answer.phase, answer.code, answer.message) == (Phase.DONE, Code.FAILED, "voided")
    assert answer.state is not None
    assert answer.state.lifecycle is Lifecycle.PAUSED
    assert engine.inspect().version == "initial"
    assert lab.ask("resume").code is Code.OK


@pytest.mark.parametrize(("first", "second", "version"), [("commit", "void", "v2"), ("void", "commit", "initial")])
def test_the_first_decision_counts(lab: Lab, engine: SimulatedEngine, first: str, second: str, version: str) -> None:
    update = stage(lab)
    lab.send("decide", {"request_id": update, "decision": first})
    lab.decide(update, second)
    assert len(lab.answers(update)) == 1
    assert engine.inspect().version == version


def test_other_changes_conflict_until_the_decision(lab: Lab, engine: SimulatedEngine) -> None:
    update = stage(lab)
    offset = lab.answer(update).request_offset
    for method, args in (
        ("resume", {}),
        ("sleep", {}),
        ("begin_run", {"run": "r"}),
        ("update_weights", {"version": "v9"}),
    ):
        answer = lab.ask(method, args)
        assert (answer.code, answer.message) == (
            Code.CONFLICT,
            f"the update at offset {offset} is staged and not decided: request {update!r}",
        )
    assert lab.ask("status").code is Code.OK
    assert lab.ask("reset_cache").code is Code.OK
    lab.decide(update)
    assert lab.ask("resume").code is Code.OK


def test_a_decision_is_not_answered_under_its_own_id(lab: Lab, engine: SimulatedEngine) -> None:
    update = stage(lab)
    decision = lab.send("decide", {"request_id": update, "decision": "commit"})
    lab.turn()
    assert lab.answers(decision, phase=None) == []


def test_only_an_update_can_be_committed(lab: Lab, engine: SimulatedEngine) -> None:
    pause = lab.send("pause", id="again")
    lab.turn()
    wrong = lab.ask("decide", {"request_id": pause, "decision": "commit"})
    assert wrong.code is Code.INVALID
    assert "is not an update" in wrong.message


def voids(lab: Lab) -> int:
    """How many voids worker w1 has written."""
    keys = [record.key or b"" for record in lab.records(lab.topics.control_requests)]
    return sum(key.startswith(b"void-w1-") for key in keys)


def test_an_undecided_update_is_voided_by_its_targets_after_the_deadline(lab: Lab, engine: SimulatedEngine) -> None:
    update = stage(lab, deadline_s=100)
    lab.clock.advance(99)
    lab.turn()
    assert lab.answers(update) == []
    lab.clock.advance(6.1)
    lab.turn()
    assert lab.answer(update).message == "voided"
    assert voids(lab) == 1


def test_who_could_not_stage_voids_an_undecided_update_too(lab: Lab, engine: SimulatedEngine) -> None:
    engine.fail_next("stage", EngineRefused("disk read error"))
    update = stage(lab, deadline_s=100)
    assert lab.answer(update).code is Code.FAILED
    lab.clock.advance(99)
    lab.turn()
    assert voids(lab) == 0
    lab.clock.advance(6.1)
    lab.turn()
    assert voids(lab) == 1
    lab.clock.advance(60)
    lab.turn()
    assert voids(lab) == 1


def test_who_could_not_stage_follows_the_commit(lab: Lab, engine: SimulatedEngine) -> None:
    engine.fail_next("stage", EngineRefused("disk read error"))
    update = stage(lab)
    assert lab.answer(update).code is Code.FAILED
    lab.decide(update)
    assert engine.inspect().version == "v2"
    assert len(lab.answers(update)) == 1
    assert lab.ask("resume", expect={"version": "v2"}).code is Code.OK


def test_who_cannot_follow_the_commit_is_behind(lab: Lab, engine: SimulatedEngine) -> None:
    engine.fail_next("stage", EngineRefused("disk read error"), times=2)
    update = stage(lab)
    lab.decide(update)
    refused = lab.ask("resume")
    assert (refused.code, refused.message) == (Code.BEHIND, "the worker is BEHIND: disk read error")
    assert engine.inspect().paused
    member = lab.member()
    assert member is not None
    assert member.state is not None
    assert (member.state.lifecycle, member.state.version, member.reason) == (
        Lifecycle.BEHIND,
        "initial",
        "disk read error",
    )


def test_an_expired_update_is_followed_by_its_commit(lab: Lab, engine: SimulatedEngine) -> None:
    update = lab.send("update_weights", {"version": "v2", "source": lab.file("v2")}, deadline_s=1)
    lab.clock.advance(2)
    lab.turn()
    assert lab.answer(update).code is Code.EXPIRED
    lab.decide(update)
    assert engine.inspect().version == "v2"
    assert [answer.code for answer in lab.answers(update)] == [Code.EXPIRED]


def test_who_refused_the_update_is_not_concerned_by_its_commit(lab: Lab, engine: SimulatedEngine) -> None:
    lab.ask("resume")
    update = stage(lab)
    assert lab.answer(update).code is Code.ILLEGAL_STATE
    lab.decide(update)
    assert engine.inspect().version == "initial"
    assert not engine.inspect().paused


def test_targets_alone_follow(lab: Lab, engine: SimulatedEngine) -> None:
    other = lab.engine()
    lab.host(other, ids=("w2",))
    lab.ask("pause")
    update = stage(lab, target="w2")
    lab.decide(update)
    assert (engine.inspect().version, other.inspect().version) == ("initial", "v2")
