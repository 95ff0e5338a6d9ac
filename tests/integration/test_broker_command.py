"""`moebus broker up | status | down`, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moebus.broker.local import LocalCluster, process
from moebus.broker.local.properties import TAG

pytestmark = pytest.mark.kafka


class Command:
    """`moebus broker ...` with a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.kafka = home / "kafka"

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moebus.cli", "broker", *arguments],
            env={**os.environ, "MOEBUS_HOME": str(self.home), **environment},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def told(self, *arguments: str, status: int = 0) -> dict[str, Any]:
        """What the command prints with --json."""
        result = self.run(*arguments, "--json")
        assert result.returncode == status, result.stderr
        value = json.loads(result.stdout)
        assert isinstance(value, dict)
        return value


@pytest.fixture
def command(tmp_path: Path, kafka_broker: LocalCluster) -> Iterator[Command]:
    """The shared broker comes first: it skips the test where there is no Java."""
    made = Command(tmp_path / "home")
    yield made
    left = LocalCluster.load(made.kafka)
    if left is not None:
        left.stop(grace=5)


def test_up_status_down(command: Command) -> None:
    first = command.told("up")
    assert first["running"] is True
    assert first["already_up"] is False
    assert first["export"] == f"export MOEBUS_KAFKA__BOOTSTRAP_SERVERS={first['bootstrap']}"
    (node,) = first["nodes"]
    assert first["bootstrap"] == f"127.0.0.1:{node['port']}"
    assert Path(node["log"]).stat().st_size > 0

    again = command.run("up")
    assert "is already up" in again.stdout
    assert first["export"] in again.stdout
    assert command.told("status")["nodes"] == first["nodes"]

    assert command.told("down") == {"stopped": True, "clean": True, "directory": str(command.kafka), "deleted": False}
    assert process.tagged(f"{TAG}{command.home}/") == []
    after = command.told("status", status=5)
    assert after["running"] is False
    assert after["nodes"][0]["pid"] is None
    assert command.told("down", "--delete-data")["stopped"] is False
    assert not command.kafka.exists()


def test_up_after_a_crash(command: Command) -> None:
    (node,) = command.told("up")["nodes"]
    process.kill(process.tagged(f"{TAG}{command.kafka}/"))
    crashed = command.run("status")
    assert crashed.returncode == 5
    assert "is down" in crashed.stdout

    # Storage of another node: Kafka ends while it starts, which is told with what its log says.
    meta = command.kafka / "node-1" / "data" / "meta.properties"
    text = meta.read_text()
    meta.write_text(text.replace("node.id=1", "node.id=7"))
    refused = command.run("up")
    assert refused.returncode == 1
    assert "Kafka node 1 ended while it was starting" in refused.stderr
    assert str(command.kafka / "node-1" / "server.log") in refused.stderr
    assert "Stored node id 7" in refused.stderr
    assert process.tagged(f"{TAG}{command.kafka}/") == []

    meta.write_text(text)
    (again,) = command.told("up")["nodes"]
    assert again["port"] == node["port"]
    assert again["pid"] != node["pid"]


def test_status_and_down_where_nothing_ever_ran(command: Command) -> None:
    result = command.run("status")
    assert result.returncode == 5
    assert "moebus broker up" in result.stdout
    assert command.told("down")["stopped"] is False


def test_a_java_that_breaks_is_told_with_its_log(command: Command, tmp_path: Path) -> None:
    broken = tmp_path / "jdk" / "bin" / "java"
    broken.parent.mkdir(parents=True)
    version = 'if [ "$1" = -version ]; then echo \'openjdk version "21.0.1"\' >&2; exit 0; fi'
    broken.write_text(f"#!/bin/sh\n{version}\necho 'java: out of order' >&2; exit 7\n")
    broken.chmod(0o755)
    result = command.run("up", JAVA_HOME=str(broken.parent.parent))
    assert result.returncode == 1
    assert f"status 7 of {broken}" in result.stderr
    assert str(command.kafka / "node-1" / "server.log") in result.stderr
    assert "java: out of order" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_three_nodes(command: Command) -> None:
    told = command.told("up", "--nodes", "3")
    assert len(told["bootstrap"].split(",")) == 3
    assert all(node["running"] for node in told["nodes"])
    pids = process.tagged(f"{TAG}{command.kafka}/")
    process.kill(pids[:1])
    partial = command.run("status")
    assert partial.returncode == 3
    assert "2 of 3 nodes" in partial.stdout
    assert all(node["running"] for node in command.told("up", "--nodes", "3")["nodes"])
    assert command.told("down")["stopped"] is True
    assert process.tagged(f"{TAG}{command.kafka}/") == []
