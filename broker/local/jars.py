"""Kafka's jars: fetched once per user by Maven with our pom.xml, then checked by name and size."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from moebus.broker.local.errors import OR_COMPOSE, LocalKafkaError, ToolMissing, with_log
from moebus.broker.local.java import Java
from moebus.broker.local.lock import file_lock
from moebus.broker.local.paths import KAFKA_VERSION, cache_directory

FETCH_TIMEOUT = 900.0
Progress = Callable[[str], None]


def package_text(name: str) -> str:
    """A data file of this package."""
    return (resources.files("moebus.broker.local") / name).read_text("utf-8")


def ensure_jars(java: Java, progress: Progress, cache: Path | None = None) -> list[Path]:
    """The jars of Kafka, sorted, fetched first where they are missing or damaged.

    Raises:
        ToolMissing: they have to be fetched and there is no Maven.
        LocalKafkaError: Maven failed; the text has the end of its log.
    """
    cache = cache or cache_directory()
    if ":" in str(cache):
        raise LocalKafkaError(f"XDG_CACHE_HOME: Java cannot load jars from a path with a colon ({cache})")
    jars = _complete(cache)
    if jars is None:
        with file_lock(cache / "fetch.lock", FETCH_TIMEOUT + 60):
            jars = _complete(cache)  # another process may have fetched them while this one waited
            if jars is None:
                jars = _fetch(cache, java, progress)
    return jars


def _complete(cache: Path) -> list[Path] | None:
    try:
        sizes: dict[str, int] = json.loads((cache / "jars.json").read_text("utf-8"))
        jars = [cache / "libs" / name for name in sorted(sizes)]
        if jars and all(jar.stat().st_size == sizes[jar.name] for jar in jars):
            return jars
    except (OSError, ValueError, AttributeError):
        pass
    return None


def _fetch(cache: Path, java: Java, progress: Progress) -> list[Path]:
    maven = shutil.which("mvn")
    if maven is None:
        raise ToolMissing(
            f"Kafka's jars are not in {cache} and there is no Maven to fetch them: install it (Debian: "
            f"`apt-get install maven`; elsewhere https://maven.apache.org/install.html), {OR_COMPOSE}"
        )
    progress(f"fetching Apache Kafka {KAFKA_VERSION} (45 jars, 43 MB, once per user) into {cache}")
    fresh, libs, pom, log = cache / "libs.new", cache / "libs", cache / "pom.xml", cache / "maven.log"
    shutil.rmtree(fresh, ignore_errors=True)
    pom.write_text(package_text("pom.xml"), "utf-8")
    _run_maven(maven, pom, fresh, log, java)
    jars = sorted(fresh.glob("*.jar"))
    if not any(jar.name == f"kafka_2.13-{KAFKA_VERSION}.jar" for jar in jars):
        raise LocalKafkaError(with_log(f"Maven did not bring kafka_2.13-{KAFKA_VERSION}.jar", log))
    (cache / "jars.json").unlink(missing_ok=True)
    shutil.rmtree(libs, ignore_errors=True)
    shutil.rmtree(cache / "archives", ignore_errors=True)  # they name the old files
    fresh.rename(libs)
    sizes = {jar.name: jar.stat().st_size for jar in sorted(libs.glob("*.jar"))}
    write_atomic(cache / "jars.json", json.dumps(sizes, indent=1))
    return [libs / name for name in sizes]


def _run_maven(maven: str, pom: Path, target: Path, log: Path, java: Java) -> None:
    command = [maven, "-q", "-B", "-f", str(pom), "dependency:copy-dependencies"]
    command += ["-DincludeScope=runtime", f"-DoutputDirectory={target}"]
    environment = {**os.environ, "JAVA_HOME": str(java.home)}
    with log.open("wb") as output:
        try:
            result = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=FETCH_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LocalKafkaError(with_log(f"Maven did not finish within {FETCH_TIMEOUT:.0f} s", log)) from None
    if result.returncode:
        reason = f"Maven could not fetch Kafka's jars (status {result.returncode}): is the network there?"
        raise LocalKafkaError(with_log(f"{reason} Repair it, {OR_COMPOSE}", log))


def write_atomic(path: Path, text: str) -> None:
    """Writes a file that readers see whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text, "utf-8")
    fresh.replace(path)
