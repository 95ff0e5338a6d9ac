"""Services that are started wrongly say so before they open anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from moebus.cli._service import Service
from moebus.cli.main import app
from moebus.consumers.store import StoreOptions
from moebus.schemas.errors import InvalidInput
from tests.support.routes import CARD


@pytest.mark.parametrize("service", [["worker", "--engine", "simulated", "--worker-id", "w1"], ["store"]])
@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_a_port_that_is_none(service: list[str], port: str) -> None:
    result = CliRunner().invoke(app, [*service, "--http-port", port])
    assert result.exit_code == 2
    assert "--http-port" in result.output


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["worker", "--engine", "simulated", "--worker-id", "a b"], "worker_id"),
        (["worker", "--engine", "simulated", "--worker-id", "all"], "worker_id"),
        (["worker", "--engine", "simulated", "--worker-id", "w1", "--label", "x"], "label"),
        (["doctor", "--engine-url", "nonsense"], "engine_url"),
        (["store", "--store-id", "a b"], "store_id"),
        (["store", "--partitions", "3-1"], "partitions"),
        (["store", "--quota", "exp-7"], "quota"),
        (["store", "--quota", "exp-7=0"], "quota"),
        (["store", "--quota", "exp-7=10G"], "quota"),
        (["store", "--quota", "a b=10"], "run"),
        (["store", "--quota", "exp-7=10", "--quota", "exp-7=20"], "quota"),
        (["store", "--blobs-endpoint", "http://127.0.0.1:9000"], "store.blobs_endpoint"),
        (["store", "--blobs", "file:///tmp/b", "--blobs-endpoint", "http://127.0.0.1:9000"], "store.blobs_endpoint"),
        (["store", "--card", "exp-7="], "card"),
        (["store", "--card", "*=config.json"], "run"),
        (["store", "--card", "exp-7=/nowhere/config.json"], "store.cards"),
    ],
)
def test_the_option_is_named(arguments: list[str], field: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"moebus: {field}: ")
    assert "service.started" not in result.output


@pytest.mark.parametrize("arguments", [["broker", "up", "--dir"], ["demo", "--dir"]])
def test_a_folder_that_cannot_be_made(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*arguments, "/proc/none/here"])
    assert result.exit_code == 1
    assert result.stderr.startswith("moebus: /proc/none")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("engine", "options", "field"),
    [
        ("vllm", "", "--engine-url"),
        ("sglang", "", "--engine-url"),
        ("fastdeploy", "", "--engine-url"),
        ("vllm", "--engine-url 127.0.0.1:8000", "engine_url"),
        ("vllm", "--engine-url http://h --seed 3", "--seed"),
        ("vllm", "--engine-url http://h --version v", "--version"),
        ("vllm", "--engine-url http://h --weights x", "--weights"),
        ("vllm", "--engine-url http://h --model-config x", "--model-config"),
        ("vllm", "--engine-url http://h --engine-token-file /no", "--engine-token-file /no"),
        ("simulated", "--engine-url http://h", "--engine-url"),
        ("simulated", "--engine-token-file t", "--engine-token-file"),
        ("simulated", "--weights x", "--weights"),
        ("paddle", "--engine-url http://h", "--engine-url"),
    ],
)
def test_options_of_another_kind_of_engine(engine: str, options: str, field: str) -> None:
    result = CliRunner().invoke(app, ["worker", "--engine", engine, "--worker-id", "w1", *options.split()])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"moebus: {field}: ")
    assert len(result.stderr.splitlines()) == 1


def test_quotas_and_cards_reach_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[StoreOptions] = []

    class Caught:
        def __init__(self, service: Service, *given: object) -> None:
            made.append(StoreOptions.of(service.settings.store))
            raise InvalidInput("caught", "the store is not run")

    card = tmp_path / "card.json"
    card.write_text(CARD.to_json())
    monkeypatch.setattr("moebus.cli._store.StoreService", Caught)
    monkeypatch.setenv("MOEBUS_STORE__QUOTAS", '{"exp-7": 1, "other": 2}')
    result = CliRunner().invoke(app, ["store", "--quota", "exp-7=80", "--quota", "*=16", "--card", f"exp-7={card}"])
    assert "caught" in result.output + result.stderr
    assert made[0].quotas == {"exp-7": 80, "other": 2, "*": 16}  # the command line over the environment
    assert made[0].rules.cards == {"exp-7": CARD.digest}
