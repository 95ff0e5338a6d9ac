"""When an update of weights is committed and when it is given up (design section 3.4). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from moebus.producers.control.answers import Answers
from moebus.schemas.control_args import Verdict
from moebus.schemas.responses import ControlResponse


@dataclass(frozen=True, slots=True)
class Choice:
    """What the issuer should write, and why."""

    verdict: Verdict
    reason: str


def choose(answers: Answers, late: bool) -> Choice | None:
    """The decision for an update, None while the answers leave it open. `late`: its deadline has passed.

    Commit needs `staged` (or a good final answer) of every expected worker, and equal weights digests among those that
    report one. Nobody expected: void, so that a worker that nobody counted on does not wait.
    """
    expected = answers.expected
    if expected is None:
        return Choice("void", "nobody knows who should have staged") if late else None
    if not expected:
        return Choice("void", "no worker was expected")
    waiting = []
    for worker in expected:
        done = answers.done.get(worker)
        if done is not None and not done.response.code.good:
            return Choice("void", f"{worker} answered {done.response.code}")
        if done is None and worker not in answers.staged:
            waiting.append(worker)
    if waiting:
        return Choice("void", f"{waiting[0]} has not staged in time") if late else None
    digests = _digests(answers, expected)
    if len(set(digests.values())) > 1:
        pairs = ", ".join(f"{worker} {digest}" for worker, digest in sorted(digests.items()))
        return Choice("void", f"the weights digests differ: {pairs}")
    return Choice("commit", f"{len(expected)} of {len(expected)} workers staged")


def _digests(answers: Answers, expected: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for worker in expected:
        placed = answers.done.get(worker) or answers.staged.get(worker)
        digest = _digest(placed.response) if placed is not None else None
        if digest is not None:
            found[worker] = digest
    return found


def _digest(response: ControlResponse) -> str | None:
    value = (response.result or {}).get("weights_digest")
    return value if isinstance(value, str) else None
