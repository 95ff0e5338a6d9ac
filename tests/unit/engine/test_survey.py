"""What a rollout server is, and what it lacks; and `moebus doctor` on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from moebus.broker.memory import MemoryBroker
from moebus.broker.topics import Topics, ensure
from moebus.engine.port import EngineUnauthorized, EngineUnreachable
from moebus.engine.survey import NoServer, Survey, survey
from moebus.schemas.errors import InvalidInput
from tests.support.cli import MemoryCli
from tests.support.stand_ins import fastdeploy, sglang
from tests.support.stand_ins.shared import shared
from tests.support.stand_ins.vllm import VllmStandIn
from tests.support.stand_ins.vllm_core import Bugs


def serving(answers: dict[str, Any]) -> FastAPI:
    """A server that answers with these."""
    app = FastAPI()
    for path, body in answers.items():
        app.get(path)(lambda body=body: body)
    return app


def vllm(dev: bool = True, **model: bool) -> FastAPI:
    """As `/server_info?config_format=json` of vLLM's dev mode."""
    answers: dict[str, Any] = {"/version": {"version": "0.18.0"}}
    answers["/v1/models"] = {"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]}
    if dev:
        answers["/server_info"] = {"vllm_config": {"model_config": {"model": "m", **model}}}
    return serving(answers)


def look(app: FastAPI, token: SecretStr | None = None) -> Survey:
    with shared(app) as running:
        return survey(running.url, token)


def test_vllm_without_dev_mode() -> None:
    found = look(vllm(dev=False))
    assert (found.kind, found.version) == ("vllm", "0.18.0")
    (lack,) = found.lacks
    assert lack.serious
    assert lack.launch == "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL ..."


@pytest.mark.parametrize(
    ("model", "launches"),
    [
        ({"enable_sleep_mode": True, "enable_return_routed_experts": True}, []),
        (
            {"enable_sleep_mode": False, "enable_return_routed_experts": False},
            [
                "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL ... --enable-sleep-mode",
                "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL ... --enable-return-routed-experts",
            ],
        ),
        ({}, []),
    ],
)
def test_vllm(model: dict[str, bool], launches: list[str]) -> None:
    found = look(vllm(**model))
    assert [lack.launch for lack in found.lacks] == launches
    assert len(found.notes) == 2 - len(launches)
    assert all(("does not tell" in note) == (not model) for note in found.notes)


@pytest.mark.parametrize("sleep_mode", [True, False])
def test_vllms_stand_in(sleep_mode: bool) -> None:
    server = VllmStandIn(Bugs(no_sleep_mode=not sleep_mode))
    try:
        found = survey(server.url)
    finally:
        server.kill()
    assert found.kind == "vllm"
    assert [lack.serious for lack in found.lacks] == ([] if sleep_mode else [True])


def test_sglang_with_everything() -> None:
    found = look(sglang.application(sglang.StandIn(cpu_backup=True)))
    assert (found.kind, found.version, found.lacks) == ("sglang", "0.5.19", ())


def test_sglang_with_nothing() -> None:
    at = sglang.StandIn(memory_saver=False, routed_experts=False, tokenizers=4)
    found = look(sglang.application(at))
    assert [lack.launch.rpartition(" ")[2] for lack in found.lacks] == [
        "--enable-memory-saver", "--enable-weights-cpu-backup", "--enable-return-routed-experts",
    ]  # fmt: skip
    assert found.lacks[0].launch == "python -m sglang.launch_server --model-path /models/m ... --enable-memory-saver"
    assert [lack.serious for lack in found.lacks] == [True, False, False]
    assert "4 tokenizer processes" in found.notes[-1]
    assert at.calls == []


def test_an_older_sglang() -> None:
    found = look(
        serving({"/get_server_info": {"internal_states": [{}], "version": "0.4.9", "enable_memory_saver": True}})
    )
    assert (found.kind, found.version) == ("sglang", "0.4.9")


def test_fastdeploy_with_everything() -> None:
    found = look(fastdeploy.application(fastdeploy.StandIn()))
    assert (found.kind, found.version, found.lacks) == ("fastdeploy", None, ())
    assert "cannot sleep" in found.notes[-1]


def test_fastdeploy_with_nothing() -> None:
    at = fastdeploy.StandIn(dynamic=False, v1=False, routing=False, strategy="normal")
    found = look(fastdeploy.application(at))
    assert [lack.serious for lack in found.lacks] == [True, True, False]
    for part in ("FD_ENABLE_V1_UPDATE_WEIGHTS=1", "--dynamic-load-weight", "--routing-replay-config"):
        assert part in found.lacks[0].launch
    assert at.calls == []


def test_fastdeploy_that_shows_its_configuration_elsewhere() -> None:
    with shared(fastdeploy.application(fastdeploy.StandIn())) as running:
        running.faults.answer["/config-info"] = (404, b"{}")
        found = survey(running.url)
    assert (found.kind, found.lacks) == ("fastdeploy", ())
    assert "--metrics-port" in found.notes[0]


def test_a_fastdeploy_before_the_control_calls() -> None:
    found = look(serving({"/v1/models": {"data": [{"id": "m", "owned_by": "FastDeploy"}]}}))
    assert [lack.serious for lack in found.lacks] == [True]


@pytest.mark.parametrize(
    "answers",
    [{}, {"/v1/models": {"data": []}}, {"/v1/models": {"data": [{"owned_by": "me"}]}}, {"/v1/models": [1]}],
)
def test_something_else(answers: dict[str, Any]) -> None:
    with pytest.raises(NoServer, match="neither vLLM nor SGLang nor FastDeploy"):
        look(serving(answers))


def test_a_token() -> None:
    with shared(sglang.application(sglang.StandIn())) as running:
        running.faults.token = "right"
        for token in (None, SecretStr("wrong")):
            with pytest.raises(EngineUnauthorized):
                survey(running.url, token)
        assert survey(running.url, SecretStr("right")).kind == "sglang"


def test_a_server_that_hangs() -> None:
    with shared(sglang.application(sglang.StandIn())) as running:
        running.faults.hold.add("/server_info")
        with pytest.raises(EngineUnreachable, match="within"):
            survey(running.url, within=0.1)


def test_bad_addresses() -> None:
    with pytest.raises(EngineUnreachable):
        survey("http://127.0.0.1:9")
    with pytest.raises(InvalidInput, match="engine_url"):
        survey("127.0.0.1:8000")


# -- the command


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryCli]:
    """With a broker where all is well."""
    broker = MemoryBroker()
    ensure(broker.admin(), Topics("t"))
    yield MemoryCli(broker, "t", monkeypatch)
    broker.close()


