"""`POST /v1/generate` over loopback: tokens and RouteRefs out, bad input by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.topics import Topics, ensure
from moebus.consumers.generate import generate_route
from moebus.consumers.store import Question
from moebus.engine.simulated import SimulatedEngine
from moebus.observability.health import Health
from moebus.observability.http import HttpServer
from moebus.observability.metrics import Metrics
from moebus.producers.routing import RoutingPublisher
from moebus.schemas.rollout import rollout_key
from moebus.schemas.route_ref import RouteRef, token_hash
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.gate import Gate
from tests.support.store import PARTITIONS, Rig
from tests.support.wait import wait_until


class Served:
    """A simulated engine behind its page."""

    def __init__(self) -> None:
        broker, topics = MemoryBroker(), Topics("t")
        ensure(broker.admin(), topics, routes_partitions=PARTITIONS)
        self.broker, self.gate = broker, Gate()
        self.engine = SimulatedEngine(hook=self.gate)
        self.metrics = Metrics()
        self.publisher: RoutingPublisher | None = RoutingPublisher(
            broker, topics, run="r", card=self.engine.config.card(), metrics=self.metrics
        )
        route = generate_route(self.engine, lambda: self.publisher, self.metrics)
        self.server = HttpServer(metrics=self.metrics, health=Health(), routes=[route]).start()

    def ask(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.server.url}/v1/generate", json={"token_ids": [1, 2, 3], **body}, timeout=30)

    def close(self) -> None:
        self.gate.open()
        self.server.stop()
        if self.publisher is not None:
            self.publisher.close(5)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


def test_tokens_and_a_ref_that_fits_them(served: Served) -> None:
    answer = served.ask(rollout_id="a:0:0:0", choice=2, max_tokens=4, wait_routes=True)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (len(body["token_ids"]), len(body["logprobs"]), body["finish_reason"]) == (4, 4, "length")
    assert body["versions"] == [[0, "initial"]]
    ref = RouteRef.from_dict(body["route_ref"])
    assert (ref.run, ref.rollout_id, ref.choice, ref.rows, ref.prompt_rows) == ("r", "a:0:0:0", 2, 6, 3)
    assert ref.token_hash == token_hash(np.array([1, 2, 3, *body["token_ids"]])[:6])
    assert served.metrics.value("moebus_routes_rollouts_total", outcome="stored") == 1
    assert served.metrics.value("moebus_engine_tokens_total", kind="output") == 4


def test_without_a_rollout_id_no_routes_are_published(served: Served) -> None:
    assert served.ask(max_tokens=1).json()["route_ref"] is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": ["x"]}, "token_ids"),
        ({"temperature": -1}, "temperature"),
        ({"colour": "red"}, "colour"),
        ({"rollout_id": "a", "choice": 70000}, "choice"),
        ({"token_ids": [10**9]}, "token_ids"),
        ({"token_ids": [1, 10**30]}, "token_ids.1"),
        ({"token_ids": [-1]}, "token_ids.0"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids.0"),
        ({"seed": 10**30}, "seed"),
        ({"rollout_id": "x" * 300}, "rollout_id"),
    ],
)
def test_bad_input_names_the_field(served: Served, body: dict[str, Any], field: str) -> None:
    answer = served.ask(**body)
    assert answer.status_code == 400, answer.text
    assert field in answer.json()["detail"]
    assert served.ask(max_tokens=1).status_code == 200


def test_a_body_that_is_no_json_or_too_large(served: Served) -> None:
    url = f"{served.server.url}/v1/generate"
    assert httpx.post(url, content=b"{").status_code == 400
    assert httpx.post(url, content=b"[]").status_code == 400
    assert httpx.post(url, content=(b" " * 1_000_000 for _ in range(18)), timeout=60).status_code == 413


def test_closed_admission_is_503(served: Served) -> None:
    served.engine.pause("abort", Left())
    answer = served.ask()
    assert (answer.status_code, answer.json()["error"]) == (503, "EngineClosed")
    served.engine.resume()
    assert served.ask().status_code == 200


@pytest.mark.parametrize("steps", [3, 0], ids=["in the middle", "before its first token"])
def test_a_request_cut_by_a_pause_answers_its_tokens_and_its_routes_are_stored_as_aborted(
    served: Served, tmp_path: Path, steps: int
) -> None:
    whole = served.ask(max_tokens=9).json()["token_ids"]
    served.gate.close_after("step", steps)
    asking = Background(lambda: served.ask(rollout_id="a:0:0:0", max_tokens=9, wait_routes=True))
    served.gate.wait_held()
    pausing = Background(lambda: served.engine.pause("abort", Left()))
    wait_until(lambda: served.engine.inspect().paused, what="the pause")
    served.gate.open()
    assert pausing.result().aborted == 1
    answer = asking.result()
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["finish_reason"], body["token_ids"]) == ("abort", whole[:steps])
    rows = 3 + steps - 1 if steps else 0
    assert body["route_ref"]["rows"] == rows
    with Rig(tmp_path, served.broker).running() as store:
        stored = store.find(Question(rollout_key("r", "a:0:0:0", 0))).meta
        assert (stored.status, stored.finish_reason, stored.shape[0]) == ("aborted", "abort", rows)


def test_before_the_broker_is_there_only_routes_are_refused(served: Served) -> None:
    publisher, served.publisher = served.publisher, None
    assert served.ask(rollout_id="a:0:0:0").status_code == 503
    assert served.ask(max_tokens=1).status_code == 200
    served.publisher = publisher
