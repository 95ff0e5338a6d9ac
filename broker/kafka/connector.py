"""Connects a consumer in the background, so that `poll` stays within its timeout while no broker is up."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moebus.broker.errors import BrokerUnavailable
from moebus.broker.kafka.clients import Consumer, GiveUp
from moebus.broker.kafka.faults import Backoff, describe
from moebus.observability.log import get_logger

_log = get_logger(__name__)
Make = Callable[[GiveUp], Consumer]


class Connector:
    """Holds the consumer of one reader. `make(give_up)` connects or raises BrokerUnavailable."""

    def __init__(self, name: str, make: Make) -> None:
        self._name = name
        self._make = make
        self._changed = threading.Condition()
        self._consumer: Consumer | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def get(self, timeout: float) -> Consumer | None:
        """The consumer, or None when it could not connect within `timeout` seconds (it goes on trying)."""
        with self._changed:
            if self._consumer is None and self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=f"moebus-connect-{self._name}", daemon=True)
                self._thread.start()
            self._changed.wait_for(lambda: self._consumer is not None or self._closed, timeout)
            return self._consumer

    def _run(self) -> None:
        backoff = Backoff()
        said = False
        while True:
            try:
                consumer = self._make(lambda: self._closed)
            except Exception as exc:  # a thread that ended here would leave its reader waiting for ever
                if not said and not self._closed:
                    text = str(exc) if isinstance(exc, BrokerUnavailable) else describe(exc)
                    _log.warning("reader.waiting", f"reader {self._name} waits: {text}")
                    said = True
                with self._changed:
                    if self._changed.wait_for(lambda: self._closed, backoff.next()):
                        return
                continue
            self._keep(consumer)
            return

    def _keep(self, consumer: Consumer) -> None:
        with self._changed:
            self._thread = None
            if not self._closed:
                self._consumer = consumer
                self._changed.notify_all()
                return
        close_quietly(consumer)

    def drop(self) -> None:
        """Ends a consumer that no longer works; `get` connects anew."""
        with self._changed:
            consumer, self._consumer = self._consumer, None
        if consumer is not None:
            close_quietly(consumer)

    def close(self) -> Consumer | None:
        """Stops connecting; hands the consumer, if there is one, to the caller to close."""
        with self._changed:
            self._closed = True
            consumer, self._consumer = self._consumer, None
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(2.0)
        return consumer


def close_quietly(consumer: Consumer, timeout: float = 2.0) -> None:
    """Closes without a commit, within about `timeout` seconds, whatever state it is in."""
    try:
        consumer.close(autocommit=False, timeout_ms=timeout * 1000)
    except Exception as exc:  # a close that fails must not hide why it was closed
        _log.debug("reader.closed", f"closing a consumer: {exc}")
