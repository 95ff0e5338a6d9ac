"""Every log line of an operation carries its request id, the worker and the position in the log."""

from __future__ import annotations

import logging

import pytest

from tests.support.control_lab import Lab


def test_every_line_of_an_operation_names_its_request(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    lab.host(lab.engine())
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="moebus"):
        for request_id, method in (("p-1", "pause"), ("s-1", "sleep"), ("bad", "resume"), ("w-1", "wakeup")):
            lab.ask(method, id=request_id)
    lines = [record.__dict__["fields"] for record in caplog.records if record.__dict__["action"].startswith("control.")]
    assert {line.get("request_id") for line in lines} == {"p-1", "s-1", "bad", "w-1"}
    assert all(line.get("worker_id") == "w1" and line.get("position") for line in lines)
    assert len(lines) >= 8, "each has a line for what it does and one for how it ended"
