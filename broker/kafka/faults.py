"""What an error of kafka-python means to us."""

from __future__ import annotations

import threading
import time

from kafka import errors as kafka_errors

# The broker refuses this very record (or its topic) and would refuse it again.
_REFUSALS: tuple[type[Exception], ...] = (
    kafka_errors.MessageSizeTooLargeError,
    kafka_errors.RecordListTooLargeError,
    kafka_errors.InvalidRecordError,
    kafka_errors.InvalidTimestampError,
    kafka_errors.InvalidTopicError,
    kafka_errors.PolicyViolationError,
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.ClusterAuthorizationFailedError,
)


def is_refusal(error: Exception) -> bool:
    """Whether the record itself is at fault, rather than the connection or the producer's state."""
    return isinstance(error, _REFUSALS)


def describe(error: BaseException) -> str:
    """The class and the text of an error, in one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return text if name in text else f"{name}: {text}" if text else name


class Backoff:
    """Seconds to wait before the next attempt: doubles from `first` to `last`, begins again after `reset`."""

    def __init__(self, first: float = 0.05, last: float = 1.0) -> None:
        self._first = first
        self._last = last
        self._next = first

    def next(self) -> float:
        delay, self._next = self._next, min(self._last, self._next * 2)
        return delay

    def reset(self) -> None:
        self._next = self._first


class Once:
    """Says whether a message is worth logging again: on change, or after `every` seconds. Thread-safe."""

    def __init__(self, every: float = 60.0) -> None:
        self._every = every
        self._lock = threading.Lock()
        self._last: str | None = None
        self._at = 0.0

    def worth(self, text: str) -> bool:
        now = time.monotonic()
        with self._lock:
            if text == self._last and now - self._at < self._every:
                return False
            self._last, self._at = text, now
            return True

    def clear(self) -> None:
        with self._lock:
            self._last = None


class Pace:
    """Keeps a reader that fails again and again from connecting at full speed. One thread uses it."""

    def __init__(self) -> None:
        self._backoff = Backoff()
        self._until = 0.0

    def failed(self) -> None:
        self._until = time.monotonic() + self._backoff.next()

    def well(self) -> None:
        self._backoff.reset()

    def wait(self, timeout: float) -> bool:
        """Waits for the next attempt's time; False when that is more than `timeout` seconds away."""
        left = self._until - time.monotonic()
        if left > 0:
            time.sleep(min(left, timeout))
        return left <= timeout
