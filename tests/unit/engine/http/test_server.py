"""What a failed call to a server means."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from moebus.engine.http import EngineServer, Lives, read_token, resolved
from moebus.engine.http.answers import failed, words
from moebus.engine.http.server import MAX_ANSWER_BYTES
from moebus.engine.port import (
    EngineFailed,
    EngineRefused,
    EngineTimeout,
    EngineUnauthorized,
    EngineUnknown,
    EngineUnreachable,
    Unsupported,
)
from moebus.schemas.errors import InvalidInput, MoebusError, SettingsError
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.stand_ins.running import Running
from tests.support.wait import wait_until


def answering(status: int, body: bytes = b"{}") -> EngineServer:
    return EngineServer("http://engine", transport=httpx.MockTransport(lambda _: httpx.Response(status, content=body)))


@pytest.fixture
def running() -> Iterator[Running]:
    app = FastAPI()
    done: list[str] = []

    @app.post("/do")
    def do() -> dict[str, str]:
        done.append("it")
        return {"status": "done"}

    @app.get("/done")
    def how_many() -> dict[str, int]:
        return {"count": len(done)}

    server = Running(app)
    yield server
    server.leave()


@pytest.mark.parametrize(
    ("status", "body", "error", "text"),
    [
        (401, b"{}", EngineUnauthorized, "token"),
        (403, b"", EngineUnauthorized, "token"),
        (404, b'{"detail": "Not Found"}', Unsupported, "no such call"),
        (405, b"", Unsupported, "no such call"),
        (501, b"", Unsupported, "no such call"),
        (400, b'{"error": "bad mode"}', EngineRefused, "bad mode"),
        (409, b'{"detail": "busy"}', EngineRefused, "busy"),
        (422, b'{"detail": [{"loc": ["query", "mode"]}]}', EngineRefused, "mode"),
        (500, b"Internal Server Error", EngineFailed, "Internal Server Error"),
        (503, b'{"error": {"message": "engine dead"}}', EngineFailed, "engine dead"),
        (302, b"", EngineFailed, "302"),
        (200, b'{"status": "error", "message": "no memory"}', EngineFailed, "no memory"),
        (200, b'{"success": false, "message": "busy"}', EngineFailed, "busy"),
        (200, b'{"error": "x"}', EngineFailed, "x"),
        (200, b'{"object": "error", "message": "y"}', EngineFailed, "y"),
        (200, b'{"error_code": 500, "msg": "rank 1 failed"}', EngineFailed, "rank 1 failed"),
    ],
)
def test_what_an_answer_means(status: int, body: bytes, error: type[MoebusError], text: str) -> None:
    server = answering(status, body)
    with pytest.raises(error, match=text) as caught:
        server.call("POST", "/x", Left())
    assert type(caught.value) is error
    assert server.trouble is None, "it answered"


@pytest.mark.parametrize(
    "body", [b"", b"ok", b"null", b"[1]", b'{"status": "paused"}', b'{"error_code": 200, "error_msg": "", "code": 0}']
)
def test_what_is_no_failure(body: bytes) -> None:
    assert answering(200, body).call("POST", "/x", Left()).status == 200


def test_a_missing_call_names_what_the_server_needs() -> None:
    with pytest.raises(Unsupported, match="start it with VLLM_SERVER_DEV_MODE=1"):
        answering(404).call("POST", "/sleep", Left(), needs="VLLM_SERVER_DEV_MODE=1")


def test_a_passed_deadline_sends_nothing() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise AssertionError("it was sent")

    with pytest.raises(EngineTimeout, match="nothing was done"):
        EngineServer("http://engine", transport=httpx.MockTransport(refuse)).call("POST", "/x", Left(-1))


def test_an_endless_answer_is_cut() -> None:
    with pytest.raises(EngineUnknown, match="bytes"):
        answering(200, b"x" * (MAX_ANSWER_BYTES + 1)).call("GET", "/x", Left())


def test_the_token_is_sent_and_never_told(running: Running) -> None:
    running.faults.token = "s3cret-token"
    with pytest.raises(EngineUnauthorized) as caught:
        EngineServer(running.url, SecretStr("wr0ng-token")).call("POST", "/do", Left())
    assert "wr0ng" not in str(caught.value)
    server = EngineServer(running.url, SecretStr("s3cret-token"))
    assert server.call("POST", "/do", Left()).field("status") == "done"
    assert "s3cret" not in repr(vars(server))


def test_no_connection_means_nothing_was_done(running: Running) -> None:
    server = EngineServer(running.url)
    assert server.trouble == "not reached yet"
    running.kill()
    with pytest.raises(EngineUnreachable, match=running.url):
        server.call("POST", "/do", Left())
    assert "takes no connection" in (server.trouble or "")
    assert server.losses == 0, "it had never answered"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cut_connection_is_unknown(running: Running, when: str) -> None:
    server = EngineServer(running.url)
    running.faults.cut["/do"] = when  # type: ignore[assignment]
    with pytest.raises(EngineUnknown, match="may have been done") as caught:
        server.call("POST", "/do", Left())
    assert not caught.value.late
    assert server.losses == 1
    assert server.look("/done", 30.0).field("count") == (when == "after")


def test_a_late_answer_is_unknown_and_no_lost_connection(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EngineServer(running.url)
    running.faults.hold.add("/do")
    with pytest.raises(EngineUnknown, match="no answer within") as caught:
        server.call("POST", "/do", Left(0.05))
    assert caught.value.late
    assert server.losses == 0
    running.faults.release()
    server.call("POST", "/do", Left())
    running.faults.hold.add("/done")
    with pytest.raises(EngineUnreachable):
        server.look("/done", 0.05)
    assert server.trouble is None, "busy, perhaps"
    monkeypatch.setattr("moebus.engine.http.server.PATIENCE_S", 0.0)
    assert "has not answered for" in (server.trouble or "")


def test_a_look_is_quick_while_a_call_hangs(running: Running) -> None:
    server = EngineServer(running.url)
    running.faults.hold.update(("/do", "/slow"))
    call = Background(lambda: server.call("POST", "/do", Left()))
    wait_until(lambda: running.faults.calls, 30.0, "the call came in")
    assert server.look("/done", 30.0).status == 200, "it does not wait for the call"
    running.faults.hold.add("/done")
    late = time.monotonic()
    with pytest.raises(EngineUnreachable):
        server.look("/done")
    assert time.monotonic() - late < 1.0
    assert not call.done
    running.faults.release()
    assert call.result().field("status") == "done"


def test_on_sent_comes_before_the_answer(running: Running) -> None:
    server, seen = EngineServer(running.url), []
    running.faults.hold.add("/do")
    call = Background(lambda: server.call("POST", "/do", Left(), json={}, on_sent=lambda: seen.append("sent")))
    wait_until(lambda: seen, 30.0, "the request has left")
    assert not call.done
    running.faults.release()
    call.result()
    assert seen == ["sent"]


@pytest.mark.parametrize(
    ("when", "proof", "outcome"),
    [
        ("after", True, None),
        ("before", False, EngineFailed),
        ("before", None, EngineUnknown),
        ("after", None, EngineUnknown),
    ],
)
def test_a_lost_answer_is_resolved_by_the_state(
    running: Running, when: str, proof: bool | None, outcome: type[MoebusError] | None
) -> None:
    server = EngineServer(running.url)
    running.faults.cut["/do"] = when  # type: ignore[assignment]

    def happened() -> bool | None:
        return None if proof is None else server.look("/done", 30.0).field("count") == 1

    def attempt() -> None:
        resolved(lambda: server.call("POST", "/do", Left()), happened, lambda: "one", "one")

    if outcome is None:
        attempt()
    else:
        with pytest.raises(outcome):
            attempt()


def test_a_late_call_may_still_happen(running: Running) -> None:
    server = EngineServer(running.url)
    running.faults.hold.add("/do")
    with pytest.raises(EngineUnknown):
        resolved(lambda: server.call("POST", "/do", Left(0.05)), lambda: False, lambda: "one", "one")


def test_an_effect_on_a_lost_life_is_lost(running: Running) -> None:
    running.faults.cut["/do"] = "after"
    server = EngineServer(running.url)
    with pytest.raises(EngineFailed, match="restarted"):
        resolved(lambda: server.call("POST", "/do", Left()), lambda: True, lambda: "two", "one")


def test_identity_follows_the_boot_fact(running: Running) -> None:
    server = EngineServer(running.url)
    fact = ["1700000000.25"]

    def boot() -> str | None:
        server.look("/done", 30.0)
        return fact[0]

    lives = Lives(server, boot)
    first = lives.current()
    assert fact[0] in first
    running.faults.cut["/do"] = "after"
    with pytest.raises(EngineUnknown):
        server.call("POST", "/do", Left())
    assert lives.current() == first, "a lost connection, the same life"
    assert Lives(server, boot).current() == first, "another worker, the same life"
    running.kill()
    assert lives.current() == first, "nothing is proven while it is gone"
    with pytest.raises(EngineUnreachable):
        Lives(server, boot).current()
    fact[0] = "1700000099.5"
    running.boot(FastAPI())
    running.faults.answer["/done"] = (200, b"{}")
    assert lives.current() != first


def test_identity_without_a_boot_fact_is_lost_with_the_connection(running: Running) -> None:
    server = EngineServer(running.url)

    def boot() -> str | None:
        server.look("/done", 30.0)
        return None

    lives = Lives(server, boot)
    first = lives.current()
    assert lives.current() == first
    assert Lives(server, boot).current() != first, "another worker cannot tell"
    running.faults.cut["/do"] = "before"
    with pytest.raises(EngineUnknown):
        server.call("POST", "/do", Left())
    second = lives.current()
    assert second != first
    running.kill()
    assert lives.current() == second
    running.boot(FastAPI())
    running.faults.answer["/done"] = (200, b"{}")
    assert lives.current() not in (first, second)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "8000",
        "ftp://a",
        "http://",
        "http://u:p@h",
        "http://h/?x=1",
        "http://h#f",
        "http://h:0",
        "http://h:x",
        "http://a b",
    ],
)
def test_bad_addresses(url: str) -> None:
    with pytest.raises(InvalidInput, match="engine_url") as caught:
        EngineServer(url)
    assert "p@h" not in str(caught.value)


def test_a_path_in_the_address_is_kept() -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(str(request.url))
        return httpx.Response(200)

    EngineServer("http://h:1/api/", transport=httpx.MockTransport(answer)).call("POST", "/pause", Left())
    assert seen == ["http://h:1/api/pause"]


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", "gehe\u00efm".encode(), b"a" * 20_000, b"a\nb"])
def test_bad_token_files(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match="one line") as caught:
        read_token(file)
    assert "two words" not in str(caught.value)
    with pytest.raises(SettingsError, match="No such file"):
        read_token(tmp_path / "none")
    file.write_bytes(b"abc-1\n")
    assert read_token(file).get_secret_value() == "abc-1"


def test_words_are_short_and_on_one_line() -> None:
    assert words({"error": {"message": "a\n b"}}) == "a b"
    assert len(words(None, "x" * 5000)) < 310
    assert not failed({"status": "paused", "code": True})
