"""What goes wrong with a local Kafka, told so that a user can act on it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from moebus.schemas.errors import FatalError

OR_COMPOSE = "or use `docker compose up -d kafka`"
_TELLING = re.compile(r"\b(ERROR|FATAL)\b|Exception|^Error")


class LocalKafkaError(FatalError):
    """A local Kafka cannot be fetched, started or stopped; the text says why and names the log, where there is one."""

    exit_code: ClassVar[int] = 1


class ToolMissing(LocalKafkaError):
    """Java or Maven is not on this machine; the text says what to install."""


def read_log(path: Path, limit: int = 64_000) -> list[str]:
    """The last lines of a log, `limit` bytes at most; [] when there is none."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - limit))
            return log.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def log_tail(path: Path, last: int = 10, errors: int = 5) -> str:
    """The last lines of a log, and before them the first lines that tell of an error.

    A node that fails says why, and then a hundred lines about how it shuts down.
    """
    lines = [line for line in read_log(path) if not line.startswith("\tat ")]  # Java's stack frames
    head, tail = lines[:-last], lines[-last:]
    telling = [line for line in head if _TELLING.search(line)][:errors]
    return "\n".join([*telling, *(["..."] if telling else []), *tail]) or "(it is empty)"


def with_log(reason: str, log: Path) -> str:
    """`reason`, the log's name and what it says."""
    return f"{reason}; from {log}:\n{log_tail(log)}"
