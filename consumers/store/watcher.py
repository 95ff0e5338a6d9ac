"""The thread beside the follower: asks the brokers how far the log is, and says in members that the store is there."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moebus.broker.errors import BrokerUnavailable, TopicMissing, WriterClosed
from moebus.broker.ports import LogWriter, OutRecord, Receipt
from moebus.consumers.store.follower import Follower
from moebus.consumers.store.progress import Progress
from moebus.consumers.store.recorder import Recorder
from moebus.consumers.store.source import Source
from moebus.observability.clock import Clock
from moebus.observability.log import get_logger
from moebus.schemas.headers import build_headers
from moebus.schemas.members import HEARTBEAT_S, MemberState, encode_member

_log = get_logger(__name__)
_ASK_EVERY = 1.0
_GUARD_EVERY = 10


class Watcher:
    """`run` is the thread."""

    def __init__(
        self,
        source: Source,
        follower: Follower,
        progress: Progress,
        recorder: Recorder,
        clock: Clock,
        stopping: threading.Event,
        beat: Callable[[], None],
    ) -> None:
        self._source = source
        self._follower = follower
        self._progress = progress
        self._recorder = recorder
        self._clock = clock
        self._stopping = stopping
        self._beat = beat
        self._silent = False

    def run(self) -> None:
        """Until told to stop."""
        turn = 0
        beaten = float("-inf")
        while not self._stopping.wait(_ASK_EVERY if turn else 0.05):
            self._ask(check_guard=turn % _GUARD_EVERY == 0)
            turn += 1
            if self._clock.monotonic() - beaten >= HEARTBEAT_S - _ASK_EVERY / 2:
                beaten = self._clock.monotonic()
                self._beat()

    def _ask(self, check_guard: bool) -> None:
        numbers = tuple(self._progress.lags())
        try:
            if numbers:
                asked_ms = self._follower.broker_now_ms
                self._progress.heard(self._source.ends(numbers), asked_ms)
            if numbers and check_guard:
                self._compare()
            self._silent = False
        except (BrokerUnavailable, TopicMissing) as error:
            if not self._silent:
                _log.warning("store.silence", f"{error}; the store goes on by itself")
            self._silent = True
        self._recorder.lags(self._progress.lags())

    def _compare(self) -> None:
        guard = self._source.guard()
        partitions = list(self._follower.partitions.values())
        if partitions and any(partition.guard != guard for partition in partitions):
            _log.error("store.rebuild", f"{self._source.topic} is another one now: everything is read again")
            self._follower.rebuild_to = guard


class Announcer:
    """The store's record in the members topic."""

    def __init__(self, writer: LogWriter, topic: str, store_id: str, heard: Callable[[int], None]) -> None:
        """`heard(ms)`: is told the broker's time with each acknowledgement."""
        self._writer = writer
        self._topic = topic
        self._id = store_id
        self._heard = heard
        self._last: Receipt | None = None

    def say(self, state: MemberState) -> None:
        """Appends the state, unless the last one still waits for a broker."""
        if self._last is not None and not self._last.done():
            return
        value, headers = encode_member(state)
        try:
            self._last = self._writer.append(OutRecord(self._topic, value, self._id.encode(), headers))
        except WriterClosed:
            return
        self._last.add_done_callback(self._learn)

    def leave(self) -> None:
        """Appends the tombstone."""
        headers = build_headers(correlation_id=self._id, producer_id=self._id)
        self._writer.append(OutRecord(self._topic, None, self._id.encode(), headers))

    def _learn(self, receipt: Receipt) -> None:
        if receipt.exception() is None:
            self._heard(receipt.result().timestamp_ms)
