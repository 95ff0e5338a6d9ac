"""The writer's records that have no ack yet, in order. No I/O, no lock of its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from moebus.broker.ports import OutRecord, Receipt


@dataclass(eq=False, slots=True)
class Entry:
    """One record on its way. `partition` is chosen once, so that sending it again changes nothing."""

    seq: int
    record: OutRecord
    size: int
    deadline: float
    receipt: Receipt
    partition: int | None
    attempts: int = 0


@dataclass
class Outbox:
    """`open`: all that is not settled, by sequence number; `flying`: those handed to the producer.

    Topics do not wait for each other: a missing one is parked alone. While `suspects` are open (records of which
    one was refused, nobody knows which) one record flies at a time, so that the refused one is alone when it fails.
    """

    max_records: int = 256
    max_bytes: int = 8 << 20
    open: dict[int, Entry] = field(default_factory=dict)
    flying: dict[int, Entry] = field(default_factory=dict)
    flying_bytes: int = 0
    suspects: set[int] = field(default_factory=set)
    _waiting: dict[str, deque[Entry]] = field(default_factory=dict)
    _parked: dict[str, float] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        self.open[entry.seq] = entry
        self._waiting.setdefault(entry.record.topic, deque()).append(entry)

    def next(self, now: float) -> Entry | None:
        """The record to hand to the producer now; it stays in place until `fly`."""
        if self.suspects and self.flying:
            return None
        if len(self.flying) >= self.max_records or self.flying_bytes >= self.max_bytes:
            return None
        heads = [queue[0] for queue in self._clean(now)]
        return min(heads, key=lambda entry: entry.seq, default=None)

    def _clean(self, now: float) -> list[deque[Entry]]:
        """Queues that have an open head and are not parked."""
        ready = []
        for topic, queue in list(self._waiting.items()):
            while queue and queue[0].seq not in self.open:
                queue.popleft()
            if not queue:
                del self._waiting[topic]
            elif self._parked.get(topic, 0.0) <= now:
                ready.append(queue)
        return ready

    def fly(self, entry: Entry) -> None:
        queue = self._waiting[entry.record.topic]
        if queue[0] is not entry:
            raise AssertionError("records of one topic leave in order")
        queue.popleft()
        entry.attempts += 1
        self.flying[entry.seq] = entry
        self.flying_bytes += entry.size

    def unfly(self, entry: Entry) -> None:
        """Undoes `fly`: nothing was sent."""
        entry.attempts -= 1
        if self.flying.pop(entry.seq, None) is not None:
            self.flying_bytes -= entry.size
            self._waiting.setdefault(entry.record.topic, deque()).appendleft(entry)

    def park(self, topic: str, until: float) -> None:
        self._parked[topic] = until

    def settle(self, seq: int) -> Entry | None:
        """Takes an entry out for good; None when it was settled before."""
        entry = self.open.pop(seq, None)
        self.suspects.discard(seq)
        if self.flying.pop(seq, None) is not None and entry is not None:
            self.flying_bytes -= entry.size
        return entry

    def ground(self) -> list[Entry]:
        """Puts everything that flies back in front of what waits, in order; returns it."""
        back = [self.flying[seq] for seq in sorted(self.flying)]
        for entry in reversed(back):
            self._waiting.setdefault(entry.record.topic, deque()).appendleft(entry)
        self.flying.clear()
        self.flying_bytes = 0
        return back

    def late(self, now: float) -> list[Entry]:
        """Open entries whose deadline has passed, oldest first."""
        found = []
        for entry in self.open.values():  # deadlines ascend with the sequence numbers
            if entry.deadline > now:
                break
            found.append(entry)
        return found

    def next_event(self) -> float | None:
        """When something has to be looked at again (time.monotonic): a deadline or a parked topic."""
        times = [until for topic, until in self._parked.items() if topic in self._waiting]
        if self.open:
            times.append(next(iter(self.open.values())).deadline)
        return min(times, default=None)
