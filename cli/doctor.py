"""`moebus doctor`: what is wrong here, and what to do about it."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from moebus.broker.topics import Topics
from moebus.cli import _context
from moebus.cli._doctor import Check, Finding, Status, examine
from moebus.cli._output import JsonFlag, emit, out
from moebus.engine.port import EngineUnauthorized, EngineUnreachable
from moebus.observability.settings import Settings
from moebus.schemas.errors import InvalidInput, MoebusError, SettingsError

PROBLEM, NO_BROKER = 1, 5
_ENGINE_S = 20.0
CLOSE_S = 5.0
_COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red", "skipped": "dim"}


class ServerKind(str, Enum):
    """Servers that a worker drives over HTTP."""

    VLLM = "vllm"
    SGLANG = "sglang"
    FASTDEPLOY = "fastdeploy"


def command(
    ctx: typer.Context,
    engine_url: Annotated[
        str | None, typer.Option("--engine-url", help="Also look at the rollout server at this address.")
    ] = None,
    engine: Annotated[
        ServerKind | None, typer.Option("--engine", help="Which server it has to be; found out without it.")
    ] = None,
    engine_token_file: Annotated[
        Path | None, typer.Option("--engine-token-file", help="File with the bearer token of that server.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Look at this machine, the broker, the topics and an engine's server; say what is wrong and how to put it right.

    Changes nothing; it appends one empty record to the members topic to learn the broker's time. Each check has a time
    limit of its own. Exit codes: 0 no problem (warnings are none), 1 a problem, 5 no broker answers.

    Examples: `moebus doctor`, `moebus doctor --engine-url http://127.0.0.1:30000`
    """
    if engine_url is None and (engine is not None or engine_token_file is not None):
        raise InvalidInput("engine_url", "--engine and --engine-token-file need --engine-url")
    if engine_url is not None:
        from moebus.engine.http import check_url  # here: httpx takes its time

        check_url(engine_url)
    doctor = _Doctor(ctx, engine_url, engine, engine_token_file)
    findings = []
    try:
        for finding in examine(doctor.checks()):
            findings.append(finding)
            emit(finding.as_dict(), as_json=as_json)
            if not as_json:
                _print(finding)
    finally:
        list(examine([Check("close", CLOSE_S, doctor.close)]))
    problems = [finding for finding in findings if finding.status == "problem"]
    if problems:
        raise typer.Exit(NO_BROKER if any(one.check == "broker" for one in problems) else PROBLEM)


def _print(finding: Finding) -> None:
    line = Text(f"{finding.status:<8} ", style=_COLOURS[finding.status])
    line.append(f"{finding.check:<9} {finding.message}", style="default")
    out.print(line, soft_wrap=True)
    if finding.fix:
        out.print(f"{'':<19}-> {finding.fix}", markup=False, soft_wrap=True)


class _Doctor:
    """The checks of one call; later ones use what earlier ones found."""

    def __init__(self, ctx: typer.Context, url: str | None, kind: ServerKind | None, token: Path | None) -> None:
        self._ctx = ctx
        self._url, self._kind, self._token = url, kind, token
        self._found: Settings | None = None
        self._close: Callable[[], None] = lambda: None

    def checks(self) -> list[Check]:
        from moebus.cli import _doctor_broker as log
        from moebus.cli import _doctor_local as local

        with_broker = Check("broker", 2 * log.BROKER_S + 5, self._broker, "settings")
        checks = [
            Check("python", 5, local.check_python),
            Check("packages", 20, local.check_packages),
            Check("settings", 10, self._settings),
            Check("journal", 5, lambda: local.check_journal(self._loaded()), "settings"),
            with_broker,
            Check("topics", 4 * log.BROKER_S, lambda: log.check_topics(self._opened, self._topics()), "broker"),
            Check("clock", 3 * log.BROKER_S, lambda: log.check_clock(self._opened, self._topics()), "topics"),
            Check("members", 4 * log.BROKER_S, lambda: log.check_members(self._opened, self._topics()), "broker"),
        ]
        if self._url is not None:
            checks.append(Check("engine", _ENGINE_S, self._engine))
        return checks

    def close(self) -> list[Finding]:
        self._close()
        return []

    def _settings(self) -> list[Finding]:
        from moebus.cli._doctor_local import check_settings

        try:
            self._found = _context.settings_of(self._ctx)
        except SettingsError as error:
            return [Finding("settings", "problem", str(error), "correct it; `MOEBUS_CONFIG` names the file")]
        return check_settings(self._found, os.environ)

    def _loaded(self) -> Settings:
        assert self._found is not None
        return self._found

    def _topics(self) -> Topics:
        return Topics(self._loaded().topic_prefix)

    def _broker(self) -> list[Finding]:
        from moebus.cli._doctor_broker import check_broker

        kafka = self._loaded().kafka
        self._opened = _context.connect(self._loaded())
        self._close = self._opened.close
        return check_broker(self._opened, kafka.bootstrap_servers)

    def _engine(self) -> list[Finding]:
        from moebus.engine.http import read_token
        from moebus.engine.survey import survey

        assert self._url is not None
        try:
            token = None if self._token is None else read_token(self._token)
            found = survey(self._url, token)
        except EngineUnreachable as error:
            fix = "start the server, or correct --engine-url"
            why = str(error).partition("; it may have been done")[0]
            return [Finding("engine", "problem", f"no server answers at {self._url}: {why}", fix)]
        except EngineUnauthorized as error:
            fix = "--engine-token-file FILE with the token that the server was started with"
            return [Finding("engine", "problem", str(error), fix)]
        except MoebusError as error:
            return [Finding("engine", "problem", str(error), "correct --engine-url")]
        named = f"{found.kind} {found.version or '(it does not tell its version)'} at {self._url}"
        findings = [Finding("engine", "ok", named)]
        if self._kind is not None and self._kind.value != found.kind:
            text = f"{self._url} is {found.kind}, not {self._kind.value}"
            findings = [Finding("engine", "problem", text, f"moebus worker --engine {found.kind}")]
        findings += [Finding("engine", "ok", note) for note in found.notes]
        for lack in found.lacks:
            status: Status = "problem" if lack.serious else "warning"
            findings.append(Finding("engine", status, f"the server lacks {lack.what}", f"start it with: {lack.launch}"))
        return findings
