"""The demo uses the broker that was named, also where that is the default's address; else it starts one."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.main import get_command

from moebus.cli._context import Globals, broker_named, settings_of
from moebus.cli.main import app
from moebus.observability.settings import KafkaSettings

DEFAULT = KafkaSettings().bootstrap_servers


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOEBUS_KAFKA__BOOTSTRAP_SERVERS", "MOEBUS_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def named(given: Globals) -> bool:
    ctx = typer.Context(get_command(app), obj=given)
    return broker_named(ctx, settings_of(ctx))


def test_none() -> None:
    assert not named(Globals())


def test_by_an_option() -> None:
    assert named(Globals(bootstrap=DEFAULT))


def test_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEBUS_KAFKA__BOOTSTRAP_SERVERS", DEFAULT)
    assert named(Globals())


def test_by_a_file(tmp_path: Path) -> None:
    file = tmp_path / "moebus.toml"
    file.write_text('[kafka]\nbootstrap_servers = "10.0.0.1:9092"\n')
    assert named(Globals(config=file))
