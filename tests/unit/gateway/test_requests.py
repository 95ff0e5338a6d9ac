"""What the gateway takes and what it refuses, before anything is sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue, SecretStr

from moebus.observability.metrics import Metrics
from moebus.producers.gateway import Backend, Legacy, gateway_app, legacy_mode
from moebus.producers.gateway.fastdeploy import AbortBody, UpdateBody, sleep_args, wakeup_args
from moebus.producers.gateway.strict import MAX_BODY
from moebus.schemas.control import make_request
from moebus.schemas.errors import InvalidInput, SettingsError
from tests.support.asgi import ask

APP = gateway_app(Backend(lambda: None))
GUARDED = gateway_app(Backend(lambda: None), token=SecretStr("a long secret"))
UPDATE = "/v1/update_weights"


@pytest.mark.parametrize(
    ("method", "path", "given", "named"),
    [
        ("POST", "/v1/pause", {"params": {"mode": "wait"}}, "mode: unknown parameter"),
        ("POST", "/v1/pause", {"json": {"mode": "wait"}}, "mode: unknown field"),
        ("POST", "/v1/pause", {"json": [1]}, "body: this path takes none"),
        ("POST", "/v1/resume", {"content": b"{"}, "body: this path takes none, and this is not JSON"),
        ("POST", "/v1/sleep", {"params": {"tags": "weights"}}, "tags: unknown tag 'weights'"),
        ("POST", "/v1/sleep", {"params": {"tags": ""}}, "tags: unknown tag ''"),
        ("POST", "/v1/sleep", {"params": {"tag": "weight"}}, "tag: unknown parameter; known are tags"),
        ("POST", "/v1/sleep", {"params": [("tags", "weight"), ("tags", "kv_cache")]}, "tags: given twice"),
        ("POST", "/v1/sleep", {"json": {"tags": "weight"}}, "tags: unknown field"),
        ("POST", "/v1/wakeup", {"params": {"tags": "weight,all"}}, "tags: unknown tag 'all'"),
        ("POST", "/v1/wakeup", {"params": {"resume": "false"}}, "resume: unknown parameter"),
        ("GET", "/v1/is_paused", {"params": {"now": "1"}}, "now: unknown parameter; known are none"),
        ("GET", "/clear_load_weight", {"params": {"tags": "weight"}}, "tags: unknown parameter"),
        ("GET", "/update_model_weight", {"params": {"version": "3"}}, "version: unknown parameter"),
        ("POST", UPDATE, {"json": {}}, "version: missing"),
        ("POST", UPDATE, {"content": b""}, "body: missing"),
        ("POST", UPDATE, {"content": b"{"}, "body: not JSON"),
        ("POST", UPDATE, {"json": {"version": 3}}, "version: "),
        ("POST", UPDATE, {"json": {"version": "3", "force": True}}, "force: unknown field"),
        ("POST", UPDATE, {"json": {"version": "3", "verify_checksum": "yes"}}, "verify_checksum: "),
        ("POST", UPDATE, {"json": {"version": "3", "timeout": 0}}, "timeout: "),
        ("POST", UPDATE, {"json": {"version": "3", "timeout": "60"}}, "timeout: "),
        ("POST", UPDATE, {"json": {"version": "3", "rsync_config": {}}}, "rsync_config.etcd_server: missing"),
        ("POST", UPDATE, {"json": {"version": "3"}, "params": {"version": "3"}}, "version: unknown parameter"),
        ("POST", "/v1/abort_requests", {"json": {}}, "must provide abort_all=true or req_ids"),
        ("POST", "/v1/abort_requests", {"json": {"req_ids": []}}, "must provide abort_all=true or req_ids"),
        ("POST", "/v1/abort_requests", {"json": {"stop_all": True}}, "stop_all: unknown field"),
        ("POST", "/v1/control", {"json": {"args": {}}}, "method: missing"),
        ("POST", "/v1/control", {"json": {"method": "pause", "targets": "all"}}, "targets: unknown field"),
        ("POST", "/v1/control", {"json": {"method": "pause", "min_ok": 0}}, "min_ok: "),
        ("POST", "/v1/control", {"json": {"method": "pause", "expect": {"befor": 1}}}, "expect.befor: unknown field"),
        ("POST", "/v1/control", {"content": b'{"method":"pause","method":"resume"}'}, "method: "),
        ("POST", "/v1/control", {"content": b'{"method":"pause","args":{"a":NaN}}'}, "NaN is not JSON"),
        ("POST", "/v1/control", {"content": b'{"a":' * 100_000}, "body: "),
        ("POST", "/v1/control", {"content": b"\xff\xfe"}, "body: not JSON"),
        ("POST", "/v1/control", {"content": b"[]"}, "body: "),
        ("GET", "/v1/control", {"params": {"limit": "many"}}, "limit: "),
        ("GET", "/v1/control", {"params": {"limit": "0"}}, "limit: "),
        ("GET", "/v1/workers", {"params": {"live": "1"}}, "live: unknown parameter"),
        ("POST", "/v1/pause", {"headers": {"Idempotency-Key": "x" * 256}}, "Idempotency-Key: "),
    ],
)  # fmt: skip
def test_wrong_use_is_400_and_names_it(method: str, path: str, given: dict[str, Any], named: str) -> None:
    answer = ask(APP, method, path, **given)
    body = answer.json()
    assert (answer.status_code, body["status"], body["error"]) == (400, "error", "InvalidInput"), body
    assert named in body["error_message"]


@pytest.mark.parametrize(
    ("method", "path", "given"),
    [
        ("POST", "/v1/pause", {}),
        ("POST", "/v1/pause", {"json": {}}),
        ("POST", "/v1/sleep", {"params": {"tags": " kv_cache , weight"}}),
        ("POST", UPDATE, {"json": {"version": "3", "verify_checksum": True, "timeout": 60}}),
        ("POST", "/v1/abort_requests", {"json": {"abort_all": True}}),
        ("POST", "/v1/control", {"json": {"request_id": "a", "method": "pause"}, "headers": {"Idempotency-Key": "a"}}),
        ("GET", "/v1/is_paused", {}),
        ("GET", "/v1/control/a/b", {}),
    ],
)
def test_right_use_waits_for_the_broker(method: str, path: str, given: dict[str, Any]) -> None:
    answer = ask(APP, method, path, **given)
    assert (answer.status_code, answer.json()["error"]) == (503, "GatewayNotReady")


def test_two_different_ids_are_refused() -> None:
    headers = {"Idempotency-Key": "b"}
    answer = ask(APP, "POST", "/v1/control", json={"request_id": "a", "method": "pause"}, headers=headers)
    assert answer.status_code == 400
    assert "request_id: another one than in the header" in answer.json()["error_message"]


@pytest.mark.parametrize("length", [None, str(MAX_BODY + 1)])
def test_a_body_above_the_limit_is_not_taken_in(length: str | None) -> None:
    async def pieces() -> Any:
        for _ in range(3):
            yield b"x" * (MAX_BODY // 2)

    headers = {} if length is None else {"content-length": length}
    answer = ask(APP, "POST", "/v1/pause", content=pieces(), headers=headers)
    assert answer.status_code == (400 if length is None else 413)
    assert f"{MAX_BODY} bytes" in answer.json()["error_message"]


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/v1/nothing", "GET", 404), ("/v1/pause", "GET", 405), ("/v1/workers", "PUT", 405)]
)
def test_unknown_paths_and_methods(path: str, method: str, status: int) -> None:
    answer = ask(APP, method, path)
    assert (answer.status_code, answer.json()["status"]) == (status, "error")


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (None, 401),
        ("Basic YTpi", 401),
        ("a long secret", 401),
        ("Bearer another", 403),
        ("Bearer a long secret", 503),
        ("bearer a long secret", 503),
    ],
)
@pytest.mark.parametrize("path", ["/v1/is_paused", "/clear_load_weight", "/v1/workers", "/v1/control/x"])
def test_the_token(path: str, given: str | None, status: int) -> None:
    answer = ask(GUARDED, "GET", path, headers={} if given is None else {"authorization": given})
    assert answer.status_code == status
    assert ("www-authenticate" in answer.headers) == (status == 401)
    assert "a long secret" not in answer.text


def test_args_of_fastdeploys_paths() -> None:
    assert sleep_args(None) == {"tags": ["weight", "kv_cache"], "level": "discard"}
    assert sleep_args("kv_cache") == {"tags": ["kv_cache"], "level": "discard"}
    assert wakeup_args("kv_cache,weight") == {"tags": ["weight", "kv_cache"], "weights": "restore", "resume": True}
    assert UpdateBody(version="3", verify_checksum=True, timeout=9).args() == {
        "version": "3", "options": {"verify_checksum": True},
    }  # fmt: skip
    rsync: dict[str, JsonValue] = {"etcd_server": "e:1"}
    assert UpdateBody(version="3", rsync_config=rsync).args()["options"] == {"rsync_config": rsync}
    assert UpdateBody(version="3").args() == {"version": "3"}
    assert AbortBody(req_ids=["a"]).args() == {"ids": ["a"]}
    assert AbortBody(abort_all=True, req_ids=["a"]).args() == {"all": True}
    with pytest.raises(InvalidInput):
        AbortBody(abort_all=False).args()


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("sleep", sleep_args(None)),
        ("wakeup", wakeup_args(None)),
        ("update_weights", UpdateBody(version="3", verify_checksum=True, source="/w", cache="keep").args()),
        ("abort_requests", AbortBody(abort_all=True).args()),
    ],
)
def test_the_log_takes_them(method: str, args: dict[str, Any]) -> None:
    assert make_request("r", method, args).args == args


@pytest.mark.parametrize(("text", "over_log"), [("0", False), ("1", True), ("", False), (" 1 ", True)])
def test_fastdeploys_variable(text: str, over_log: bool) -> None:
    assert legacy_mode({"FD_ENABLE_V1_UPDATE_WEIGHTS": text}) is over_log
    assert legacy_mode({}) is False


@pytest.mark.parametrize("text", ["true", "2", "-1"])
def test_fastdeploys_variable_is_a_number(text: str) -> None:
    with pytest.raises(SettingsError, match="FD_ENABLE_V1_UPDATE_WEIGHTS: 0 or 1 is needed"):
        legacy_mode({"FD_ENABLE_V1_UPDATE_WEIGHTS": text})


def test_the_legacy_paths_are_off_without_an_engine() -> None:
    app = gateway_app(Backend(lambda: None), legacy=Legacy())
    for path in ("/clear_load_weight", "/update_model_weight"):
        answer = ask(app, "GET", path)
        assert (answer.status_code, answer.json()["msg"]) == (404, "Dynamic Load Weight Disabled.")


def test_requests_are_measured_by_the_path_of_their_route() -> None:
    metrics = Metrics()
    app = gateway_app(Backend(lambda: None), metrics=metrics)
    for path in ("/v1/control/a", "/v1/control/b", "/v1/secret-of-the-caller", "/v1/workers?x=1"):
        ask(app, "GET", path)
    name = "moebus_gateway_request_duration_seconds_count"
    assert metrics.value(name, path="/v1/control/{request_id:path}", status="503") == 2
    assert metrics.value(name, path="other", status="404") == 1
    assert metrics.value(name, path="/v1/workers", status="400") == 1
    assert b"secret-of-the-caller" not in metrics.text()


TAG_CASES = [
    case
    for case in json.loads((Path(__file__).parents[2] / "cases" / "tags.json").read_text())["cases"]
    if case["tags"] is None or isinstance(case["tags"], str)
]


@pytest.mark.parametrize("case", TAG_CASES, ids=lambda case: repr(case["tags"]))
@pytest.mark.parametrize("path", ["/v1/sleep", "/v1/wakeup"])
def test_tags_of_fastdeploys_paths(case: dict[str, Any], path: str) -> None:
    answer = ask(APP, "POST", path, params={} if case["tags"] is None else {"tags": case["tags"]})
    refused = "error" in case or "fastdeploy_http" in case
    assert answer.status_code == (400 if refused else 503)
    if not refused:
        assert sleep_args(case["tags"])["tags"] == wakeup_args(case["tags"])["tags"] == case["result"]
