"""One background reader of a controller: it keeps the fleet and the answers to the commands it was told to watch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from moebus.broker.errors import BrokerUnavailable, OffsetOutOfRange
from moebus.broker.ports import Broker, LogAdmin, LogReader, LogRecord, TopicPartition
from moebus.broker.topics import Topics
from moebus.observability.clock import Clock
from moebus.observability.log import get_logger
from moebus.producers.control.answers import Answers
from moebus.producers.control.broker_time import BrokerTime
from moebus.producers.control.fleet import Fleet, MemberView
from moebus.producers.control.scan import partitions_of
from moebus.schemas.control import InvalidRequest, parse_request
from moebus.schemas.control_args import Method
from moebus.schemas.errors import BadRecord
from moebus.schemas.responses import decode_response
from moebus.schemas.target import Target

_log = get_logger(__name__)
_POLL_SECONDS = 0.1
_SLICE_SECONDS = 0.2


Listener = Callable[[], None]


class Follower:
    """Reads members from their start, requests and responses from their end at `start`. Thread-safe.

    `changed` guards `Answers` objects that are watched, and is notified when one of them or the fleet changes.
    """

    def __init__(self, broker: Broker, topics: Topics, clock: Clock, broker_time: BrokerTime) -> None:
        self._topics = topics
        self._clock = clock
        self._time = broker_time
        self._broker = broker
        self.changed = threading.Condition()
        self._watched: dict[str, list[Answers]] = {}
        self._listeners: dict[int, Listener] = {}
        self._touched: set[int] = set()
        self._fleet = Fleet()
        self._read_to: dict[TopicPartition, int] = {}
        self._admin: LogAdmin | None = None
        self._reader: LogReader | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stop = threading.Event()
        self._failure: Exception | None = None

    def start(self, timeout: float) -> None:
        """Finds where to begin and starts the thread; a second call does nothing.

        Raises:
            BrokerUnavailable: no broker within `timeout` seconds.  TopicMissing: a topic of the fleet does not exist.
        """
        with self._starting:
            if self._thread is None:
                self._start(timeout)

    def _start(self, timeout: float) -> None:
        admin = self._broker.admin()
        topics = (self._topics.control_requests, self._topics.control_responses, self._topics.members)
        tps = partitions_of(admin, topics, timeout)
        ends = admin.end_offsets(tps, timeout)
        members = admin.start_offsets([tp for tp in tps if tp.topic == self._topics.members], timeout)
        self._read_to = {**ends, **members}
        self._admin = admin
        self._reader = self._broker.reader("moebus-control")
        self._reader.assign(self._read_to)
        self._thread = threading.Thread(target=self._run, name="moebus-control-follower", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes what it read with; a second call does nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for part in (self._reader, self._admin):
            if part is not None:
                part.close()
        self._reader = self._admin = None

    @property
    def failure(self) -> Exception | None:
        """What ended the thread; None while it reads or was told to stop."""
        return self._failure

    def watch(self, answers: Answers) -> None:
        """Feeds `answers` from now on."""
        with self.changed:
            self._watched.setdefault(answers.request.request_id, []).append(answers)

    def listen(self, answers: Answers, listener: Listener) -> None:
        """`listener` is called on this reader's thread after every change of watched `answers`, and when the reader
        ends. It must be short."""
        with self.changed:
            self._listeners[id(answers)] = listener

    def check(self) -> None:
        """Raises what ended the reader, if it ended."""
        if self._failure is not None:
            raise self._failure

    def unwatch(self, answers: Answers) -> None:
        """Stops feeding it. Unknown ones are ignored."""
        with self.changed:
            self._listeners.pop(id(answers), None)
            request_id = answers.request.request_id
            left = [one for one in self._watched.get(request_id, []) if one is not answers]
            self._watched.pop(request_id, None)
            if left:
                self._watched[request_id] = left

    def catch_up(self, timeout: float) -> bool:
        """Waits until the fleet is known as far as the members topic goes now; False after `timeout` seconds.

        Raises:
            BrokerUnavailable: the end of the topic could not be asked for.
        """
        assert self._admin is not None, "catch_up before start"
        until = self._clock.monotonic() + timeout
        tps = [tp for tp in self._read_to if tp.topic == self._topics.members]
        ends = self._admin.end_offsets(tps, timeout)
        with self.changed:
            while any(self._read_to[tp] < ends[tp] for tp in tps):
                if self._clock.monotonic() >= until:
                    return False
                self.wait_change(_SLICE_SECONDS)
        return True

    def wait_change(self, seconds: float) -> None:
        """Waits for a change, `seconds` at most; `changed` must be held. Raises what ended the reader, if it ended."""
        self.changed.wait(seconds)
        self.check()

    def expected(self, target: Target, offset: int, appended_ms: int) -> tuple[str, ...]:
        """See `Fleet.expected`."""
        with self.changed:
            return self._fleet.expected(target, offset, appended_ms)

    def members(self, now_ms: int) -> list[MemberView]:
        """See `Fleet.views`."""
        with self.changed:
            return self._fleet.views(now_ms)

    def _run(self) -> None:
        assert self._reader is not None
        try:
            while not self._stop.is_set():
                try:
                    records = self._reader.poll(_POLL_SECONDS)
                except OffsetOutOfRange as exc:
                    self._reposition(exc, self._reader)
                    continue
                if records:
                    self._take(records, self._reader)
        except Exception as exc:
            _log.error("control.follower_failed", "the controller reads no more answers", exc=exc)
            with self.changed:
                self._failure = exc
                self._touched.update(self._listeners)
                self._notify()

    def _take(self, records: list[LogRecord], reader: LogReader) -> None:
        with self.changed:
            for record in records:
                self._time.observe(record.timestamp_ms)
                if record.topic == self._topics.members:
                    self._fleet.add(record)
                elif record.topic == self._topics.control_responses:
                    self._take_response(record)
                else:
                    self._take_request(record)
            self._read_to = {tp: reader.position(tp) for tp in self._read_to}
            self._notify()

    def _notify(self) -> None:
        self.changed.notify_all()
        for number in self._touched:
            listener = self._listeners.get(number)
            if listener is not None:
                listener()
        self._touched.clear()

    def _take_response(self, record: LogRecord) -> None:
        if not self._watched:
            return
        try:
            response = decode_response(record.value, record.headers)
        except BadRecord as exc:
            _log.warning("control.bad_answer", f"ignored: {exc}", position=str(record))
            return
        for answers in self._watched.get(response.request_id, ()):
            if answers.add(response, (record.partition, record.offset)):
                self._touched.add(id(answers))

    def _take_request(self, record: LogRecord) -> None:
        if not self._watched:
            return
        try:
            request = parse_request(record.value, record.headers)
        except (BadRecord, InvalidRequest):  # the workers answer or dead-letter it
            return
        if request.method is Method.DECIDE:
            for watching in self._watched.values():
                for answers in watching:
                    if answers.add_decide(request, record.offset):
                        self._touched.add(id(answers))

    def _reposition(self, exc: OffsetOutOfRange, reader: LogReader) -> None:
        """Goes on from the start of what is left: retention has passed us, or the topic was made again."""
        assert self._admin is not None
        lost = TopicPartition(exc.topic, exc.partition)
        try:
            start = self._admin.start_offsets([lost])[lost]
        except BrokerUnavailable:
            self._stop.wait(_POLL_SECONDS)
            return
        _log.warning("control.repositioned", f"{exc}; reading on from {start}", position=f"{lost}/{start}")
        positions: Mapping[TopicPartition, int] = {
            tp: start if tp == lost else reader.position(tp) for tp in self._read_to
        }
        reader.assign(positions)
