"""Outcomes of a fleet as bodies and HTTP numbers."""

from __future__ import annotations

from typing import Any

import pytest

from moebus.producers.control import Outcome, Status
from moebus.producers.gateway.bodies import Body, OutcomeBody, control_body, outcome_body, result_of
from moebus.schemas.responses import Code, ControlResponse, Phase


def answer(worker: str, code: Code = Code.OK, message: str = "", **result: Any) -> ControlResponse:
    return ControlResponse(
        request_id="r", request_digest="d", request_offset=3, worker_id=worker, boot_id="b", phase=Phase.DONE,
        code=code, error_code=code.http, message=message, result=result or None,
    )  # fmt: skip


def outcome(method: str, status: Status, *answers: ControlResponse, missing: tuple[str, ...] = ()) -> Outcome:
    responses = {str(one.worker_id): one for one in answers}
    return Outcome(
        request_id="r", method=method, status=status, position=None, expected=(*responses, *missing), missing=missing,
        responses=responses,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("status", "answers", "missing", "http", "word", "error"),
    [
        ("ok", [answer("a"), answer("b", Code.ALREADY)], (), 200, "success", None),
        ("partial", [answer("a"), answer("b", Code.FAILED)], (), 207, "partial", "partial"),
        ("partial", [answer("a", Code.PARTIAL)], (), 207, "partial", "partial"),
        ("failed", [answer("a", Code.FAILED), answer("b", Code.EXPIRED)], (), 500, "error", "failed"),
        ("timeout", [answer("a")], ("b",), 504, "error", "timeout"),
        ("no_targets", [], (), 404, "error", "no_targets"),
        *(("failed", [answer("a", code), answer("b", code)], (), code.http, "error", str(code))
          for code in Code if not code.good and code is not Code.PARTIAL),
    ],
)  # fmt: skip
def test_status_word_and_error(
    status: Status, answers: list[ControlResponse], missing: tuple[str, ...], http: int, word: str, error: str | None
) -> None:
    found = outcome("pause", status, *answers, missing=missing)
    body = Body.model_validate(control_body(found))
    assert (found.http_status, body.status, body.error) == (http, word, error)
    assert (body.error_message is None) == (error is None)
    assert body.request_id == "r"
    OutcomeBody.model_validate(outcome_body(found))


def test_results_in_fastdeploys_shape() -> None:
    freed = {"weight": {"outcome": "done"}}
    assert result_of(outcome("pause", "ok", answer("a", pause={"aborted": 3}))) is None
    assert result_of(outcome("resume", "ok", answer("a"))) is None
    assert result_of(outcome("sleep", "ok", answer("b", tags=freed), answer("a"))) == [
        {"worker": "a"}, {"worker": "b", "tags": freed},
    ]  # fmt: skip
    assert result_of(outcome("update_weights", "ok", answer("a", version="7"))) == [{"worker": "a", "version": "7"}]


def test_an_aborted_request_is_looked_for_on_every_worker() -> None:
    found = outcome(
        "abort_requests",
        "ok",
        answer("a", aborted=["x"], not_found=["y", "z"]),
        answer("b", aborted=["y"], not_found=["x", "z"]),
    )
    assert result_of(found) == {
        "aborted": [
            {"request_id": "x", "output_token_count": None, "worker": "a"},
            {"request_id": "y", "output_token_count": None, "worker": "b"},
        ],
        "not_found": ["z"],
    }


def test_a_fault_has_no_result() -> None:
    assert control_body(outcome("sleep", "timeout", answer("a", tags={}), missing=("b",)))["result"] is None
