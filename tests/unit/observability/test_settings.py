from __future__ import annotations

import logging
from pathlib import Path

import pytest

from moebus.observability.settings import load_settings
from moebus.schemas.errors import SettingsError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOEBUS_CONFIG", "MOEBUS_TOPIC_PREFIX", "MOEBUS_KAFKA__BOOTSTRAP_SERVERS"):
        monkeypatch.delenv(name, raising=False)


def test_defaults() -> None:
    settings = load_settings()
    assert settings.kafka.bootstrap_servers == "127.0.0.1:9092"
    assert settings.topic_prefix == "moebus"
    assert settings.http.host == "127.0.0.1"


def test_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.toml"
    file.write_text('topic_prefix = "from-file"\n[kafka]\nbootstrap_servers = "f:1"\nsasl_username = "u"\n')
    monkeypatch.setenv("MOEBUS_KAFKA__BOOTSTRAP_SERVERS", "e:2")
    settings = load_settings(file)
    assert settings.topic_prefix == "from-file"
    assert (settings.kafka.bootstrap_servers, settings.kafka.sasl_username) == ("e:2", "u")
    monkeypatch.setenv("MOEBUS_CONFIG", str(file))
    assert load_settings(kafka={"bootstrap_servers": "o:3"}).kafka.bootstrap_servers == "o:3"


def test_unknown_key_in_the_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text('[kafka]\nbootstrap_server = "x"\n')
    with pytest.raises(SettingsError, match=r"kafka\.bootstrap_server"):
        load_settings(file)


@pytest.mark.parametrize(
    ("text", "match"),
    [("topic_prefix = ''", "topic_prefix"), ("a = = 1", r"m\.toml"), ("[http]\nport = 70000", "port")],
)
def test_bad_files_name_the_fault(tmp_path: Path, text: str, match: str) -> None:
    file = tmp_path / "m.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=match):
        load_settings(file)


def test_missing_file_is_named() -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml"):
        load_settings(Path("nowhere.toml"))


def test_unknown_variable_warns_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MOEBUS_TOPIC_PREFX", "x")
    monkeypatch.setenv("MOEBUS_KAFKA__BOOTSTRAP", "x:1")
    for name in ("MOEBUS_SERVICE_HOST", "MOEBUS_PORT_9092_TCP_ADDR", "MOEBUS_SERVICE_PORT"):
        monkeypatch.setenv(name, "tcp://10.0.0.1:9092")
    monkeypatch.setattr(logging.getLogger("moebus"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="moebus"):
        settings = load_settings()
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "MOEBUS_TOPIC_PREFX" in said
    assert "did you mean MOEBUS_TOPIC_PREFIX" in said
    assert "MOEBUS_KAFKA__BOOTSTRAP_SERVERS" in said
    assert "SERVICE" not in said.replace("BOOTSTRAP_SERVERS", "")
    assert settings.topic_prefix == "moebus"


def test_where_others_reach_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().http.url is None
    monkeypatch.setenv("MOEBUS_HTTP__URL", "http://10.0.0.7:9102/")
    assert load_settings().http.url == "http://10.0.0.7:9102"
    for text in ("10.0.0.7:9102", "http://", "http://u:p@h:1", "http://h:1/path"):
        monkeypatch.setenv("MOEBUS_HTTP__URL", text)
        with pytest.raises(SettingsError, match=r"^setting http\.url: it is not like http://host:port$"):
            load_settings()


def test_a_short_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEBUS_GATEWAY__TOKEN", "short")
    with pytest.raises(SettingsError, match=r"^setting gateway\.token: it must have 8 characters or more$"):
        load_settings()


def test_secrets_do_not_show() -> None:
    settings = load_settings(kafka={"sasl_password": "hunter2"})
    assert "hunter2" not in repr(settings)


def test_quotas_and_cards_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEBUS_STORE__QUOTAS", '{"exp-7": 1000, "*": 50}')
    file = tmp_path / "m.toml"
    file.write_text('[store.cards]\n"exp.7" = "/models/m/config.json"\n')
    settings = load_settings(file)
    assert settings.store.quotas == {"exp-7": 1000, "*": 50}
    assert settings.store.cards == {"exp.7": Path("/models/m/config.json")}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("QUOTAS", '{"a b": 5}'), ("QUOTAS", '{"a": 0}'), ("QUOTAS", '{"a": "much"}'), ("QUOTAS", "[]"),
        ("QUOTAS", "a=5"), ("CARDS", '{"*": "x"}'), ("CARDS", '{"a": 5}'),
    ],
)  # fmt: skip
def test_bad_quotas_and_cards_are_named(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"MOEBUS_STORE__{name}", text)
    with pytest.raises(SettingsError, match=f"(?i)store.{name}|MOEBUS_STORE__{name}"):
        load_settings()
