"""Why a client could not connect. kafka-python only says "unable to bootstrap"; the reason is in its log."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from typing import NamedTuple

_LOGGER = "kafka.net.manager"
_KEPT = 50
_TELLING = (
    re.compile(r"Bootstrap connection to \S+ failed: (.+) \(backoff .*"),
    re.compile(r"Connection failed: (.+)"),
    re.compile(r"(Did you attempt to connect to a kafka controller.*)"),
)
_EMPTY = ("Bootstrap failed", "Bootstrap bootstrap-")


class _Seen(NamedTuple):
    at: float
    text: str


class _Tap(logging.Filter):
    """Remembers warnings; lets through what the logger would let through without it."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._own_level = logger.level
        self._parent = logger.parent or logging.getLogger()
        self._lock = threading.Lock()
        self._seen: deque[_Seen] = deque(maxlen=_KEPT)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            with self._lock:
                self._seen.append(_Seen(time.monotonic(), record.getMessage()))
        return record.levelno >= (self._own_level or self._parent.getEffectiveLevel())

    def since(self, start: float) -> list[str]:
        with self._lock:
            return [seen.text for seen in self._seen if seen.at >= start]


_lock = threading.Lock()
_tap: _Tap | None = None


def _install() -> _Tap:
    """Once a process. Works also where the application has turned Kafka's logs off."""
    global _tap
    with _lock:
        if _tap is None:
            logger = logging.getLogger(_LOGGER)
            _tap = _Tap(logger)
            logger.setLevel(logging.DEBUG)
            logger.addFilter(_tap)
        return _tap


class Reasons:
    """Collects from the moment it is made."""

    def __init__(self) -> None:
        self._tap = _install()
        self._start = time.monotonic()

    def text(self) -> str | None:
        """The most telling thing logged since: why the last connection failed, else the last warning."""
        seen = self._tap.since(self._start)
        for pattern in _TELLING:
            found = [match.group(1) for match in map(pattern.match, seen) if match]
            # The attempt that our own deadline cut off says only that it timed out.
            told = [reason for reason in found if "timed out" not in reason] or found
            if told:
                return told[-1]
        return next((text for text in reversed(seen) if not text.startswith(_EMPTY)), None)
