"""The store's HTTP over a real loopback server."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from moebus.consumers.store import RouteStore, http, store_routes
from moebus.observability.health import Health
from moebus.observability.http import HttpServer
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Base, Delete, Outcome
from moebus.schemas.route_answer import RouteAnswer
from tests.support.routes import attempt_id, make_attempt
from tests.support.store import SMALL, Rig
from tests.support.wait import wait_until


class Served:
    """A running store behind a server."""

    def __init__(self, rig: Rig, store: RouteStore, client: httpx.Client) -> None:
        self.rig, self.store, self.client = rig, store, client

    def get(self, rollout_id: str, run: str = "run", **params: Any) -> httpx.Response:
        return self.client.get(f"/v1/routes/{run}/{quote(rollout_id, safe='')}", params=params)

    def error(self, response: httpx.Response) -> tuple[int, str]:
        body = response.json()
        assert set(body) == {"error", "detail"}
        assert len(body["detail"]) > 5
        return response.status_code, body["error"]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    rig = Rig(tmp_path / "data")
    with rig.running(options=replace(SMALL, map_bytes=128 << 20)) as store:
        server = HttpServer(metrics=rig.metrics, health=Health(), routes=store_routes(lambda: store)).start()
        with httpx.Client(base_url=server.url, timeout=10) as client:
            yield Served(rig, store, client)
        server.stop()


def array_of(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return np.load(io.BytesIO(response.content), allow_pickle=False)


def test_npy_raw_and_head(served: Served) -> None:
    outcome = Outcome("complete", "stop: é", "1f" * 16, 4, "2e" * 16)
    attempt = make_attempt("a:0:0:0", rows=9, chunks=2, outcome=outcome, versions=((0, "v1"), (6, "v2")), epoch=3)
    served.rig.put(attempt)
    response = served.get("a:0:0:0", wait=5)
    np.testing.assert_array_equal(array_of(response), attempt.routes)
    meta = RouteAnswer.from_headers(response.headers)
    assert (meta.rows, meta.layers, meta.top_k, meta.num_experts, meta.epoch) == (9, (1, 2, 5), 2, 16, 3)
    assert (meta.status, meta.finish_reason, meta.versions) == ("complete", "stop: é", ((0, "v1"), (6, "v2")))
    ref = meta.ref
    assert (ref.rows, ref.token_hash, ref.prompt_rows, ref.prompt_hash) == (9, "1f" * 16, 4, "2e" * 16)
    raw = served.get("a:0:0:0", format="raw", layers="5,1", start=2, stop=8)
    meta = RouteAnswer.from_headers(raw.headers)
    rows = np.frombuffer(raw.content, meta.dtype).reshape(meta.shape)
    np.testing.assert_array_equal(rows, attempt.routes[2:8, [2, 0]])
    assert meta.versions == ((2, "v1"), (6, "v2"))
    head = served.client.head("/v1/routes/run/a%3A0%3A0%3A0")
    assert head.content == b""
    assert head.headers["content-length"] == response.headers["content-length"] == str(len(response.content))


@pytest.mark.parametrize("rollout_id", ["a/b:c", "ü ?#%&+", "x" * 255, "//", "a:/:b", "\x01\n", "%2F"])
def test_any_id_can_be_asked_for(served: Served, rollout_id: str) -> None:
    attempt = make_attempt(rollout_id)
    served.rig.put(attempt)
    response = served.get(rollout_id, wait=5)
    np.testing.assert_array_equal(array_of(response), attempt.routes)
    assert RouteAnswer.from_headers(response.headers).ref.rollout_id == rollout_id


def test_errors(served: Served) -> None:
    rig = served.rig
    rig.put(make_attempt("gone", number=1), make_attempt("two", number=2), make_attempt("two", number=3))
    spoilt = make_attempt("spoilt", rows=4, chunks=2, number=4)
    rig.put_raw(spoilt.chunks[0])
    rig.put_raw(make_attempt("spoilt", rows=4, chunks=2, number=4, seed=9).chunks[0])
    orphan = make_attempt("orphan", number=5, base=Base(attempt_id(99), 2, "no"))
    rig.put(orphan)
    rig.fence(Delete("run", "gone", attempt_id(50)))
    rig.caught_up(served.store)
    assert served.error(served.get("gone", wait=5)) == (410, "RouteDeleted")
    assert served.error(served.get("two", wait=5)) == (409, "AmbiguousAttempt")
    assert served.error(served.get("spoilt")) == (422, "RouteCorrupt")
    assert served.error(served.get("orphan")) == (410, "RouteNeverComing")
    assert served.error(served.get("never")) == (404, "RouteNotYet")
    assert served.error(served.client.get("/v1/nothing")) == (404, "Http")
    assert array_of(served.get("two", attempt="0" * 25 + "3")).shape == (10, 3, 2)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"choice": "-1"}, "choice"), ({"choice": "65536"}, "choice"), ({"attempt": "x"}, "attempt"),
        ({"stop": "11"}, "stop"),
        ({"start": "6", "stop": "5"}, "start"), ({"layers": "9"}, "layers"), ({"layers": "1,1"}, "layers"),
        ({"layers": "a"}, "layers"), ({"format": "pickle"}, "format"), ({"wait": "-1"}, "wait"),
        ({"colour": "red"}, "colour"),
        ({"partition": "3"}, "partition"), ({"group": ""}, "group"), ({"min_offset": "1"}, "min_offset"),
    ],
)  # fmt: skip
def test_bad_parameters_are_named(served: Served, params: dict[str, str], field: str) -> None:
    served.rig.put(make_attempt("a"))
    served.rig.caught_up(served.store)
    response = served.get("a", **params)
    assert served.error(response) == (400, "InvalidInput")
    assert response.json()["detail"].startswith(field)


def test_bad_names(served: Served) -> None:
    assert served.error(served.get("a", run="a b")) == (400, "InvalidInput")
    assert served.error(served.get("x" * 256)) == (400, "InvalidInput")
    for path in ("/v1/routes", "/v1/routes?run=r&prefix=", "/v1/routes?run=r&prefix=a:", "/v1/routes?run=r&limit=0",
                 "/v1/routes?run=r&after=*"):  # fmt: skip
        assert served.error(served.client.get(path)) == (400, "InvalidInput")


def test_long_poll_answers_when_the_rollout_comes(served: Served) -> None:
    attempt = make_attempt("late")
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(served.get("late", wait=8)))
    thread.start()
    served.rig.put(attempt)
    thread.join(8)
    np.testing.assert_array_equal(array_of(answers[0]), attempt.routes)
    ref = RouteAnswer.from_headers(answers[0].headers)
    assert ref.applied in (0, 2), "before or after its commit"
    assert served.error(served.get("late", group="late", min_offset=3, wait=0.05)) == (404, "RouteNotYet")
    assert served.get("late", group="late", min_offset=2, wait=5).status_code == 200


def test_listing_in_pages(served: Served) -> None:
    ids = ["a:1", "a:1:0:0", "a:10:0:0", "b", "a:2:0:0"]
    served.rig.put(*(make_attempt(rollout_id, number=n) for n, rollout_id in enumerate(ids, 1)))
    served.rig.caught_up(served.store)
    found: list[str] = []
    after: str | None = None
    while True:
        params = {"run": "run", "limit": "2", **({"after": after} if after else {})}
        page = served.client.get("/v1/routes", params=params).json()
        found += [entry["id"] for entry in page["rollouts"]]
        after = page["next"]
        if after is None:
            break
    assert sorted(found) == sorted(ids)
    below = served.client.get("/v1/routes", params={"run": "run", "prefix": "a:1"}).json()["rollouts"]
    assert sorted(entry["id"] for entry in below) == ["a:1", "a:1:0:0"]
    assert below[0]["status"] == "complete"
    assert below[0]["rows"] == 10
    assert served.client.get("/v1/routes", params={"run": "none"}).json()["rollouts"] == []


@pytest.fixture
def held(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The store commits nothing until this is set."""
    go = threading.Event()
    follower = served.store._follower
    commit = follower.commit
    monkeypatch.setattr(follower, "commit", lambda: commit() if go.wait(30) else None)
    yield go
    go.set()


