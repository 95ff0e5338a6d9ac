"""KafkaAdmin tries again until its timeout, on a client that fails as kafka-python does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from moebus.broker.errors import AdminRefused, BrokerUnavailable
from moebus.broker.kafka import KafkaConfig
from moebus.broker.kafka import admin as module
from moebus.broker.kafka.admin import KafkaAdmin

ERRORS: Any = module.__dict__["kafka_errors"]  # kafka-python warns where it is imported first


class Client:
    """Fails with the errors given, one a request, then answers."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors = errors
        self.asked = 0
        self.closed = False

    def describe_cluster(self) -> dict[str, object]:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return {"cluster_id": "c1", "brokers": [1]}

    def close(self) -> None:
        self.closed = True


Made = Callable[[list[Exception]], tuple[KafkaAdmin, list[Client]]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    def make(errors: list[Exception]) -> tuple[KafkaAdmin, list[Client]]:
        clients: list[Client] = []

        def connect(config: KafkaConfig, timeout: float) -> Client:
            assert timeout > 0
            clients.append(Client(errors))
            return clients[-1]

        monkeypatch.setattr(module, "make_admin", connect)
        return KafkaAdmin(KafkaConfig("127.0.0.1:1")), clients

    return make


@pytest.mark.parametrize(
    "error",
    [
        ERRORS.KafkaConnectionError("reset by peer"),
        ERRORS.NodeNotReadyError(),
        ERRORS.UnknownBrokerIdError(-1),
        RuntimeError("closed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_connection_that_breaks_is_made_again(made: Made, error: Exception) -> None:
    admin, clients = made([error, error])
    assert admin.cluster_id(10.0) == "c1"
    assert [client.asked for client in clients] == [1, 1, 1]


def test_the_whole_timeout_is_used_and_then_it_is_said(made: Made) -> None:
    admin, clients = made([ERRORS.KafkaConnectionError("reset by peer")] * 1000)
    started = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=r"within 0\.8 s .*reset by peer"):
        admin.cluster_id(0.8)
    assert 0.2 < time.monotonic() - started < 5.0
    assert len(clients) >= 3


def test_a_refusal_is_said_at_once(made: Made) -> None:
    admin, clients = made([ERRORS.ClusterAuthorizationFailedError()])
    with pytest.raises(AdminRefused, match="ClusterAuthorizationFailed"):
        admin.cluster_id(10.0)
    assert [client.asked for client in clients] == [1]
