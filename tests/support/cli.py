"""The `moebus` command in this process, on a broker in memory or on Kafka."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

from moebus.broker.memory import MemoryBroker
from moebus.cli import _context
from moebus.cli.main import app


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Its output as one JSON object a line."""
        return [json.loads(line) for line in self.out.splitlines()]


def run_command(*arguments: str) -> Ran:
    """Errors that are no sentence of ours are raised."""
    found = CliRunner().invoke(app, list(arguments))
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return Ran(found.exit_code, found.stdout, found.stderr)


class KafkaCli:
    """On a real broker."""

    def __init__(self, bootstrap: str, prefix: str) -> None:
        self._given = ("--bootstrap-servers", bootstrap, "--topic-prefix", prefix)

    def run(self, *arguments: str) -> Ran:
        return run_command(*self._given, *arguments)


class MemoryCli:
    """Every command gets a broker of its own on one cluster, as it would over a network."""

    def __init__(self, cluster: MemoryBroker, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._prefix = prefix

        def open_broker(_: object) -> MemoryBroker:
            broker = MemoryBroker()
            broker.cluster = cluster.cluster
            return broker

        monkeypatch.setattr(_context, "open_broker", open_broker)

    def run(self, *arguments: str) -> Ran:
        return run_command("--topic-prefix", self._prefix, *arguments)
