"""Commit or void: what the issuer of an update decides."""

from __future__ import annotations

import pytest

from moebus.producers.control.update import choose
from moebus.schemas.control import make_request
from moebus.schemas.responses import Code, ControlResponse, Phase
from tests.unit.control_client.make import answers, response

UPDATE = make_request("u1", "update_weights", {"version": "v2"})
AB = ("a", "b")


def staged(worker: str, digest: str | None = "d") -> ControlResponse:
    return response(worker, phase=Phase.STAGED, result={} if digest is None else {"weights_digest": digest})


@pytest.mark.parametrize(
    ("given", "late", "verdict", "reason"),
    [
        ((staged("a"), staged("b")), False, "commit", "2 of 2"),
        ((staged("a"), staged("b", None)), False, "commit", "2 of 2"),
        ((staged("a"), response("b", Code.ALREADY)), False, "commit", "2 of 2"),
        ((staged("a"), staged("b", "e")), False, "void", "digests differ: a d, b e"),
        ((staged("a"), response("b", Code.FAILED)), False, "void", "b answered failed"),
        ((response("b", Code.ILLEGAL_STATE),), False, "void", "b answered illegal_state"),
        ((staged("a"),), True, "void", "b has not staged"),
        ((staged("a"), staged("b")), True, "commit", "2 of 2"),
    ],
)
def test_choice(given: tuple[ControlResponse, ...], late: bool, verdict: str, reason: str) -> None:
    choice = choose(answers(AB, *given, request=UPDATE), late)
    assert choice is not None
    assert choice.verdict == verdict
    assert reason in choice.reason


@pytest.mark.parametrize("given", [(), (staged("a"),), (staged("x"), staged("y"))])
def test_open_while_somebody_may_still_stage(given: tuple[ControlResponse, ...]) -> None:
    assert choose(answers(AB, *given, request=UPDATE), late=False) is None


def test_nobody_expected_is_void() -> None:
    choice = choose(answers((), staged("x"), request=UPDATE), late=False)
    assert choice is not None
    assert choice.verdict == "void"


def test_without_a_list_only_time_decides() -> None:
    assert choose(answers(None, staged("x"), request=UPDATE), late=False) is None
    choice = choose(answers(None, staged("x"), request=UPDATE), late=True)
    assert choice is not None
    assert choice.verdict == "void"


def test_a_new_boot_stages_again_and_its_digest_counts() -> None:
    both = answers(AB, staged("a", "old"), staged("b", "new"), staged("a", "new"), request=UPDATE)
    choice = choose(both, late=False)
    assert choice is not None
    assert choice.verdict == "commit"


def test_the_first_decision_behind_the_command_counts() -> None:
    folded = answers(AB, request=UPDATE)
    void = make_request("x", "decide", {"request_id": "u1", "decision": "void"})
    commit = make_request("y", "decide", {"request_id": "u1", "decision": "commit"})
    other = make_request("z", "decide", {"request_id": "u2", "decision": "commit"})
    assert not folded.add_decide(void, 3)  # before the command at offset 10
    assert not folded.add_decide(other, 11)
    assert folded.decision is None
    assert folded.add_decide(commit, 12)
    assert not folded.add_decide(void, 13)
    assert folded.decision == "commit"
