"""The store on a real Apache Kafka."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.ports import OutRecord, TopicPartition
from moebus.broker.topics import Topics, ensure
from moebus.producers import RoutingPublisher
from moebus.schemas.model_card import ModelCard
from tests.support.routes import make_routes
from tests.support.store_http import OPTIONS, serving

pytestmark = pytest.mark.kafka
CARD = ModelCard(128, 8, tuple(range(24)))
TRIES = {"wait": 20}


def test_publish_restart_delete(kafka_broker: LocalCluster, topic_prefix: str, tmp_path: Path) -> None:
    broker = open_broker(kafka_broker.bootstrap)
    topics = Topics(topic_prefix)
    ensure(broker.admin(), topics, routes_partitions=3)
    routes = {f"a:{turn}:0:0": make_routes(8_000, CARD, turn) for turn in (1, 10)}
    options = replace(OPTIONS, sync=True)
    with RoutingPublisher(broker, topics, run="run", card=CARD) as publisher:
        for rollout_id, rows in routes.items():
            publisher.submit(rows, rollout_id)
        assert publisher.flush(30)
        with serving(broker, topics, tmp_path, options=options) as http:
            for rollout_id, rows in routes.items():
                np.testing.assert_array_equal(_load(http.url, rollout_id), rows)
        broker.writer("x").append(OutRecord(topics.routes, b"not a record", None, (), 1)).result(10)
        publisher.delete("a:1").result(30)
    with serving(broker, topics, tmp_path, options=options) as http:
        np.testing.assert_array_equal(_load(http.url, "a:10:0:0"), routes["a:10:0:0"])
        gone = httpx.get(f"{http.url}/v1/routes/run/a:1:0:0", params=TRIES, timeout=30)
        assert (gone.status_code, gone.json()["error"]) == (410, "RouteDeleted")
        figures = httpx.get(f"{http.url}/v1/store").json()["partitions"]
        assert sum(one["rollouts"] for one in figures.values()) == 1
        assert (
            httpx.delete(f"{http.url}/v1/routes", params={"run": "run", "prefix": "a"}, timeout=30).status_code == 200
        )
    dead = broker.admin().end_offsets([TopicPartition(topics.dlt, 0)])
    assert list(dead.values()) == [1]
    broker.close()


def _load(url: str, rollout_id: str) -> np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]:
    response = httpx.get(f"{url}/v1/routes/run/{rollout_id}", params=TRIES, timeout=30)
    assert response.status_code == 200, response.text
    loaded: np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]
    loaded = np.load(io.BytesIO(response.content), allow_pickle=False)
    return loaded
