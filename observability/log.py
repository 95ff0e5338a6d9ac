"""Structured logs on the standard logging module: an action, a sentence, and named fields.

    log = get_logger(__name__)
    log.info("control.applied", "paused, 3 requests aborted", request_id=rid, worker_id=wid, position="t/0/17")

As JSON one line is one object with `ts, level, logger, action, message` and the fields; as text the same for people.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Literal, TextIO

LogFormat = Literal["json", "text"]
ROOT = "moebus"


class StructuredLogger:
    """A thin wrapper that makes the action a required argument."""

    def __init__(self, logger: logging.Logger, fields: Mapping[str, object] | None = None) -> None:
        self._logger = logger
        self._fields = dict(fields or {})

    def bind(self, **fields: object) -> StructuredLogger:
        """A logger that puts `fields` on every line; used for the ids of one operation."""
        return StructuredLogger(self._logger, {**self._fields, **fields})

    def debug(self, action: str, message: str = "", **fields: object) -> None:
        self._write(logging.DEBUG, action, message, fields)

    def info(self, action: str, message: str = "", **fields: object) -> None:
        self._write(logging.INFO, action, message, fields)

    def warning(self, action: str, message: str = "", **fields: object) -> None:
        self._write(logging.WARNING, action, message, fields)

    def error(self, action: str, message: str = "", *, exc: BaseException | None = None, **fields: object) -> None:
        self._write(logging.ERROR, action, message, fields, exc)

    def _write(
        self, level: int, action: str, message: str, fields: Mapping[str, object], exc: BaseException | None = None
    ) -> None:
        if self._logger.isEnabledFor(level):
            extra = {"action": action, "fields": {**self._fields, **fields}}
            self._logger.log(level, message, extra=extra, exc_info=exc)


def get_logger(name: str) -> StructuredLogger:
    """The logger of a module; `name` is `__name__`."""
    return StructuredLogger(logging.getLogger(name))


class JsonFormatter(logging.Formatter):
    """One JSON object a line; values that JSON does not know are written as text."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "action": getattr(record, "action", None),
            "message": record.getMessage(),
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps({k: v for k, v in entry.items() if v is not None}, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`12:34:56 INFO  control.applied  paused  request_id=...`."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = " ".join(f"{k}={v}" for k, v in getattr(record, "fields", {}).items() if v is not None)
        parts = [time, f"{record.levelname:<7}", getattr(record, "action", record.name), record.getMessage(), fields]
        text = "  ".join(part for part in parts if part)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def configure_logging(level: str = "INFO", fmt: LogFormat = "json", stream: TextIO | None = None) -> None:
    """Sends the `moebus` loggers to `stream` (default stderr). Called by commands only, never on import.

    Raises ValueError for an unknown level.
    """
    logger = logging.getLogger(ROOT)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if fmt == "json" else TextFormatter())
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
