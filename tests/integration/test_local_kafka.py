"""The local Kafka runner against the real thing."""

from __future__ import annotations

import pytest

from moebus.broker.local import LocalCluster

pytestmark = pytest.mark.kafka


def test_the_shared_broker_runs(kafka_broker: LocalCluster) -> None:
    assert kafka_broker.running()
    assert kafka_broker.bootstrap.startswith("127.0.0.1:")
