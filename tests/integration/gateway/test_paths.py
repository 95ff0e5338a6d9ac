"""The gateway over the in-memory log, with real workers beside simulated engines."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.topics import Topics, ensure
from moebus.engine.port import EngineRefused
from moebus.engine.simulated import SimulatedEngine
from moebus.producers.control import ControlClient
from moebus.producers.gateway import Backend
from moebus.schemas.tags import Tag
from tests.support.gate import Gate
from tests.support.gateway import NAMES, Stand, page, stand
from tests.support.wait import wait_until

TOPICS = Topics("t")


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    made = MemoryBroker()
    ensure(made.admin(), TOPICS)
    yield made
    made.close()


@pytest.fixture
def fleet(broker: MemoryBroker, tmp_path: Path) -> Iterator[Stand]:
    with stand(broker, TOPICS, [SimulatedEngine(allowed_roots=[str(tmp_path)]) for _ in NAMES]) as made:
        yield made


def test_pause_and_resume_in_fastdeploys_shape(fleet: Stand) -> None:
    assert fleet.is_paused() is False
    paused = fleet.post("/v1/pause").json()
    assert (paused["status"], paused["result"], paused["error"]) == ("success", None, None)
    assert paused["request_id"].startswith("control-")
    assert sorted(paused["outcome"]["responses"]) == list(NAMES)
    assert fleet.is_paused() is True
    assert fleet.post("/v1/resume").json()["status"] == "success"
    assert fleet.is_paused() is False


def test_sleep_discards_and_wakeup_resumes(fleet: Stand) -> None:
    slept = fleet.post("/v1/sleep")
    assert slept.status_code == 200
    assert [entry["worker"] for entry in slept.json()["result"]] == list(NAMES)
    assert fleet.client.history(1)[0].request.args == {"tags": ["weight", "kv_cache"], "level": "discard"}
    assert not any(any(engine.inspect().resident.values()) for engine in fleet.engines)
    assert fleet.is_paused() is True
    assert fleet.post("/v1/resume").status_code == 409
    half = fleet.post("/v1/wakeup", params={"tags": "kv_cache"})
    assert (half.status_code, half.json()["status"], half.json()["error"]) == (207, "partial", "partial")
    assert fleet.is_paused() is True
    assert fleet.engines[0].inspect().resident == {Tag.WEIGHT: False, Tag.KV_CACHE: True}
    assert fleet.post("/v1/wakeup", params={"tags": "weight"}).status_code == 200
    assert fleet.is_paused() is False


def test_update_weights(fleet: Stand, tmp_path: Path) -> None:
    running = fleet.post("/v1/update_weights", json={"version": "v2"})
    assert (running.status_code, running.json()["error"]) == (409, "illegal_state")
    fleet.post("/v1/pause")
    file = tmp_path / "v2"
    file.write_bytes(b"weights")
    updated = fleet.post("/v1/update_weights", json={"version": "v2", "source": str(file), "timeout": 30})
    assert updated.status_code == 200, updated.text
    assert [entry["version"] for entry in updated.json()["result"]] == ["v2", "v2"]
    assert updated.json()["outcome"]["decision"] == "commit"
    assert fleet.client.history(1)[0].request.deadline_s == 30
    fleet.engines[1].fail_next("stage", EngineRefused("layer 3 has the wrong shape"))
    refused = fleet.post("/v1/update_weights", json={"version": "v3"})
    assert refused.status_code == 500
    assert "layer 3 has the wrong shape" in refused.json()["error_message"]
    assert [engine.inspect().version for engine in fleet.engines] == ["v2", "v2"]


def test_abort_requests(fleet: Stand) -> None:
    answer = fleet.post("/v1/abort_requests", json={"req_ids": ["a", "b"]})
    assert answer.status_code == 200
    assert answer.json()["result"] == {"aborted": [], "not_found": ["a", "b"]}
    assert fleet.post("/v1/abort_requests", json={"abort_all": True}).json()["result"]["aborted"] == []


def test_the_legacy_paths_over_the_log(fleet: Stand) -> None:
    cleared = fleet.get("/clear_load_weight")
    assert (cleared.status_code, cleared.json()["msg"]) == (200, "clear model weight successfully")
    assert fleet.is_paused() is True
    assert not any(any(engine.inspect().resident.values()) for engine in fleet.engines)
    assert fleet.get("/clear_load_weight").status_code == 200
    updated = fleet.get("/update_model_weight")
    assert (updated.status_code, updated.json()["msg"]) == (200, "update model weight successfully")
    assert fleet.is_paused() is False
    assert [entry.request.method for entry in fleet.client.history(3)] == ["sleep", "sleep", "wakeup"]
    assert all(engine.inspect().version == "initial" for engine in fleet.engines)


def test_the_same_key_again_joins_the_first(fleet: Stand) -> None:
    headers = {"Idempotency-Key": "step-1"}
    first = fleet.post("/v1/pause", headers=headers).json()
    fleet.post("/v1/resume")
    assert fleet.post("/v1/pause", headers=headers).json() == first
    assert fleet.is_paused() is False
    other = fleet.post("/v1/resume", headers=headers)
    assert (other.status_code, other.json()["error"], other.json()["request_id"]) == (409, "conflict", "step-1")


def test_any_command_for_any_target(fleet: Stand) -> None:
    accepted = fleet.post("/v1/control", json={"method": "pause", "target": "worker-2", "args": {"mode": "wait"}})
    assert accepted.status_code == 202
    body = accepted.json()
    assert body["status"] == "accepted"
    found = _outcome(fleet, accepted.headers["location"])
    assert (found["status"], found["http_status"], list(found["responses"])) == ("ok", 200, ["worker-2"])
    assert found["position"] == body["position"]
    assert [engine.inspect().paused for engine in fleet.engines] == [False, True]
    assert fleet.is_paused() is False
    assert fleet.get("/v1/workers/worker-2").json()["state"]["lifecycle"] == "PAUSED"


def _outcome(fleet: Stand, location: str) -> dict[str, Any]:
    def complete() -> dict[str, Any]:
        answer = fleet.get(location)
        assert answer.status_code == 200
        found: dict[str, Any] = answer.json()
        return found if found["complete"] else {}

    return wait_until(complete, 30, "the outcome")


def test_an_update_that_nobody_waits_for_is_decided(fleet: Stand) -> None:
    fleet.post("/v1/pause")
    body = {"method": "update_weights", "args": {"version": "v9"}, "request_id": "an/id with: signs"}
    accepted = fleet.post("/v1/control", json=body)
    assert accepted.status_code == 202
    found = _outcome(fleet, accepted.headers["location"])
    assert (found["request_id"], found["status"], found["decision"]) == ("an/id with: signs", "ok", "commit")
    assert [engine.inspect().version for engine in fleet.engines] == ["v9", "v9"]


def test_fleet_pages(fleet: Stand) -> None:
    workers = fleet.get("/v1/workers").json()["workers"]
    assert [(worker["member_id"], worker["live"]) for worker in workers] == [(name, True) for name in NAMES]
    for path in ("/v1/workers/nobody", "/v1/control/nothing"):
        assert fleet.get(path).status_code == 404
    fleet.post("/v1/control", json={"method": "status"}, headers={"Idempotency-Key": "s-1"})
    fleet.post("/v1/control", json={"method": "status"}, headers={"Idempotency-Key": "s-2"})
    history = fleet.get("/v1/control", params={"limit": 1}).json()["operations"]
    assert [(entry["request_id"], entry["issuer"]) for entry in history] == [("s-2", "gateway")]


def test_nobody_there(fleet: Stand) -> None:
    accepted = fleet.post("/v1/control", json={"method": "pause", "target": "role=train"})
    found = fleet.get(accepted.headers["location"]).json()
    assert (found["status"], found["http_status"]) == ("no_targets", 404)


REFUSED = [
    ('{"method":"bogus"}', "method: unknown method 'bogus'"),
    ('{"method":"decide","args":{"request_id":"a","decision":"commit"}}', "method: decide is not a command"),
    ('{"method":"sleep","args":{"tags":["x"]}}', "args.tags: unknown tag 'x'"),
    ('{"method":"pause","deadline_s":-1}', "deadline_s: "),
    ('{"method":"pause","target":"role=(("}', "target: "),
    ('{"method":"pause","request_id":"a\\nb"}', "request_id: 1 to 255 printable characters"),
    ('{"method":"transfer_weights","args":{"step":"init","info":{"a":1e999}}}', "args: out of range float"),
]


def test_commands_that_the_log_would_refuse(fleet: Stand) -> None:
    before = fleet.client.history(1000)
    for body, named in REFUSED:
        answer = fleet.post("/v1/control", content=body)
        assert (answer.status_code, answer.json()["error"]) == (400, "InvalidInput")
        assert named in answer.json()["error_message"]
    assert fleet.client.history(1000) == before


def test_is_paused_waits_for_an_operation_and_then_tells_its_middle(fleet: Stand) -> None:
    """A drain that takes longer than the question may: not paused yet."""
    gate = Gate()
    fleet.engines[1].hook = gate
    gate.close_after("pause", 0)
    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(fleet.post, "/v1/pause")
        gate.wait_held()
        assert fleet.is_paused() is False
        assert not pausing.done()
        gate.open()
        assert pausing.result(30).status_code == 200
    assert fleet.is_paused() is True


def test_a_key_that_is_under_way_is_joined(fleet: Stand) -> None:
    """A client that gave up waiting and asks again must not start a second one."""
    gate = Gate()
    fleet.engines[0].hook = gate
    gate.close_after("pause", 0)
    headers = {"Idempotency-Key": "joined"}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(fleet.post, "/v1/pause", headers=headers)
        gate.wait_held()
        second = pool.submit(fleet.post, "/v1/pause", headers=headers)
        wait_until(lambda: fleet.backend.operations.under_way == 2, 30, "both wait")
        gate.open()
        assert first.result(30).status_code == second.result(30).status_code == 200
    assert first.result().json()["outcome"]["responses"] == second.result().json()["outcome"]["responses"]
    assert [call for call in gate.calls if call[0] == "pause"] == [("pause", "abort")]


def test_any_gateway_tells_what_became_of_a_command(fleet: Stand, broker: MemoryBroker) -> None:
    """Also one that began after the first had ended."""
    done = fleet.post("/v1/pause").json()
    with ControlClient(broker, TOPICS, issuer="another") as client, page(Backend(lambda: client)) as http:
        found = http.get(f"/v1/control/{done['request_id']}").json()
        assert found == done["outcome"]
        assert http.get("/v1/is_paused").json()["result"] == {"is_paused": True}
        assert http.get("/v1/control").json()["operations"][-1]["issuer"] == "gateway"
