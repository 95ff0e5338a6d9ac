"""Settings of the Kafka clients."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from moebus.broker.kafka import KafkaConfig
from moebus.broker.kafka.config import group_options, producer_options, reader_options
from moebus.broker.kafka.selector import QuickSelector
from moebus.observability.settings import KafkaSettings
from moebus.schemas.errors import SettingsError


def test_security_is_passed_through_and_what_is_not_given_is_left_out() -> None:
    settings = KafkaSettings(
        bootstrap_servers="a:1, b:2",
        security_protocol="SASL_SSL",
        sasl_mechanism="SCRAM-SHA-512",
        sasl_username="me",
        sasl_password=SecretStr("secret"),
        ssl_cafile=Path("/ca.pem"),
    )
    config = KafkaConfig.of(settings)
    assert config.client("name") == {
        "bootstrap_servers": ["a:1", "b:2"],
        "client_id": "name",
        "reconnect_backoff_max_ms": 1000,
        "selector": QuickSelector,
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "me",
        "sasl_plain_password": "secret",
        "ssl_cafile": "/ca.pem",
    }
    assert "secret" not in repr(config)
    assert KafkaConfig.of("h:9").security() == {}
    assert KafkaConfig.of(config) is config


@pytest.mark.parametrize("servers", ["", "a:b", "a:1,", "a b:1", "a:123456", "http://a:1"])
def test_bad_addresses(servers: str) -> None:
    with pytest.raises(SettingsError, match=r"kafka\.bootstrap_servers"):
        KafkaConfig(servers)


@pytest.mark.parametrize("servers", ["localhost", "a:1", "10.0.0.1:9092,[::1]:9093"])
def test_good_addresses(servers: str) -> None:
    assert KafkaConfig(servers).bootstrap_servers == servers


def test_bad_security() -> None:
    with pytest.raises(SettingsError, match=r"kafka\.security_protocol: 'TLS'"):
        KafkaConfig(security_protocol="TLS")
    with pytest.raises(SettingsError, match=r"kafka\.sasl_mechanism"):
        KafkaConfig(security_protocol="SASL_PLAINTEXT")


def test_missing_certificates(tmp_path: Path) -> None:
    there = tmp_path / "ca.pem"
    there.write_text("")
    KafkaConfig(ssl_cafile=str(there)).check_files()
    with pytest.raises(SettingsError, match=r"kafka\.ssl_keyfile: there is no file .*key\.pem"):
        KafkaConfig(ssl_cafile=str(there), ssl_keyfile=str(tmp_path / "key.pem")).check_files()


def test_the_settings_that_losses_depend_on() -> None:
    producer = producer_options(5.0)
    assert (producer["acks"], producer["enable_idempotence"]) == ("all", True)
    assert producer["delivery_timeout_ms"] == 86_400_000
    reader, member = reader_options(0.5, 5.0), group_options("g", 10.0, 5.0)
    for options in (reader, member):
        assert (options["auto_offset_reset"], options["enable_auto_commit"]) == ("none", False)
        assert options["fetch_max_wait_ms"] == 500
        assert options["request_timeout_ms"] == 6_000
    assert reader_options(5.0, 5.0)["request_timeout_ms"] == 10_000
    assert (member["session_timeout_ms"], member["heartbeat_interval_ms"]) == (10_000, 3_000)
