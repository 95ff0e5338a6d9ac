"""What a worker process reads: the command log from its start, and the members topic until it has taken over."""

from __future__ import annotations

from collections.abc import Sequence

from moebus.broker.errors import BrokerUnavailable, OffsetOutOfRange, TopicMissing
from moebus.broker.ports import Broker, LogReader, LogRecord, TopicPartition
from moebus.broker.topics import Topics
from moebus.consumers.control.log_index import Entry, Kind, LogIndex
from moebus.consumers.control.members_view import MembersView
from moebus.observability.log import get_logger
from moebus.schemas.errors import BadRecord, FatalError

_log = get_logger(__name__)


class LogReplaced(FatalError):
    """The command log is not the one this process started with, or no longer whole."""


class Feed:
    """Used by the host's thread alone."""

    def __init__(self, broker: Broker, topics: Topics, ids: Sequence[str], name: str) -> None:
        self.index = LogIndex()
        self.members = MembersView(ids)
        self.bad: list[tuple[LogRecord, BadRecord]] = []
        self._broker = broker
        self._topics = topics
        self._name = name
        self._requests = TopicPartition(topics.control_requests, 0)
        self._member_ends: dict[TopicPartition, int] = {}
        self._reader: LogReader | None = None
        self._identity: tuple[str, str] | None = None

    def open(self) -> None:
        """Finds the topics and starts at the beginning of both.

        Raises:
            BrokerUnavailable.  TopicMissing: naming it and the command that creates it.
        """
        admin = self._broker.admin()
        try:
            topics = self._topics
            names = [topics.control_requests, topics.control_responses, topics.members, topics.dlt]
            found = admin.describe(names)
            missing = [name for name in names if name not in found]
            if missing:
                raise TopicMissing(f"no topic {', '.join(missing)}; `moebus topics ensure` creates it")
            self._identity = (admin.cluster_id(), found[self._topics.control_requests].topic_id)
            tps = [TopicPartition(self._topics.members, n) for n in range(found[self._topics.members].partitions)]
            starts = admin.start_offsets(tps)
            self._member_ends = admin.end_offsets(tps)
        finally:
            admin.close()
        self._reader = self._broker.reader(self._name)
        self._reader.assign({self._requests: 0, **starts})

    def poll(self, timeout: float) -> list[Entry]:
        """Entries of the command log, in order. Raises LogReplaced."""
        assert self._reader is not None, "open first"
        try:
            records = self._reader.poll(timeout)
        except OffsetOutOfRange as error:
            raise LogReplaced(f"{error}; a worker needs the whole command log: restart it once that is so") from error
        return [self._take(record) for record in records if self._is_request(record)]

    def _is_request(self, record: LogRecord) -> bool:
        if record.topic == self._requests.topic:
            return True
        self.members.feed(record)
        return False

    def _take(self, record: LogRecord) -> Entry:
        entry = self.index.add(record)
        if entry.kind is Kind.BAD and isinstance(entry.error, BadRecord):
            self.bad.append((record, entry.error))
        elif entry.kind is Kind.NULL:
            _log.warning("control.null_record", "a record without a value is ignored", position=str(record))
        return entry

    @property
    def position(self) -> int:
        """Offset of the next command."""
        assert self._reader is not None, "open first"
        return self._reader.position(self._requests)

    def members_read(self) -> bool:
        """Whether the members topic was read to where it ended when this process opened."""
        reader = self._reader
        assert reader is not None, "open first"
        return all(reader.position(tp) >= end for tp, end in self._member_ends.items())

    def leave_members(self) -> None:
        """Reads commands alone from now on."""
        assert self._reader is not None, "open first"
        self._reader.assign({self._requests: self.position})

    def check(self) -> None:
        """Raises LogReplaced where the cluster or the topic is another one; says nothing during an outage."""
        admin = self._broker.admin()
        try:
            found = admin.describe([self._topics.control_requests], 2.0).get(self._topics.control_requests)
            now = (admin.cluster_id(2.0), found.topic_id if found is not None else "")
        except BrokerUnavailable:
            return
        finally:
            admin.close()
        if now != self._identity:
            raise LogReplaced(f"{self._requests.topic} is another topic than at the start of this process; restart it")

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
