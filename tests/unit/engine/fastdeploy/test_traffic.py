"""FastDeployEngine: pause, resume, abort, identity; and what its server can get wrong about them."""

from __future__ import annotations

import pytest

from moebus.engine.port import (
    EngineFailed,
    EngineRefused,
    EngineTimeout,
    EngineUnauthorized,
    PauseMode,
    Unsupported,
)
from moebus.schemas.tags import Tag
from tests.support.deadlines import Always, Left, Polls
from tests.unit.engine.fastdeploy.rig import Rig


def test_abort_ends_everything_and_stays_closed(rig: Rig) -> None:
    assert rig.ask("a") == 200
    assert rig.engine.pause("abort", Left()).idle_confirmed
    assert rig.at.ended == {"a": "abort"}
    assert rig.ask("b") == 500
    assert rig.engine.inspect().paused
    assert rig.engine.pause("abort", Left()).idle_confirmed
    rig.engine.resume()
    assert not rig.engine.inspect().paused
    assert rig.ask("c") == 200


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_other_modes_are_unsupported(rig: Rig, mode: PauseMode) -> None:
    with pytest.raises(Unsupported, match=mode):
        rig.engine.pause(mode, Left())
    assert rig.engine.capabilities().pause_modes == {"abort"}
    assert rig.at.calls == []


def test_a_pause_that_fails_half_way_is_taken_back_and_done_truly(rig: Rig) -> None:
    """A failed pause leaves its flag set, and the next one would say success without a drain."""
    rig.ask("a")
    rig.at.faults.half_paused = True
    with pytest.raises(EngineFailed, match="may hanged"):
        rig.engine.pause("abort", Left())
    assert (rig.at.paused, rig.at.running) == (False, ["a"])
    rig.at.faults.half_paused = False
    assert rig.engine.pause("abort", Left()).idle_confirmed
    assert rig.at.running == []


def test_a_pause_by_others_is_not_taken_for_a_drain(rig: Rig) -> None:
    rig.ask("a")
    rig.at.paused = True
    assert not rig.engine.pause("abort", Left()).idle_confirmed
    assert rig.at.ended == {"a": "abort"}


def test_an_endless_pause_ends_at_its_deadline(rig: Rig) -> None:
    rig.engine.inspect()
    rig.net.hold.add("/v1/pause")
    with pytest.raises(EngineTimeout, match="open again"):
        rig.engine.pause("abort", Always(0.2))
    assert not rig.at.paused


def test_a_cut_pause_is_asked_for_again(rig: Rig) -> None:
    rig.net.cut["/v1/pause"] = "before"
    with pytest.raises(EngineTimeout):
        rig.engine.pause("abort", Left())
    assert rig.net.count("/v1/pause") == 2


@pytest.mark.parametrize("path", ["/v1/pause", "/v1/resume"])
def test_a_200_with_an_error_is_a_failure(rig: Rig, path: str) -> None:
    rig.net.answer[path] = (200, b'{"status": "error", "error_message": "busy", "request_id": "control-1"}')
    with pytest.raises(EngineFailed, match="in an answer with number 200"):
        rig.engine.pause("abort", Left()) if path == "/v1/pause" else rig.engine.resume()


def test_success_is_read_back(rig: Rig) -> None:
    rig.net.answer["/v1/pause"] = (200, b'{"status": "success", "result": null}')
    with pytest.raises(EngineFailed, match="not paused"):
        rig.engine.pause("abort", Left())
    rig.at.paused = True
    rig.net.answer["/v1/resume"] = (200, b'{"status": "success", "result": null}')
    with pytest.raises(EngineFailed, match="says success and that it is paused"):
        rig.engine.resume()


def test_a_passed_deadline_asks_nothing(rig: Rig) -> None:
    for late in (
        lambda: rig.engine.pause("abort", Polls(0)),
        lambda: rig.engine.sleep(Tag.WEIGHT, "discard", Polls(0)),
        lambda: rig.engine.wakeup(Tag.WEIGHT, "restore", Polls(0)),
        lambda: rig.engine.stage("v", None, None, Polls(0)),
    ):
        with pytest.raises(EngineTimeout):
            late()
    assert rig.at.calls == []


def test_the_token_is_refused(rig: Rig) -> None:
    rig.net.token = "right"
    with pytest.raises(EngineUnauthorized):
        rig.engine.pause("abort", Left())


def test_aborts(rig: Rig) -> None:
    for name in "abc":
        rig.ask(name)
    assert rig.engine.abort_requests([]) == []
    assert rig.at.running == ["a", "b", "c"]
    with pytest.raises(EngineRefused, match="empty id"):
        rig.engine.abort_requests([""])
    assert rig.engine.abort_requests(["a", "z"]) == ["a"]
    assert rig.engine.abort_requests(None) == ["b", "c"]
    assert rig.calls("abort_requests") == [{"req_ids": ["a", "z"]}, {"abort_all": True}]


def test_aborts_of_a_server_that_does_not_tell(rig: Rig) -> None:
    """FastDeploy#7615: it answers before it has aborted."""
    rig.net.answer["/v1/abort_requests"] = (200, b'{"status": "success", "result": null}')
    assert rig.engine.abort_requests(["a"]) == ["a"]
    assert rig.engine.abort_requests(None) == []


def test_reset_cache(rig: Rig) -> None:
    with pytest.raises(Unsupported, match="pause it"):
        rig.engine.reset_cache()
    rig.engine.pause("abort", Left())
    assert rig.engine.reset_cache() == 0
