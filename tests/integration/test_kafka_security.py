"""Everything over TLS with a user and a password, on a real Kafka: writers, readers, groups, admins, the routes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import SecretStr

from moebus.broker import open_broker
from moebus.broker.errors import BrokerUnavailable
from moebus.broker.kafka import KafkaConfig
from moebus.broker.local import LocalCluster, launch
from moebus.broker.local.ports import free_ports
from moebus.broker.local.properties import server_properties
from moebus.broker.local.state import Node
from moebus.broker.ports import TopicPartition
from moebus.broker.topics import Topics, ensure
from moebus.consumers import RoutingReader
from moebus.observability.settings import KafkaSettings, Settings
from moebus.producers import RoutingPublisher
from tests.contract.log_world import put, read, values
from tests.support.routes import CARD, make_routes
from tests.support.store_http import serving

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(180)]
WAIT = 60.0
_LOGIN = 'org.apache.kafka.common.security.plain.PlainLoginModule required user_me="right";'


class Secured:
    """A cluster with one more listener, for TLS and a password."""

    def __init__(self, folder: Path) -> None:
        self.authority = folder / "cert.pem"
        key, both = folder / "key.pem", folder / "server.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=moebus",
             "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(self.authority)],
            check=True, capture_output=True,
        )  # fmt: skip
        both.write_text(key.read_text() + self.authority.read_text())
        (self.port,) = free_ports(1)
        self._lines = {
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL",
            "listener.name.secure.plain.sasl.jaas.config": _LOGIN,
            "listener.name.secure.ssl.keystore.type": "PEM",
            "listener.name.secure.ssl.keystore.location": str(both),
        }

    def properties(self, node: Node, nodes: Sequence[Node]) -> str:
        """What a node is given, and the listener besides: the last line of a name counts."""
        secure = f"SECURE://127.0.0.1:{self.port}"
        lines = {
            **self._lines,
            "listeners": f"PLAINTEXT://{node.address},CONTROLLER://127.0.0.1:{node.controller_port},{secure}",
            "advertised.listeners": f"PLAINTEXT://{node.address},{secure}",
        }
        return server_properties(node, nodes) + "".join(f"{name}={value}\n" for name, value in lines.items())

    def settings(self, password: str = "right") -> KafkaSettings:
        return KafkaSettings(
            bootstrap_servers=f"127.0.0.1:{self.port}", security_protocol="SASL_SSL", sasl_mechanism="PLAIN",
            sasl_username="me", sasl_password=SecretStr(password), ssl_cafile=self.authority,
        )  # fmt: skip


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("certificates"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "server_properties", made.properties)
        with LocalCluster.start(tmp_path_factory.mktemp("kafka"), die_with_parent=True):
            yield made


def test_records_of_any_size_and_a_group(secured: Secured) -> None:
    broker = open_broker(secured.settings())
    admin = broker.admin()
    assert admin.create("plain", partitions=1, replication=1, config={})
    sent = [bytes([n]) * size for n, size in enumerate((1, 70_000, 890_000, 0, 890_000, 16_384))]
    put(broker.writer("w"), "plain", sent)
    reader = broker.reader("r")
    reader.assign({TopicPartition("plain", 0): 0})
    assert values(read(reader, len(sent))) == sent
    member = broker.group_reader("m", "group", ["plain"])
    assert values(read(member, len(sent))) == sent
    member.commit({TopicPartition("plain", 0): 3})
    assert member.committed(TopicPartition("plain", 0)) == 3
    admin.close()
    broker.close()


def test_routes_from_the_publisher_to_the_trainer(secured: Secured, tmp_path: Path) -> None:
    settings = Settings(kafka=secured.settings(), topic_prefix="t", run="run")
    topics, broker = Topics(settings.topic_prefix), open_broker(settings.kafka)
    ensure(broker.admin(), topics, routes_partitions=2)
    sent = {f"d{n}:0:0:0": make_routes(1 + 50_000 * n, seed=n) for n in range(5)}
    with (
        serving(broker, topics, tmp_path / "store"),
        RoutingPublisher.from_settings(card=CARD, settings=settings, mode="process") as publisher,
        RoutingReader(broker, topics, run="run") as trainer,
    ):
        refs = [publisher.submit(routes, name).ref for name, routes in sent.items()]
        assert publisher.flush(WAIT)
        assert np.array_equal(trainer.resolve(refs, wait=WAIT).routes, np.concatenate(list(sent.values())))
        streamed = {item.ref.rollout_id: item.rollout.routes for item in trainer.rollouts("group", idle_timeout=2)}
        assert streamed.keys() == sent.keys()
        assert all(np.array_equal(streamed[name], routes) for name, routes in sent.items())
    broker.close()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [("password", "Invalid username or password"), ("certificate", "CERTIFICATE_VERIFY_FAILED")],
)
def test_what_is_wrong_is_told_without_the_password(secured: Secured, wrong: str, reason: str) -> None:
    config = KafkaConfig.of(secured.settings("no-secret" if wrong == "password" else "right"))
    broker = open_broker(config if wrong == "password" else replace(config, ssl_cafile=None))
    with pytest.raises(BrokerUnavailable, match="security settings") as caught:
        broker.admin().cluster_id(1.0)
    assert reason in str(caught.value)
    assert "no-secret" not in str(caught.value)
    broker.close()