def test_a_listing_lacks_nothing_that_was_read_before_it(served: Served, held: threading.Event) -> None:
    served.rig.put(make_attempt("a"))
    assert served.get("a", wait=5).status_code == 200
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(served.client.get("/v1/routes", params={"run": "run"})))
    thread.start()
    wait_until(lambda: bool(served.store.progress._listeners), what="the listing to wait for the commit")
    held.set()
    thread.join(8)
    assert [entry["id"] for entry in answers[0].json()["rollouts"]] == ["a"]


def test_a_listing_does_not_wait_for_a_commit_that_does_not_come(
    served: Served, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "LONGEST", 0.01)
    served.rig.put(make_attempt("a"))
    assert served.get("a", wait=5).status_code == 200
    assert served.client.get("/v1/routes", params={"run": "run"}).json()["rollouts"] == []


def test_delete_over_http(served: Served) -> None:
    served.rig.put(make_attempt("a:1:0:0", number=1), make_attempt("a:10:0:0", number=2))
    served.rig.caught_up(served.store)
    response = served.client.delete("/v1/routes", params={"run": "run", "prefix": "a:1"})
    assert response.status_code == 200
    assert sorted(response.json()["offsets"]) == ["0", "1", "2"]
    partition = served.rig.partition("a")
    wanted = response.json()["offsets"][str(partition)] + 1
    after = served.get("a:10:0:0", partition=partition, min_offset=wanted, wait=5)
    assert after.status_code == 200
    assert served.error(served.get("a:1:0:0")) == (410, "RouteDeleted")
    for params in ({"run": "run", "prefix": ""}, {"run": "run"}, {"prefix": "a"}, {"run": "run", "prefix": "a:"}):
        assert served.error(served.client.delete("/v1/routes", params=params)) == (400, "InvalidInput")
    with served.rig.broker.outage():
        late = served.client.delete("/v1/routes", params={"run": "run", "prefix": "b", "timeout": "0.05"})
        assert served.error(late) == (503, "BrokerUnavailable")