def test_the_command_names_what_is_missing(cli: MemoryCli) -> None:
    with shared(sglang.application(sglang.StandIn(memory_saver=False, cpu_backup=True))) as running:
        ran = cli.run("doctor", "--engine-url", running.url)
        assert ran.code == 1
        assert f"ok       engine    sglang 0.5.19 at {running.url}\n" in ran.out
        assert "problem  engine    the server lacks the memory saver" in ran.out
        assert (
            "-> start it with: python -m sglang.launch_server --model-path /models/m ... --enable-memory-saver"
            in ran.out
        )
        lines = cli.run("doctor", "--engine-url", running.url, "--json").lines
        assert [line["status"] for line in lines if line["check"] == "engine"].count("problem") == 1


def test_warnings_are_no_problem(cli: MemoryCli) -> None:
    with shared(sglang.application(sglang.StandIn())) as running:
        ran = cli.run("doctor", "--engine-url", running.url, "--engine", "sglang")
    assert ran.code == 0
    assert "warning  engine    the server lacks a host copy of the weights" in ran.out


def test_another_server_than_expected(cli: MemoryCli) -> None:
    with shared(sglang.application(sglang.StandIn())) as running:
        ran = cli.run("doctor", "--engine-url", running.url, "--engine", "vllm")
    assert ran.code == 1
    assert "is sglang, not vllm" in ran.out


def test_a_token_from_a_file(cli: MemoryCli, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right\n")
    with shared(sglang.application(sglang.StandIn())) as running:
        running.faults.token = "right"
        assert "--engine-token-file FILE" in cli.run("doctor", "--engine-url", running.url).out
        told = ("--engine-token-file", str(tmp_path / "token"))
        ran = cli.run("doctor", "--engine-url", running.url, *told)
        assert ran.code == 0
        assert "right" not in ran.out
        missing = cli.run("doctor", "--engine-url", running.url, "--engine-token-file", "/none")
    assert (missing.code, "/none" in missing.out) == (1, True)


@pytest.mark.parametrize("url", ["ftp://x", "http://u:p@h"])
def test_no_address(cli: MemoryCli, url: str) -> None:
    ran = cli.run("doctor", "--engine-url", url)
    assert ran.code == 2
    assert ran.err.startswith("moebus: engine_url: ")


def test_no_server(cli: MemoryCli) -> None:
    ran = cli.run("doctor", "--engine-url", "http://127.0.0.1:9")
    assert ran.code == 1
    assert "problem  engine" in ran.out
