"""kill -9 of a store between the bytes of a batch and its index, on a real Kafka and a real S3 server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.topics import Topics
from moebus.consumers.reader import RoutingReader
from moebus.producers import RoutingPublisher
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.model_card import ModelCard
from tests.support.blob_world import S3Server
from tests.support.moto_state import objects_of
from tests.support.processes import Launcher, Service, launcher
from tests.support.routes import make_routes
from tests.support.s3_proxy import S3Proxy
from tests.support.wait import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]
CARD = ModelCard(128, 8, tuple(range(12)))


class World:
    """One bucket behind a proxy, one store process at a time, one publisher, one reader."""

    def __init__(self, fleet: Launcher, bootstrap: str, s3: S3Server, proxy: S3Proxy) -> None:
        self.proxy = proxy
        self.bucket = s3.bucket()
        self.fleet = fleet
        self.broker = open_broker(bootstrap)
        topics = Topics(fleet.prefix)
        self.publisher = RoutingPublisher(self.broker, topics, run="run", card=CARD)
        self.reader = RoutingReader(self.broker, topics, run="run")
        self.sent: dict[str, RouteArray] = {}

    def store(self) -> Service:
        where = ("--blobs", f"s3://{self.bucket}/routes", "--blobs-endpoint", self.proxy.url)
        return self.fleet.store("store-1", *where)

    def send(self, *names: str) -> None:
        for name in names:
            self.sent[name] = make_routes(2_000, CARD, len(self.sent))
            self.publisher.submit(self.sent[name], name)
        assert self.publisher.flush(30)

    def check(self) -> None:
        """Everything sent is there."""
        for name, routes in self.sent.items():
            np.testing.assert_array_equal(self.reader.get(name, wait=30).routes, routes)

    def blobs(self) -> list[str]:
        """Not the marker, not the probe."""
        return [name for name in objects_of(self.bucket) if name.count("/") == 6]

    def close(self) -> None:
        self.reader.close()
        self.publisher.close(10)
        self.broker.close()


@pytest.fixture
def world(
    kafka_broker: LocalCluster, topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    s3 = S3Server()
    proxy = S3Proxy(s3.endpoint)
    with launcher(tmp_path, kafka_broker.bootstrap, topic_prefix) as fleet:
        assert fleet.run("topics", "ensure").returncode == 0
        made = World(fleet, kafka_broker.bootstrap, s3, proxy)
        try:
            yield made
        finally:
            made.close()
            proxy.close()
    s3.stop()


def test_kill_between_the_bytes_and_the_index(world: World) -> None:
    first = world.store()
    first.wait_log("service.ready")
    world.send("a:0", "a:1")
    world.check()
    held = set(world.blobs())
    assert held
    world.proxy.hold()
    world.send("b:0", "b:1", "b:2")
    wait_until(lambda: world.proxy.held["PUT"] >= 1, 30, "bytes of the batch behind the server")
    first.kill9()
    orphans = set(world.blobs()) - held
    assert orphans
    world.proxy.release()
    second = world.store()
    second.wait_log("service.ready")
    world.check()
    wait_until(lambda: not orphans & set(world.blobs()), 30, "the orphans to be swept")
    assert held <= set(world.blobs())
    world.check()
    for prefix in ("a", "b"):
        world.publisher.delete(prefix).result(30)
    wait_until(lambda: world.blobs() == [], 30, "nothing to be left")
    assert second.terminate() == 0


def test_an_outage_is_said_and_waited_out_and_a_stop_waits_for_nobody(world: World) -> None:
    world.proxy.refuse = (403, b"SignatureDoesNotMatch", b"The keys are wrong")
    store = world.store()
    store.wait_log("SignatureDoesNotMatch")
    url = _url(store)
    world.send("a:0")
    ready = wait_until(lambda: _reason(url, "takes nothing in"), 30, "the store to say that it stands")
    assert "The keys are wrong" in ready
    assert f"s3://{world.bucket}/routes" in ready
    assert "testing" not in store.text()  # no credentials in the log
    world.proxy.refuse = None
    world.proxy.delay = 0.2
    world.check()
    wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 200, 30, "the store to be ready")
    world.proxy.hold()
    world.send("b:0")
    wait_until(lambda: world.proxy.held["PUT"] >= 1, 30, "a PUT without an answer")
    assert store.terminate(20) == 0
    world.proxy.release()
    world.store().wait_log("service.ready")
    world.check()


def _url(store: Service) -> str:
    """Of its page, from its log."""
    store.wait_log("service.started")
    line = next(line for line in store.text().splitlines() if "service.started" in line)
    return str(json.loads(line)["url"])


def _reason(url: str, text: str) -> str:
    found = httpx.get(f"{url}/readyz").text
    return found if text in found else ""
