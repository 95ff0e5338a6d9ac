"""What goes wrong with a local Kafka, told so that a user can act on it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from moebus.schemas.errors import FatalError

OR_COMPOSE = "or use `docker compose up -d kafka`"


class LocalKafkaError(FatalError):
    """A local Kafka cannot be fetched, started or stopped; the text says why and names the log, where there is one."""

    exit_code: ClassVar[int] = 1


class ToolMissing(LocalKafkaError):
    """Java or Maven is not on this machine; the text says what to install."""


def log_tail(path: Path, lines: int = 15, limit: int = 64_000) -> str:
    """The last `lines` lines of a log, or a remark when there is none. Reads at most `limit` bytes."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - limit))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return "(there is no such file)"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def with_log(reason: str, log: Path) -> str:
    """`reason`, the log's name and its last lines."""
    return f"{reason}; the end of {log}:\n{log_tail(log)}"
