"""What the runner computes without any process: versions, settings, ports, command lines, excerpts of logs."""

from __future__ import annotations

import random
import re
import socket
from pathlib import Path

import pytest

from moebus.broker.local import archive, java, launch, paths, ports
from moebus.broker.local.errors import log_tail
from moebus.broker.local.jars import package_text
from moebus.broker.local.properties import escape, java_command, server_properties
from moebus.broker.local.state import Node


def _nodes(count: int) -> list[Node]:
    return [Node(i + 1, 20001 + i, 21001 + i, Path(f"/data/node-{i + 1}")) for i in range(count)]


def _settings(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


@pytest.mark.parametrize(
    ("text", "version", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment', "17.0.15", 17),
        ('openjdk version "25.0.2" 2026-01-20 LTS', "25.0.2", 25),
        ('java version "1.8.0_392"', "1.8.0_392", 8),
        ('openjdk version "21-ea" 2023-09-19', "21-ea", 21),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "11.0.2"', "11.0.2", 11),
    ],
)
def test_java_versions(text: str, version: str, major: int) -> None:
    assert java.parse_version(text) == version
    assert java.major_version(version) == major


@pytest.mark.parametrize("text", ["", "mawk 1.3.4", 'version "unknown"'])
def test_no_java_version(text: str) -> None:
    assert java.parse_version(text) is None


def test_settings_of_one_node() -> None:
    nodes = _nodes(1)
    settings = _settings(server_properties(nodes[0], nodes))
    assert settings["listeners"] == "PLAINTEXT://127.0.0.1:20001,CONTROLLER://127.0.0.1:21001"
    assert settings["controller.quorum.voters"] == "1@127.0.0.1:21001"
    assert settings["auto.create.topics.enable"] == "false"
    assert settings["group.initial.rebalance.delay.ms"] == "0"
    assert settings["offsets.topic.num.partitions"] == "4"
    replication = {key: value for key, value in settings.items() if key.endswith((".replication.factor", "isr"))}
    assert set(replication.values()) == {"1"}


def test_settings_of_three_nodes() -> None:
    nodes = _nodes(3)
    settings = [_settings(server_properties(node, nodes)) for node in nodes]
    assert {s["controller.quorum.voters"] for s in settings} == {
        "1@127.0.0.1:21001,2@127.0.0.1:21002,3@127.0.0.1:21003"
    }
    assert [s["node.id"] for s in settings] == ["1", "2", "3"]
    assert settings[2]["advertised.listeners"] == "PLAINTEXT://127.0.0.1:20003"
    for s in settings:
        assert s["default.replication.factor"] == s["offsets.topic.replication.factor"] == "3"
        assert s["min.insync.replicas"] == s["transaction.state.log.min.isr"] == "2"


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_listens_outside_loopback(count: int) -> None:
    nodes = _nodes(count)
    text = "".join(server_properties(node, nodes) for node in nodes)
    assert set(re.findall(r"(?://|@)([^:]+):\d", text)) == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("value", "escaped"), [("/a b/c", "/a b/c"), ("C:\\x", "C:\\\\x"), ("/dä", "/d\\u00e4"), ("/😀", "/\\ud83d\\ude00")]
)
def test_escapes_of_properties(value: str, escaped: str) -> None:
    assert escape(value) == escaped


def test_command_line() -> None:
    node = _nodes(1)[0]
    command = java_command(
        Path("/j/java"),
        [Path("/c/a.jar"), Path("/c/b.jar")],
        Path("/c/log 4j.xml"),
        node,
        heap_mb=384,
        archive=["-XX:A"],
    )
    assert command[:2] == ["/j/java", "-Xmx384m"]
    assert command[-2:] == ["-cp", "/c/a.jar:/c/b.jar"]
    assert "-XX:A" in command
    assert "-Dmoebus.node=/data/node-1" in command
    assert "-Dlog4j2.configurationFile=file:///c/log%204j.xml" in command


def test_cluster_ids_are_never_taken_for_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drawn:
        def __init__(self, first: int) -> None:
            self.bytes = bytes([first]) + bytes(15)

    draws = iter([Drawn(0xFB), Drawn(0xFB), Drawn(0x00)])  # 0xFB begins with "-" in base64
    monkeypatch.setattr("uuid.uuid4", lambda: next(draws))
    assert launch.new_cluster_id() == "A" * 22
    assert next(draws, None) is None


def test_free_ports_leave_out_what_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        assert not ports.is_free(taken.getsockname()[1])
    first = ports.free_ports(4, rng=random.Random(1))
    assert len(set(first)) == 4
    assert all(port in ports.RANGE for port in first)
    assert not set(ports.free_ports(4, avoid=first, rng=random.Random(1))) & set(first)


def test_pom_pins_the_version_that_the_runner_names() -> None:
    pom = package_text("pom.xml")
    assert re.search(r"<artifactId>kafka_2.13</artifactId>\s*<version>(.*?)</version>", pom)[1] == paths.KAFKA_VERSION  # type: ignore[index]
    assert "log4j-slf4j-impl" in pom


def test_archive_depends_on_java_and_jars(tmp_path: Path) -> None:
    jar = tmp_path / "a.jar"
    jar.write_bytes(b"")
    here = Path("/usr/bin/java")
    made = archive.archive_path(tmp_path, java.Java(here, "17.0.15"), [jar])
    assert made == archive.archive_path(tmp_path, java.Java(here, "17.0.15"), [jar])
    assert made != archive.archive_path(tmp_path, java.Java(here, "17.0.16"), [jar])
    assert made.name.startswith("java-17-")


@pytest.mark.parametrize("clean", [True, False])
def test_only_a_clean_stop_makes_an_archive(tmp_path: Path, clean: bool) -> None:
    final = tmp_path / "java.jsa"
    recording = archive.recording_path(final)
    recording.write_bytes(b"classes")
    archive.finish(recording, final, clean)
    assert final.exists() == clean
    assert not recording.exists()


def test_an_excerpt_of_a_log_shows_the_error_before_the_farewell(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("start\nERROR disk is gone\n\tat kafka.Kafka.main\n" + "".join(f"closing {i}\n" for i in range(100)))
    assert log_tail(log, last=2).splitlines() == ["ERROR disk is gone", "...", "closing 98", "closing 99"]
    assert log_tail(tmp_path / "none") == "(it is empty)"


def test_directories_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    monkeypatch.delenv("MOEBUS_HOME", raising=False)
    assert paths.cache_directory() == Path(f"/c/moebus/kafka-{paths.KAFKA_VERSION}")
    assert paths.default_directory() == Path("/s/moebus/kafka")
    monkeypatch.setenv("MOEBUS_HOME", "/h")
    assert paths.default_directory() == Path("/h/kafka")