def test_figures(served: Served) -> None:
    served.rig.put(make_attempt("a"))
    served.rig.caught_up(served.store)
    body = served.client.get("/v1/store").json()
    assert body["waiting"] is None
    mine = body["partitions"][str(served.rig.partition("a"))]
    assert (mine["applied"], mine["rollouts"], mine["full"]) == (2, 1, None)
    assert 0 < mine["used_bytes"] < mine["map_bytes"]


def test_a_rollout_deleted_while_it_is_read_cuts_the_answer(served: Served) -> None:
    card = ModelCard(256, 8, tuple(range(60)))
    attempt = make_attempt("a", rows=50_000, chunks=40, card=card)  # 24 MB: more than sockets hold
    served.rig.put(attempt)
    served.rig.caught_up(served.store)
    with served.client.stream("GET", "/v1/routes/run/a") as response:
        assert response.status_code == 200
        pieces = response.iter_raw(1000)
        next(pieces)
        served.rig.fence(Delete("run", "a", attempt_id(50)))
        served.rig.caught_up(served.store)
        partition = served.store._follower.partitions[served.rig.partition("a")]
        wait_until(lambda: not _blobs(partition), what="the blobs to be freed")
        with pytest.raises(httpx.RemoteProtocolError):
            for _ in pieces:
                pass


def _blobs(partition: Any) -> bool:
    with partition.reading() as (tables, _):
        return next(iter(tables._keys("blobs")), None) is not None


def test_no_store_yet_and_catching_up(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "data")
    made: list[RouteStore] = []
    server = HttpServer(
        metrics=rig.metrics, health=Health(), routes=store_routes(lambda: made[0] if made else None)
    ).start()
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/v1/routes/run/a").status_code == 503
        with rig.broker.outage():
            store = rig.store()
            made.append(store)
            store.start()
            answer = client.get("/v1/routes/run/a")
            assert (answer.status_code, answer.json()["error"]) == (503, "StoreCatchingUp")
        rig.caught_up(store)
        assert client.get("/v1/routes/run/a").status_code == 404
        store.stop()
    server.stop()


def test_a_parameter_given_twice_is_refused(served: Served) -> None:
    twice: list[tuple[str, Any]] = [("run", "run"), ("prefix", "a"), ("prefix", "b")]
    for method in ("GET", "DELETE"):
        response = served.client.request(method, "/v1/routes", params=twice)
        assert served.error(response) == (400, "InvalidInput")
        assert "prefix" in response.json()["detail"]
