"""SGLangEngine: pause, resume, abort, cache; and what a server can get wrong about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from moebus.engine.port import (
    EngineFailed,
    EngineRefused,
    EngineTimeout,
    EngineUnauthorized,
    EngineUnknown,
    EngineUnreachable,
    Unsupported,
)
from moebus.engine.sglang.engine import SGLangEngine
from moebus.schemas.tags import Tag
from tests.support.deadlines import Always, Left, Polls
from tests.support.stand_ins.running import Running
from tests.support.stand_ins.sglang import StandIn, application
from tests.unit.engine.sglang.rig import Rig, sglang


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with sglang(tmp_path) as made:
        yield made


def test_a_fresh_server(rig: Rig) -> None:
    rig.at.running = ["a", "b"]
    state = rig.engine.inspect()
    assert (state.paused, state.in_flight, state.frozen, state.version) == (False, 2, 0, "default")
    assert state.resident == {Tag.WEIGHT: True, Tag.KV_CACHE: True}
    assert state.bytes_by_tag == {Tag.WEIGHT: 15 << 30, Tag.KV_CACHE: 40 << 30}
    assert rig.engine.trouble is None
    assert rig.at.calls == []


def test_abort_ends_everything_and_stays_closed(rig: Rig) -> None:
    rig.at.running, rig.at.waiting = ["a"], ["b"]
    result = rig.engine.pause("abort", Left())
    assert (result.aborted, result.frozen, result.idle_confirmed) == (2, 0, True)
    assert rig.at.ended == {"a": "abort", "b": "abort"}
    rig.at.arrive("late")
    assert rig.at.held == ["late"]
    assert rig.engine.inspect().paused
    rig.engine.resume()
    assert (rig.at.running, rig.engine.inspect().paused) == (["late"], False)


@pytest.mark.parametrize(("keep", "queue"), [("in_place", "running"), ("retract", "waiting")])
def test_keep_freezes(tmp_path: Path, keep: str, queue: str) -> None:
    with sglang(tmp_path, keep=keep) as rig:  # type: ignore[arg-type]
        rig.at.running = ["a", "b"]
        result = rig.engine.pause("keep", Left())
        assert (result.aborted, result.frozen, result.idle_confirmed) == (0, 2, keep == "retract")
        assert getattr(rig.at, queue) == ["a", "b"]
        assert rig.engine.inspect().frozen == 2
        assert rig.calls("/pause_generation") == [{"mode": keep}]
        rig.engine.resume()
        assert (rig.at.running, rig.engine.inspect().frozen) == (["a", "b"], 0)


def test_frozen_requests_can_be_aborted(rig: Rig) -> None:
    rig.at.running = ["a"]
    rig.engine.pause("keep", Left())
    assert rig.engine.pause("abort", Left()).aborted == 1
    assert rig.at.ended == {"a": "abort"}
    assert rig.engine.inspect().frozen == 0


def test_wait_is_unsupported_and_asks_nothing(rig: Rig) -> None:
    with pytest.raises(Unsupported, match="abort or keep"):
        rig.engine.pause("wait", Left())
    assert "wait" not in rig.engine.capabilities().pause_modes
    assert rig.at.calls == []


def test_several_tokenizer_processes_are_stopped_at_the_scheduler(tmp_path: Path) -> None:
    """sglang#24445: a pause that reaches one of several processes."""
    at = StandIn(tokenizers=3)
    at.faults.pause_reaches_one = True
    with sglang(tmp_path, at) as rig:
        at.running = ["a"]
        assert rig.engine.pause("abort", Left()).idle_confirmed
        at.arrive("b")
        assert at.running == []


def test_a_pause_that_reaches_one_of_several_is_found_out(rig: Rig) -> None:
    """The server does not say how many processes it has; its load does."""
    rig.at.paused = [False, False]
    rig.at.tokenizers = 2
    rig.engine._info = None
    rig.at.faults.pause_reaches_one = True
    rig.at.hides_tokenizers = rig.at.traffic = True
    with pytest.raises(EngineFailed, match="only some of the server's processes"):
        rig.engine.pause("abort", Left())
    assert not any(rig.at.paused)
    assert not rig.engine.inspect().paused


def test_an_endless_pause_ends_at_its_deadline(rig: Rig) -> None:
    """prime-rl#2673: the server never answers; it is closed at the end, and opened again."""
    rig.engine.inspect()
    rig.net.hold.add("/pause_generation")
    with pytest.raises(EngineTimeout, match="open again"):
        rig.engine.pause("abort", Always(0.2))
    assert not any(rig.at.paused)
    rig.net.release()
    assert rig.engine.pause("abort", Left()).idle_confirmed


def test_a_pause_that_does_not_drain_opens_admission_again(rig: Rig) -> None:
    rig.at.running, rig.at.faults.abort_ignored = ["a"], True
    with pytest.raises(EngineTimeout, match="1 requests still run"):
        rig.engine.pause("abort", Polls(8))
    assert (rig.at.paused, rig.at.running) == ([False], ["a"])


def test_a_pause_that_cannot_be_taken_back_is_unknown(rig: Rig) -> None:
    rig.engine.inspect()
    rig.net.hold.add("/pause_generation")
    rig.net.answer["/continue_generation"] = (500, b"{}")
    with pytest.raises(EngineUnknown, match="opening admission again failed"):
        rig.engine.pause("abort", Always(0.1))
    rig.net.release()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cut_connection_is_asked_again(rig: Rig, when: str) -> None:
    rig.at.running = ["a"]
    rig.engine.inspect()
    rig.net.cut["/pause_generation"] = when  # type: ignore[assignment]
    with pytest.raises(EngineTimeout, match="open again"):
        rig.engine.pause("abort", Left())
    assert rig.net.count("/pause_generation") == 2
    assert not any(rig.at.paused)


