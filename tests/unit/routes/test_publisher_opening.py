"""`from_settings`: a process where that is possible, refusals by name where it was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moebus.broker.kafka import KafkaConfig
from moebus.observability.settings import KafkaSettings, PublisherSettings, Settings
from moebus.producers.routing import RoutingPublisher, opening
from moebus.producers.routing.jobs import Wire
from moebus.producers.routing.process.config import ChildConfig
from moebus.producers.routing.publisher import Mode
from moebus.producers.routing.sender import ThreadSender
from moebus.schemas.errors import SettingsError
from tests.support.routes import CARD


def settings(**publisher: object) -> Settings:
    return Settings(
        kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"), publisher=PublisherSettings.model_validate(publisher)
    )


def opened(found: Settings, mode: Mode | None = None) -> str:
    publisher = RoutingPublisher.from_settings(card=CARD, run="r", settings=found, mode=mode)
    kind = type(publisher._sender).__name__
    assert publisher.close(0) == []
    return kind


def test_a_process_by_default_and_a_thread_on_demand() -> None:
    assert opened(settings()) == "ProcessSender"
    assert opened(settings(mode="thread")) == ThreadSender.__name__
    assert opened(settings(mode="process"), mode="thread") == ThreadSender.__name__


def test_a_thread_where_no_process_can_be(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with caplog.at_level("WARNING"):
        assert opened(settings()) == ThreadSender.__name__
    assert "thread of this process" in caplog.text
    for asked in ({"mode": "process"}, {"journal": "/dev/shm/never-made"}, {"max_bytes": 1 << 20}):
        with pytest.raises(SettingsError, match=r"publisher\.mode"):
            opened(settings(**asked))


def test_a_size_that_does_not_fit_is_refused_also_in_auto(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"publisher\.max_bytes"):
        opened(settings(max_bytes=1 << 60, journal=tmp_path / "j"))


def test_wrong_kafka_settings_are_refused_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "open_place", lambda *arguments: pytest.fail("opened a journal"))
    with pytest.raises(SettingsError, match="bootstrap_servers"):
        opened(Settings(kafka=KafkaSettings(bootstrap_servers="not an address")))


def test_the_child_gets_the_secret_and_nobody_sees_it() -> None:
    found = Settings.model_validate(
        {
            "kafka": {
                "security_protocol": "SASL_SSL",
                "sasl_mechanism": "PLAIN",
                "sasl_username": "u",
                "sasl_password": "geheim",
                "ssl_cafile": "/ca.pem",
            }
        }
    )
    config = ChildConfig.of(found, found.publisher, Wire("topic", "producer"))
    again = ChildConfig.load(config.dump())
    assert again.kafka_config == KafkaConfig.of(found.kafka)
    assert again.wire == Wire("topic", "producer")
