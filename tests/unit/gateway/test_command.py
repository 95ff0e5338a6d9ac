"""`moebus gateway` that is started wrongly says so before it opens anything."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from moebus.cli._gateway import check_exposure, legacy_of
from moebus.cli.main import app
from moebus.observability.settings import load_settings


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--http-host", "0.0.0.0"], {}, "the gateway does not listen on 0.0.0.0 without a token"),
        (["--http-host", "::"], {}, "the gateway does not listen on :: without a token"),
        (["--http-host", "gateway.example"], {}, "the gateway does not listen on gateway.example without a token"),
        ([], {"MOEBUS_GATEWAY__TOKEN": "short"}, "setting gateway.token: "),
        ([], {"FD_ENABLE_V1_UPDATE_WEIGHTS": "true"}, "FD_ENABLE_V1_UPDATE_WEIGHTS: 0 or 1 is needed, not 'true'"),
        ([], {"MOEBUS_GATEWAY__LEGACY_SUFFIXES": '["../x"]'}, "setting gateway.legacy_suffixes: "),
    ],
)
def test_one_sentence_and_exit_code_2(arguments: list[str], environment: dict[str, str], said: str) -> None:
    result = CliRunner().invoke(app, ["gateway", *arguments], env=environment)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"moebus: {said}")
    assert "short" not in result.stderr
    assert "service.started" not in result.output


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_that_is_none(port: str) -> None:
    result = CliRunner().invoke(app, ["gateway", "--http-port", port])
    assert result.exit_code == 2
    assert "--http-port" in result.output


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    check_exposure(load_settings(http={"host": host}))


def test_with_a_token_it_listens_anywhere_and_keeps_it_to_itself() -> None:
    settings = load_settings(http={"host": "0.0.0.0"}, gateway={"token": "a long secret", "legacy_suffixes": ("8132",)})
    check_exposure(settings)
    assert "a long secret" not in repr(settings)
    assert legacy_of(settings, over_log=False).suffixes == ("8132",)
