"""One effect per request: repeats join, another request under the same id is a conflict."""

from __future__ import annotations

from typing import Any

import pytest

from moebus.schemas.responses import Code, Phase
from tests.support.control_lab import Lab
from tests.support.gate import Gate


def test_a_repeat_is_answered_again_and_done_once(lab: Lab) -> None:
    gate = Gate()
    lab.host(lab.engine(gate=gate))
    lab.ask("pause", id="p")
    for _ in range(9):
        lab.send("pause", id="p")
    lab.turn()
    answers = lab.answers("p")
    assert len(answers) == 10
    assert len(set(map(str, answers))) == 1
    assert [name for name, _ in gate.calls].count("pause") == 1


def test_a_repeat_after_a_restart_is_answered_from_the_log(lab: Lab) -> None:
    engine = lab.engine()
    first = lab.host(engine)
    answer = lab.ask("pause", id="p")
    lab.ask("resume")
    lab.crash(first)
    lab.silence()
    lab.host(engine)
    lab.send("pause", id="p")
    lab.turn()
    assert lab.answers("p") == [answer, answer]
    assert not engine.inspect().paused


def test_a_new_worker_says_nothing_about_what_it_never_did(lab: Lab) -> None:
    first = lab.host(lab.engine())
    lab.ask("status", id="s")
    lab.ask("pause", id="p")
    lab.host(lab.engine(), ids=("w2",))
    lab.send("pause", id="p")
    lab.turn()
    assert {answer.worker_id for answer in lab.answers("p")} == {"w1"}
    first.close()
    lab.hosts.remove(first)


@pytest.mark.parametrize("fields", [{"args": {}}, {"args": {"mode": "keep"}}, {"target": "w1"}])
def test_same_id_other_request_is_a_conflict(lab: Lab, fields: dict[str, Any]) -> None:
    lab.host(lab.engine())
    first = lab.ask("pause", id="p")
    lab.send("pause", id="p", **fields)
    lab.turn()
    again = lab.answers("p")[1]
    assert (again.code, again.error_code) == (Code.CONFLICT, 409)
    assert again.request_digest != first.request_digest
    assert again.message == f"this id belongs to another request at offset {first.request_offset}; use a new id"


def test_the_identity_holds_before_the_target_filter(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    lab.send("pause", id="p", target="w9")
    assert lab.ask("pause", id="p", target="w1").code is Code.CONFLICT
    assert not engine.inspect().paused


def test_deadline_issuer_and_run_are_no_part_of_the_identity(lab: Lab) -> None:
    lab.host(lab.engine())
    first = lab.ask("pause", id="p", deadline_s=30, issuer="a")
    lab.send("pause", id="p", deadline_s=40, issuer="b")
    lab.turn()
    assert lab.answers("p") == [first, first]


def test_a_repeat_of_a_staged_update_gets_the_vote_again(lab: Lab) -> None:
    lab.host(lab.engine())
    lab.ask("pause")
    args = {"version": "v2", "source": lab.file("v2")}
    staged = lab.ask("update_weights", args, id="up")
    lab.send("update_weights", args, id="up")
    lab.turn()
    assert lab.answers("up", phase=Phase.STAGED) == [staged, staged]
    lab.decide("up")
    assert [answer.code for answer in lab.answers("up")] == [Code.OK]


def test_expect_after_names_the_winner(lab: Lab) -> None:
    lab.host(lab.engine())
    base = lab.ask("pause").request_offset
    won = lab.ask("sleep", expect={"after": base}, id="winner")
    assert won.code is Code.OK
    lost = lab.ask("wakeup", expect={"after": base})
    assert lost.code is Code.CONFLICT
    assert lost.message == f"expect.after={base}: request 'winner' at offset {won.request_offset} came first"
    assert lab.ask("wakeup", expect={"after": won.request_offset}).code is Code.OK, "the loser changed nothing"
    assert lab.ask("status", expect={"after": lost.request_offset}).code is Code.OK


def test_expect_after_looks_at_changes_of_this_worker_alone(lab: Lab) -> None:
    lab.host(lab.engine(), labels={"role": "rollout"})
    base = lab.ask("pause").request_offset
    lab.ask("status")
    for other in ("w9", ["w8", "w9"], "role=eval"):
        lab.send("sleep", target=other)
    lab.send_raw(b'{"request_id": "bad", "method": "sleep", "args": {"tags": "gpu"}}')
    assert lab.ask("resume", expect={"after": base}).code is Code.OK


def test_expect_version(lab: Lab) -> None:
    lab.host(lab.engine("v1"))
    lab.ask("pause")
    wrong = lab.ask("resume", expect={"version": "v2"})
    assert (wrong.code, wrong.message) == (Code.CONFLICT, "expect.version='v2': the weights are 'v1'")
    assert lab.ask("resume", expect={"version": "v1"}).code is Code.OK


def test_a_command_after_its_deadline_has_no_effect(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    request_id = lab.send("pause", deadline_s=5)
    lab.clock.advance(5.5)
    lab.turn()
    late = lab.answer(request_id)
    assert (late.code, late.error_code, late.message) == (Code.EXPIRED, 408, "read 0.5 s after its deadline")
    assert not engine.inspect().paused
    assert lab.ask("begin_run", {"run": "r"}, deadline_s=0.001).code is Code.OK, "it has no deadline"


def test_a_command_voided_before_it_began_is_not_executed(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    request_id = lab.send("pause")
    lab.send("decide", {"request_id": request_id, "decision": "void"})
    lab.turn()
    assert lab.answer(request_id).message == "voided by its issuer before it began"
    assert not engine.inspect().paused


def test_hello_is_not_answered(lab: Lab) -> None:
    lab.host(lab.engine())
    hellos = [record.key for record in lab.records(lab.topics.control_requests) if b'"hello"' in (record.value or b"")]
    assert len(hellos) == 1
    assert lab.records(lab.topics.control_responses) == []
