"""Bodies of the gateway's answers, and outcomes of a fleet in FastDeploy's shape. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, JsonValue

from moebus.producers.control import Outcome
from moebus.schemas.control_args import Method


class Body(BaseModel):
    """What FastDeploy's paths and all errors answer with."""

    status: Literal["success", "partial", "error"] = Field(
        description="success: done everywhere; partial: somewhere; error: see error and error_message"
    )
    request_id: str | None = Field(None, description="The identity of the command in the log")
    result: JsonValue = Field(None, description="As FastDeploy's; one entry a worker where FastDeploy has one a rank")
    error: str | None = Field(None, description="A short, stable name, such as illegal_state, timeout or InvalidInput")
    error_message: str | None = Field(None, description="One sentence")
    outcome: dict[str, JsonValue] | None = Field(None, description="The answers of all workers")


class LegacyBody(Body):
    """FastDeploy's legacy paths say it in `msg`."""

    msg: str


class Accepted(BaseModel):
    """A command that is in the log."""

    request_id: str
    status: Literal["accepted"] = "accepted"
    position: str = Field(description="topic/partition/offset of the command")
    appended_ms: int = Field(description="Append time by the broker, Unix milliseconds")


class OutcomeBody(BaseModel):
    """The outcome of a command as its answers stand. While `complete` is false, answers may still come."""

    request_id: str
    method: str
    status: Literal["ok", "partial", "failed", "timeout", "no_targets"]
    complete: bool
    http_status: int
    position: str | None
    appended_ms: int | None
    decision: str | None
    expected: list[str] | None
    missing: list[str]
    responses: dict[str, JsonValue]
    others: dict[str, JsonValue]


class Workers(BaseModel):
    """Every worker of the members topic that has not left."""

    workers: list[dict[str, JsonValue]]


class History(BaseModel):
    """The last commands, oldest first."""

    operations: list[dict[str, JsonValue]]


def error_body(name: str, message: str, request_id: str | None = None) -> dict[str, Any]:
    """A JSON object of shape `Body`."""
    return Body(status="error", error=name, error_message=message, request_id=request_id).model_dump(mode="json")


def outcome_body(outcome: Outcome) -> dict[str, Any]:
    """A JSON object of shape `OutcomeBody`."""
    return {**outcome.as_dict(), "complete": outcome.complete, "http_status": outcome.http_status}


def control_body(outcome: Outcome) -> dict[str, Any]:
    """A JSON object of shape `Body`: FastDeploy's fields, and the outcome of the fleet."""
    good = outcome.ok
    return {
        "status": "success" if good else "partial" if outcome.status == "partial" else "error",
        "request_id": outcome.request_id,
        "result": result_of(outcome) if good or outcome.status == "partial" else None,
        "error": None if good else error_name(outcome),
        "error_message": None if good else outcome.sentence(),
        "outcome": outcome_body(outcome),
    }


def error_name(outcome: Outcome) -> str:
    """The code that all workers share, else the status."""
    codes = {str(response.code) for response in outcome.responses.values()}
    return next(iter(codes)) if outcome.status == "failed" and len(codes) == 1 else outcome.status


def result_of(outcome: Outcome) -> Any:
    """FastDeploy's `result`: null for pause and resume, a list for sleep, wakeup and update_weights, ids for abort."""
    if outcome.method in (Method.PAUSE, Method.RESUME):
        return None
    results = {worker: response.result or {} for worker, response in sorted(outcome.responses.items())}
    if outcome.method == Method.ABORT_REQUESTS:
        return _aborted(results)
    return [{"worker": worker, **result} for worker, result in results.items()]


def _aborted(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`output_token_count` is null: workers do not report it. `not_found`: ids that no worker knew."""
    found = [
        {"request_id": name, "output_token_count": None, "worker": worker}
        for worker, result in results.items()
        for name in result.get("aborted") or ()
    ]
    missing = [set(result.get("not_found") or ()) for result in results.values()]
    everywhere = set.intersection(*missing) if missing else set()
    return {"aborted": found, "not_found": sorted(everywhere)}
