"""The status table of design section 3.5."""

from __future__ import annotations

import pickle

import pytest

from moebus.producers.control.errors import FleetError, FleetPartial, FleetTimeout, fleet_error
from moebus.producers.control.outcome import outcome_of
from moebus.schemas.errors import InvalidInput
from moebus.schemas.responses import Code, Phase, expected_response
from tests.unit.control_client.make import POSITION, REQUEST, answers, response

AB = ("a", "b")


@pytest.mark.parametrize(
    ("codes", "min_ok", "status", "http", "exit_code"),
    [
        ({"a": Code.OK, "b": Code.ALREADY}, None, "ok", 200, 0),
        ({"a": Code.OK, "b": Code.FAILED}, None, "partial", 207, 3),
        ({"a": Code.PARTIAL, "b": Code.FAILED}, None, "partial", 207, 3),
        ({"a": Code.PARTIAL, "b": Code.PARTIAL}, None, "partial", 207, 3),
        ({"a": Code.OK, "b": Code.PARTIAL}, None, "partial", 207, 3),
        ({"a": Code.CONFLICT, "b": Code.CONFLICT}, None, "failed", 409, 1),
        ({"a": Code.CONFLICT, "b": Code.ILLEGAL_STATE}, None, "failed", 500, 1),
        ({"a": Code.TIMEOUT, "b": Code.TIMEOUT}, None, "failed", 504, 1),
        ({"a": Code.UNKNOWN, "b": Code.UNKNOWN}, None, "failed", 502, 1),
        ({"a": Code.OK}, None, "timeout", 504, 4),
        ({"a": Code.FAILED}, None, "timeout", 504, 4),
        ({}, None, "timeout", 504, 4),
        ({"a": Code.OK}, 1, "ok", 200, 0),
        ({"a": Code.OK, "b": Code.FAILED}, 1, "ok", 200, 0),
        ({"a": Code.OK, "b": Code.FAILED}, 2, "partial", 207, 3),
        ({"a": Code.FAILED}, 1, "timeout", 504, 4),
        ({"a": Code.OK, "b": Code.OK}, 5, "ok", 200, 0),
    ],
)
def test_status(codes: dict[str, Code], min_ok: int | None, status: str, http: int, exit_code: int) -> None:
    outcome = outcome_of(answers(AB, *(response(w, c) for w, c in codes.items())), min_ok)
    assert (outcome.status, outcome.http_status, outcome.exit_code) == (status, http, exit_code)
    assert outcome.missing == tuple(w for w in AB if w not in codes)
    assert outcome.ok == (status == "ok")


def test_nobody_matched() -> None:
    outcome = outcome_of(answers((), response("late")))
    assert (outcome.status, outcome.http_status, outcome.exit_code) == ("no_targets", 404, 1)
    assert list(outcome.others) == ["late"]


def test_other_answers_are_listed_and_not_counted() -> None:
    outcome = outcome_of(answers(("a",), response("a"), response("x", Code.FAILED)))
    assert outcome.status == "ok"
    assert list(outcome.responses) == ["a"]
    assert outcome.others["x"].code is Code.FAILED


def test_only_the_own_digest_counts() -> None:
    folded = answers(("a",))
    assert not folded.add(response("a", request_digest="0" * 64), (0, 1))
    assert outcome_of(folded).missing == ("a",)
    assert [placed.response.worker_id for placed in folded.foreign] == ["a"]


def test_the_first_done_in_log_order_counts_whatever_arrives_first() -> None:
    folded = answers(("a",))
    folded.add(response("a", Code.FAILED), (0, 9))
    folded.add(response("a", Code.OK), (0, 5))
    folded.add(response("a", Code.CONFLICT), (0, 7))
    assert outcome_of(folded).responses["a"].code is Code.OK


def test_the_first_expected_list_in_the_log_counts() -> None:
    folded = answers(None)
    folded.provisional = ("z",)
    assert outcome_of(folded).missing == ("z",)
    folded.add(expected_response("r1", REQUEST.digest, POSITION.offset, ("b",)), (0, 4))
    folded.add(expected_response("r1", REQUEST.digest, POSITION.offset, ("a",)), (0, 3))
    assert outcome_of(folded).expected == ("a",)


def test_the_same_record_twice_counts_once() -> None:
    folded = answers(("a",))
    assert folded.add(response("a"), (0, 1))
    assert not folded.add(response("a"), (0, 1))
    assert len(folded.events) == 2


def test_a_bare_command_counts_whom_it_heard_of() -> None:
    outcome = outcome_of(answers(None, response("a"), response("b", phase=Phase.ACCEPTED)))
    assert outcome.expected is None
    assert outcome.status == "timeout"
    assert outcome.missing == ("b",)
    assert outcome_of(answers(None, response("a"))).status == "ok"
    assert outcome_of(answers(None)).status == "timeout"


@pytest.mark.parametrize("min_ok", [0, -1])
def test_min_ok_below_one_is_refused(min_ok: int) -> None:
    with pytest.raises(InvalidInput, match="min_ok"):
        outcome_of(answers(AB), min_ok)


def test_errors_name_the_worker_and_survive_pickling() -> None:
    timeout = fleet_error(outcome_of(answers(AB, response("a"))))
    partial = fleet_error(outcome_of(answers(AB, response("a"), response("b", Code.FAILED, message="no memory"))))
    failed = fleet_error(outcome_of(answers(("b",), response("b", Code.CONFLICT))))
    nobody = fleet_error(outcome_of(answers(())))
    assert isinstance(timeout, FleetTimeout)
    assert isinstance(partial, FleetPartial)
    assert [e.exit_code for e in (timeout, partial, failed, nobody)] == [4, 3, 1, 1]
    assert [e.http_status for e in (timeout, partial, failed, nobody)] == [504, 207, 409, 404]
    assert "no answer in time from b" in str(timeout)
    assert "b answered failed: no memory" in str(partial)
    assert "no live worker matches" in str(nobody)
    again = pickle.loads(pickle.dumps(partial))
    assert isinstance(again, FleetError)
    assert again.outcome == partial.outcome


def test_the_reason_of_a_voided_update_is_the_worker_that_refused() -> None:
    both = answers(AB, response("a", Code.FAILED, message="voided"), response("b", Code.INVALID, message="bad file"))
    assert "b answered invalid (and 1 more): bad file" in outcome_of(both).sentence()


def test_json_names_everything() -> None:
    shown = outcome_of(answers(AB, response("a", result={"freed": 1}))).as_dict()
    assert shown["status"] == "timeout"
    assert shown["position"] == "t.control.requests.v1/0/10"
    assert shown["missing"] == ["b"]
    assert shown["responses"]["a"]["result"] == {"freed": 1}
