"""The caller's side of requests: entering the engine together, and waiting for all."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many

from moebus.engine.admission import Admission
from moebus.engine.paddle.sequence import Sequence
from moebus.engine.port import EngineTimeout, Generation, Prompt


def enter_all(admission: Admission, prompts: Many[Prompt], eos: Many[int]) -> list[Sequence]:
    """All of them inside, or none. The first one of equal prompts leads the others.

    Raises:
        EngineClosed, InvalidInput: as `Admission.enter`.
    """
    entered: list[Sequence] = []
    leaders: dict[bytes, Sequence] = {}
    try:
        for prompt in prompts:
            entered.append(Sequence.of(prompt, admission.enter(prompt.request_id), eos))
            leader = leaders.setdefault(prompt.token_ids.tobytes(), entered[-1])
            entered[-1].leader = leader if leader is not entered[-1] else None
    except BaseException:
        for sequence in entered:
            admission.leave(sequence.ticket, aborted=True)
        raise
    return entered


def wait_all(admission: Admission, sequences: Many[Sequence], timeout: float) -> list[Generation]:
    """The results. Raises the first failure once all have ended; EngineTimeout after `timeout` seconds, which aborts
    those that still run."""
    until = time.monotonic() + timeout
    for sequence in sequences:
        if not sequence.done.wait(max(until - time.monotonic(), 0)):
            for other in sequences:
                admission.abort_ticket(other.ticket)
            raise EngineTimeout(f"the request was aborted: it had not finished after {timeout:g} s")
    results: list[Generation] = []
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
        assert sequence.result is not None
        results.append(sequence.result)
    return results
