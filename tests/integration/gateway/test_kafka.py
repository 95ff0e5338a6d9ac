"""FastDeploy's interface sequence over HTTP: real processes of workers, store and gateway on a real Kafka."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, permutations
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.topics import Topics, ensure
from moebus.observability.settings import load_settings
from tests.support.openapi import Described
from tests.support.processes import Launcher, Service, launcher
from tests.support.wait import wait_until

pytestmark = pytest.mark.kafka
WORKERS = ("w1", "w2")
TOKEN = "a long enough secret"


@dataclass
class Fleet:
    """`http` asks the gateway; `engines` are the workers' own pages."""

    http: httpx.Client
    engines: tuple[str, ...]
    launcher: Launcher
    gateway: Service

    def call(self, name: str) -> httpx.Response:
        return self.http.request("GET" if name == "is_paused" else "POST", f"/v1/{name}")

    def is_paused(self) -> bool:
        answer = self.call("is_paused")
        assert answer.status_code == 200, answer.text
        paused = answer.json()["result"]["is_paused"]
        assert isinstance(paused, bool)
        return paused

    def generate(self, number: int, **given: Any) -> httpx.Response:
        body = {"token_ids": [1, 2, 3], "max_tokens": 8, "seed": number, **given}
        return httpx.post(f"{self.engines[number % len(self.engines)]}/v1/generate", json=body, timeout=60)