def test_a_200_with_an_error_is_a_failure(rig: Rig) -> None:
    """AReaL#1590."""
    rig.net.answer["/pause_generation"] = (200, b'{"success": false, "message": "busy"}')
    with pytest.raises(EngineFailed, match="busy"):
        rig.engine.pause("abort", Left())
    assert not rig.engine.inspect().paused


def test_a_passed_deadline_asks_nothing(rig: Rig) -> None:
    rig.engine.inspect()
    with pytest.raises(EngineTimeout):
        rig.engine.pause("abort", Polls(0))
    assert rig.at.calls == []


def test_the_token_is_refused(rig: Rig) -> None:
    rig.engine.inspect()
    rig.net.token = "right"
    with pytest.raises(EngineUnauthorized, match="401"):
        rig.engine.pause("abort", Left())
    with SGLang(rig, "right") as engine:
        assert engine.pause("abort", Left()).idle_confirmed


class SGLang:
    """An engine with a token."""

    def __init__(self, rig: Rig, token: str) -> None:
        self._engine = SGLangEngine.connect(rig.running.url, token=SecretStr(token), home=rig.home)

    def __enter__(self) -> SGLangEngine:
        return self._engine

    def __exit__(self, *_: object) -> None:
        self._engine.close()


def test_abort_by_id_and_all(rig: Rig) -> None:
    rig.at.running = ["a", "b", "c"]
    assert rig.engine.abort_requests(["a"]) == ["a"]
    assert rig.engine.abort_requests(None) == ["?", "?"]
    assert rig.at.ended == dict.fromkeys("abc", "abort")
    assert rig.engine.abort_requests(["a"]) == []


@pytest.mark.parametrize("ids", [[], [""], ["a", ""]])
def test_an_empty_list_is_not_everything(rig: Rig, ids: list[str]) -> None:
    """vllm#51220: an empty list means all in one server and nothing in another. Here it means nothing."""
    rig.at.running = ["a"]
    if ids:
        with pytest.raises(EngineRefused, match="empty id"):
            rig.engine.abort_requests(ids)
    else:
        assert rig.engine.abort_requests(ids) == []
    assert (rig.at.running, rig.calls("/abort_request")) == (["a"], [])


def test_reset_cache(rig: Rig) -> None:
    assert rig.engine.reset_cache() == 0
    assert rig.at.cached == 0


def test_a_refused_flush_is_tried_again_ever_more_slowly(rig: Rig) -> None:
    """miles#1750: 60 tries without a wait were spent in under a second."""
    rig.at.faults.refused_flushes = 7
    rig.engine.reset_cache()
    assert len(rig.calls("/flush_cache")) == 8
    assert rig.rests == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0]


def test_a_flush_that_never_succeeds_fails(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang#33783: what was retracted blocks the flush for ever."""
    rig.at.faults.refused_flushes = -1
    monkeypatch.setattr("moebus.engine.sglang.engine.FLUSH_S", 0.1)
    with pytest.raises(EngineFailed, match="Flush cache failed"):
        rig.engine.reset_cache()


def test_the_cache_of_frozen_requests_stays(rig: Rig) -> None:
    rig.at.running = ["a"]
    rig.engine.pause("keep", Left())
    with pytest.raises(EngineFailed, match="frozen"):
        rig.engine.reset_cache()
    assert rig.calls("/flush_cache") == []


def test_identity_follows_the_server(rig: Rig) -> None:
    first = rig.engine.identity()
    rig.engine.pause("abort", Left())
    rig.at.restart()
    assert rig.engine.identity() != first
    state = rig.engine.inspect()
    assert (state.paused, state.version) == (False, "default")


def test_a_server_that_is_gone(tmp_path: Path) -> None:
    running = Running(application(StandIn()))
    engine = SGLangEngine.connect(running.url, home=tmp_path)
    known = engine.identity()
    running.kill()
    assert engine.identity() == known
    with pytest.raises(EngineUnreachable):
        engine.inspect()
    assert "no connection" in str(engine.trouble)
    assert engine.capabilities().transfer
    engine.close()


def test_a_server_that_never_answered(tmp_path: Path) -> None:
    engine = SGLangEngine.connect("http://127.0.0.1:9", home=tmp_path)
    with pytest.raises(EngineUnreachable):
        engine.identity()
    with pytest.raises(EngineUnreachable):
        engine.pause("abort", Left())
    assert engine.capabilities().tags == frozenset(Tag)
    engine.close()


def test_a_server_that_is_no_sglang(rig: Rig) -> None:
    rig.net.answer["/v1/loads"] = (200, b'{"loads": []}')
    with pytest.raises(EngineFailed, match="load of any scheduler"):
        rig.engine.inspect()
    rig.net.answer["/v1/loads"] = (200, b"[]")
    with pytest.raises(EngineFailed, match="is this an SGLang server"):
        rig.engine.inspect()


def test_a_server_with_the_older_load_figures(rig: Rig) -> None:
    rig.net.answer["/v1/loads"] = (404, b'{"detail": "Not Found"}')
    rig.net.answer["/get_load"] = (200, b'[{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 9}]')
    assert rig.engine.inspect().in_flight == 5
