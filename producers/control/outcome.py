"""The outcome of a command over its workers (design section 3.5), computed from its answers alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moebus.broker.ports import Position
from moebus.producers.control.answers import Answers
from moebus.schemas.control_args import Verdict
from moebus.schemas.errors import InvalidInput
from moebus.schemas.responses import Code, ControlResponse

Status = Literal["ok", "partial", "failed", "timeout", "no_targets"]
EXIT_CODES: dict[Status, int] = {"ok": 0, "partial": 3, "failed": 1, "timeout": 4, "no_targets": 1}
_HTTP: dict[Status, int] = {"ok": 200, "partial": 207, "failed": 500, "timeout": 504, "no_targets": 404}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one command.

    `responses`: the first `done` of each worker that counts, by worker id; `others`: of workers that were not expected;
    `staged`: what workers of an update staged. `expected` None: the log has no list of the workers meant, those heard
    of count instead. `missing`: who has not answered. `decision`: of an update, or `void` of a command given up.
    """

    request_id: str
    method: str
    status: Status
    position: Position | None
    expected: tuple[str, ...] | None
    missing: tuple[str, ...]
    responses: Mapping[str, ControlResponse]
    others: Mapping[str, ControlResponse] = field(default_factory=dict)
    staged: Mapping[str, ControlResponse] = field(default_factory=dict)
    decision: Verdict | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def complete(self) -> bool:
        """Whether the status cannot change any more. `timeout` may: answers can still arrive."""
        return self.status != "timeout"

    @property
    def result(self) -> dict[str, Mapping[str, Any]]:
        """The `result` of every worker that gave one."""
        return {worker: r.result for worker, r in self.responses.items() if r.result is not None}

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    @property
    def http_status(self) -> int:
        """207, 404, ...; for `failed` the number of the code that all share, else 500."""
        numbers = {(r.code, r.error_code) for r in self.responses.values()}
        if self.status == "failed" and len(numbers) == 1:
            return next(iter(numbers))[1]
        return _HTTP[self.status]

    def as_dict(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "request_id": self.request_id,
            "method": self.method,
            "status": self.status,
            "position": None if self.position is None else position_text(self.position),
            "appended_ms": None if self.position is None else self.position.timestamp_ms,
            "decision": self.decision,
            "expected": None if self.expected is None else list(self.expected),
            "missing": list(self.missing),
            "responses": {w: r.model_dump(mode="json", exclude_none=True) for w, r in self.responses.items()},
            "others": {w: r.model_dump(mode="json", exclude_none=True) for w, r in self.others.items()},
        }

    def sentence(self) -> str:
        """What happened, in one sentence that names the workers concerned."""
        head = f"{self.method} {self.request_id}"
        if self.status == "no_targets":
            return f"{head}: no live worker matches the target"
        if self.ok:
            good = sum(r.code.good for r in self.responses.values())
            return f"{head}: {good} of {len(self.responses) + len(self.missing)} workers done"
        if self.missing:
            return f"{head}: no answer in time from {_names(self.missing)}; what they did is unknown"
        if self.status == "timeout":
            return f"{head}: nobody has answered"
        bad = [(w, r) for w, r in self.responses.items() if not r.code.good]
        # A worker that was only told to drop what it staged is not the reason.
        causes = [(w, r) for w, r in bad if r.message != "voided"] or bad
        worker, response = causes[0]
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        return f"{head}: {worker} answered {response.code}{more}{': ' if response.message else ''}{response.message}"


def _names(workers: tuple[str, ...]) -> str:
    shown = ", ".join(workers[:10])
    return shown if len(workers) <= 10 else f"{shown} and {len(workers) - 10} more"


def position_text(position: Position) -> str:
    """`topic/partition/offset`."""
    return f"{position.topic}/{position.partition}/{position.offset}"


def outcome_of(answers: Answers, min_ok: int | None = None) -> Outcome:
    """The outcome as the answers stand. `min_ok`: how many good answers are enough (default: all expected).

    Raises:
        InvalidInput: `min_ok` below 1.
    """
    if min_ok is not None and min_ok < 1:
        raise InvalidInput("min_ok", f"at least 1 is needed, not {min_ok}")
    counted = answers.counted
    done = {worker: placed.response for worker, placed in sorted(answers.done.items())}
    responses = {worker: r for worker, r in done.items() if worker in counted}
    missing = tuple(worker for worker in counted if worker not in done)
    return Outcome(
        request_id=answers.request.request_id,
        method=str(answers.request.method),
        status=_status(answers.expected, responses, missing, min_ok),
        position=answers.position,
        expected=answers.expected,
        missing=missing,
        responses=responses,
        others={worker: r for worker, r in done.items() if worker not in counted},
        staged={worker: placed.response for worker, placed in sorted(answers.staged.items())},
        decision=answers.decision,
    )


def _status(
    expected: tuple[str, ...] | None,
    responses: Mapping[str, ControlResponse],
    missing: tuple[str, ...],
    min_ok: int | None,
) -> Status:
    if expected == ():
        return "no_targets"
    good = sum(r.code.good for r in responses.values())
    if min_ok is not None and good >= min_ok:
        return "ok"
    if missing or not responses:
        return "timeout"
    if good == len(responses):
        return "ok"
    if good or any(r.code is Code.PARTIAL for r in responses.values()):
        return "partial"
    return "failed"
