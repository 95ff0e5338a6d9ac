"""Admission, apart from what the contract suite shows through whole engines."""

from __future__ import annotations

import pytest

from moebus.engine.admission import Admission
from moebus.engine.port import EngineClosed, EngineTimeout
from tests.support.deadlines import Polls


def test_leaving_twice_counts_once() -> None:
    admission = Admission()
    ticket = admission.enter("a")
    admission.leave(ticket, aborted=False)
    again = admission.enter("a")
    admission.leave(ticket, aborted=False)
    assert admission.in_flight == 1
    admission.leave(again, aborted=True)
    assert admission.in_flight == 0


def test_an_abort_by_ticket_leaves_a_newer_request_of_the_id_alone() -> None:
    admission = Admission()
    old = admission.enter("a")
    admission.leave(old, aborted=False)
    new = admission.enter("a")
    admission.abort_ticket(old)
    assert not new.aborted


def test_a_pause_in_vain_names_who_ran_and_keeps_a_paused_engine_paused() -> None:
    admission = Admission()
    admission.pause("keep", Polls(1))
    admission.frozen = False
    admission.closed = False
    for name in "abcd":
        admission.enter(name)
    with pytest.raises(EngineTimeout, match=r"4 requests .*\(a, b, c, \.\.\.\)"):
        admission.pause("wait", Polls(0))
    assert not admission.closed
    admission.closed = True
    with pytest.raises(EngineTimeout):
        admission.pause("abort", Polls(0))
    assert admission.closed


def test_frozen_requests_stay_frozen_when_waiting_for_them_is_in_vain() -> None:
    admission = Admission()
    admission.enter("a").parked = True
    assert admission.pause("keep", Polls(1)).frozen == 1
    with pytest.raises(EngineTimeout):
        admission.pause("wait", Polls(0))
    assert admission.frozen
    assert admission.frozen_count == 1


def test_an_abort_is_reported_once() -> None:
    admission = Admission()
    admission.enter("a")
    admission.enter("b")
    assert admission.abort(["b", "b", "x"]) == ["b"]
    assert admission.abort(None) == ["a"]
    assert admission.abort(None) == []


def test_nothing_enters_after_the_end_also_after_a_resume() -> None:
    admission = Admission()
    admission.shut_down()
    admission.resume()
    with pytest.raises(EngineClosed, match="shut down"):
        admission.enter("a")