@pytest.fixture(scope="module")
def fleet(kafka_broker: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    prefix = f"t{os.urandom(6).hex()}"
    broker = open_broker(load_settings(kafka={"bootstrap_servers": kafka_broker.bootstrap}).kafka)
    ensure(broker.admin(), Topics(prefix))
    broker.close()
    patch = pytest.MonkeyPatch()
    with launcher(tmp_path_factory.mktemp("fleet"), kafka_broker.bootstrap, prefix) as processes:
        for name in WORKERS:
            processes.worker(name)
        processes.store()
        settings = processes.directory / "gateway.toml"
        settings.write_text(f'[gateway]\ntoken = "{TOKEN}"\n')
        patch.setenv("FD_ENABLE_V1_UPDATE_WEIGHTS", "1")
        gateway = processes.start("gateway", "--config", str(settings), "gateway")
        patch.undo()
        url = wait_until(lambda: _address(gateway), 60, "the gateway's address")
        with httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {TOKEN}"}) as http:
            wait_until(lambda: http.get("/readyz").status_code == 200, 60, "the gateway is ready")
            found = wait_until(lambda: _ready_workers(http), 60, "the workers are ready")
            http.event_hooks = {"response": [Described(http.get("/openapi.json").json()).check]}
            yield Fleet(http, found, processes, gateway)


def _address(gateway: Service) -> str:
    pieces = gateway.text().partition('"url": "')
    return pieces[2].partition('"')[0]


def _ready_workers(http: httpx.Client) -> tuple[str, ...]:
    answer = http.get("/v1/workers")
    if answer.status_code != 200:
        return ()
    found = tuple(worker["http"] for worker in answer.json()["workers"] if worker["live"] and worker["ready"])
    return found if len(found) == len(WORKERS) else ()


@pytest.fixture
def generating(fleet: Fleet) -> Iterator[list[httpx.Response]]:
    """Requests on each worker, one after the other; what they answered."""
    stop = threading.Event()
    answers: list[httpx.Response] = []

    def one_after_the_other(number: int) -> None:
        while not stop.is_set():
            answers.append(fleet.generate(number, max_tokens=2000))
            stop.wait(0.03)

    with ThreadPoolExecutor(len(WORKERS)) as pool:
        futures = [pool.submit(one_after_the_other, number) for number in range(len(WORKERS))]
        try:
            yield answers
        finally:
            fleet.http.post("/v1/wakeup")
            stop.set()
        for future in futures:
            future.result(60)


def test_basic(fleet: Fleet) -> None:
    assert fleet.is_paused() is False
    answer = fleet.call("pause")
    assert (answer.status_code, answer.json()["status"]) == (200, "success")
    assert fleet.is_paused() is True
    assert fleet.call("resume").status_code == 200
    assert fleet.is_paused() is False


def test_nine_times_in_every_order_while_it_generates(fleet: Fleet, generating: list[httpx.Response]) -> None:
    for order in permutations(("pause", "resume", "is_paused")):
        paused = False
        for _ in range(9):
            for name in order:
                answer = fleet.call(name)
                assert (answer.status_code, answer.json()["status"]) == (200, "success"), answer.text
                if name == "is_paused":
                    assert answer.json()["result"]["is_paused"] is paused, order
                else:
                    paused = name == "pause"
        assert fleet.is_paused() is paused
        assert fleet.call("resume").status_code == 200

    def reasons() -> set[str]:
        return {answer.json()["finish_reason"] for answer in list(generating) if answer.status_code == 200}

    def cut() -> bool:
        """On a fast machine a request may end between any two pauses."""
        assert [fleet.call(name).status_code for name in ("pause", "resume")] == [200, 200]
        return "abort" in reasons()

    wait_until(cut, 60, "a request that a pause cut")
    wait_until(lambda: "length" in reasons(), 60, "a request that came to its end")
    assert reasons() == {"length", "abort"}
    assert {answer.status_code for answer in generating} == {200, 503}


@pytest.mark.parametrize("name", ["pause", "resume"])
def test_nine_times_the_same(fleet: Fleet, generating: list[httpx.Response], name: str) -> None:
    fleet.call("resume" if name == "pause" else "pause")
    assert [fleet.call(name).status_code for _ in range(9)] == [200] * 9
    assert fleet.is_paused() is (name == "pause")


def test_five_at_once_while_it_generates(fleet: Fleet, generating: list[httpx.Response]) -> None:
    with ThreadPoolExecutor(5) as pool:
        for name, paused in (("pause", True), ("resume", False), ("pause", True), ("resume", False)):
            answers = list(pool.map(fleet.call, [name] * 5))
            assert [(a.status_code, a.json()["status"]) for a in answers] == [(200, "success")] * 5
            assert len({a.json()["request_id"] for a in answers}) == 5
            assert [fleet.is_paused() for _ in range(2)] == [paused] * 2
            asked = list(pool.map(fleet.call, ["is_paused"] * 5))
            assert [a.json()["result"]["is_paused"] for a in asked] == [paused] * 5


def test_a_paused_fleet_answers_nobody_and_keeps_what_was_generated(fleet: Fleet) -> None:
    """Also its routes: the store has the rows of what was cut off, as `aborted`."""
    tries = count(1)
    cut = wait_until(lambda: _cut_short(fleet, next(tries)), 60, "a request that was running at the pause")
    assert cut["finish_reason"] == "abort"
    assert fleet.is_paused() is True
    assert [fleet.generate(number).status_code for number in range(2)] == [503, 503]
    ref = cut["route_ref"]
    stored = _until(fleet, f"/v1/routes/default/{quote(ref['id'], safe='')}", 200)
    assert (stored.headers["moebus-status"], stored.headers["moebus-finish-reason"]) == ("aborted", "abort")
    rows = np.load(io.BytesIO(stored.content), allow_pickle=False)
    assert len(rows) == ref["rows"] == 3 + len(cut["token_ids"]) - 1
    assert fleet.call("resume").status_code == 200
    assert fleet.generate(0).json()["finish_reason"] == "length"


def _cut_short(fleet: Fleet, calls: int) -> dict[str, Any]:
    """What a long request answers that a pause meets, so many calls later; nothing where it has no token yet."""
    fleet.call("resume")
    with ThreadPoolExecutor(1) as pool:
        rollout = f"cut:{os.urandom(4).hex()}:0:0"
        cut = pool.submit(fleet.generate, 0, max_tokens=100_000, rollout_id=rollout, wait_routes=True)
        for _ in range(calls):
            fleet.call("is_paused")
        assert fleet.call("pause").status_code == 200
        answer = cut.result(60)
    body: dict[str, Any] = answer.json()
    return body if answer.status_code == 200 and body["token_ids"] else {}


def test_sleep_update_wakeup_and_the_legacy_paths(fleet: Fleet) -> None:
    assert fleet.http.post("/v1/sleep", params={"tags": "kv_cache"}).status_code == 200
    assert fleet.is_paused() is True
    updated = fleet.http.post("/v1/update_weights", json={"version": "v2", "verify_checksum": True, "timeout": 60})
    assert updated.status_code == 200, updated.text
    assert fleet.http.post("/v1/wakeup").status_code == 200
    assert fleet.is_paused() is False
    assert fleet.generate(0).json()["versions"] == [[0, "v2"]]
    rsync = {"version": "v3", "rsync_config": {"etcd_server": "127.0.0.1:2379"}}
    fleet.call("pause")
    refused = fleet.http.post("/v1/update_weights", json=rsync)
    assert (refused.status_code, refused.json()["error"]) == (501, "unsupported")
    assert "rsync_config" in refused.json()["error_message"]
    assert fleet.http.get("/clear_load_weight").json()["msg"] == "clear model weight successfully"
    assert fleet.is_paused() is True
    assert fleet.http.get("/update_model_weight").json()["msg"] == "update model weight successfully"
    assert fleet.is_paused() is False
    assert fleet.generate(1).json()["versions"] == [[0, "v2"]]


def test_routes_through_the_gateway(fleet: Fleet) -> None:
    answer = fleet.generate(0, rollout_id="p:1:0:0", wait_routes=True)
    assert answer.status_code == 200, answer.text
    where = {"run": "default", "prefix": "p:1"}
    found = _until(fleet, "/v1/routes/default/p%3A1%3A0%3A0", 200)
    rows = np.load(io.BytesIO(found.content), allow_pickle=False)
    assert len(rows) == answer.json()["route_ref"]["rows"]
    assert found.headers["moebus-status"] == "complete"
    listed = fleet.http.get("/v1/routes", params=where).json()["rollouts"]
    assert [(entry["id"], entry["rows"]) for entry in listed] == [("p:1:0:0", len(rows))]
    deleted = fleet.http.delete("/v1/routes", params=where)
    assert (deleted.status_code, deleted.json()["prefix"]) == (200, "p:1")
    gone = _until(fleet, "/v1/routes/default/p%3A1%3A0%3A0", 410)
    assert gone.json()["error"] == "RouteDeleted"
    never = fleet.http.get("/v1/routes/default/nothing")
    assert (never.status_code, never.json()["error"]) == (404, "RouteNotYet")
    assert fleet.http.get("/v1/routes", params={"run": "default", "prefx": "p"}).status_code == 400


def _until(fleet: Fleet, path: str, status: int) -> httpx.Response:
    answers: list[httpx.Response] = []

    def there() -> bool:
        answers[:] = [fleet.http.get(path)]
        return answers[0].status_code == status

    wait_until(there, 60, f"{path} answers {status}", step=0.05)
    return answers[0]


def test_pages_and_token(fleet: Fleet) -> None:
    bare = httpx.Client(base_url=fleet.http.base_url, timeout=30)
    with bare:
        assert [bare.get(path).status_code for path in ("/healthz", "/readyz", "/metrics", "/openapi.json")] == [
            200
        ] * 4
        assert bare.get("/v1/is_paused").status_code == 401
        assert bare.post("/v1/pause", headers={"authorization": "Bearer other"}).status_code == 403
        assert (
            'moebus_gateway_request_duration_seconds_count{path="/v1/pause",status="200"}' in bare.get("/metrics").text
        )
    assert TOKEN not in fleet.gateway.text()
    assert fleet.is_paused() is False


def test_the_gateway_ends_in_time(fleet: Fleet) -> None:
    assert fleet.gateway.terminate(30) == 0
