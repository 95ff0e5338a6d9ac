"""What a stream hands out, and the claim on a partition that an acknowledgement belongs to."""

from __future__ import annotations

import threading

from moebus.broker.ports import TopicPartition
from moebus.consumers.reader.assembly import Assembler, Open
from moebus.consumers.reader.rollout import Rollout
from moebus.observability.log import get_logger
from moebus.schemas.route_ref import RouteRef

_log = get_logger(__name__)


class Claim:
    """What is known of one partition while this member has it; a new one each time it is assigned."""

    def __init__(self, tp: TopicPartition, run: str, position: int) -> None:
        self.tp = tp
        self.assembler = Assembler(run, position)
        self.committed = position
        self.lost = False


class StreamItem:
    """One whole rollout. `ack()` once it is used; until then a restart delivers it again."""

    def __init__(self, rollout: Rollout, partition: Claim, attempt: Open, lock: threading.RLock) -> None:
        self.rollout = rollout
        self._partition = partition
        self._attempt = attempt
        self._lock = lock
        self._acked = False

    @property
    def ref(self) -> RouteRef:
        return self.rollout.ref

    @property
    def position(self) -> str:
        """Where its END lies, `topic/partition/offset`."""
        return f"{self._partition.tp}/{self._attempt.end_offset}"

    def ack(self) -> bool:
        """Marks the rollout as used, from any thread, in any order; the commit follows. False: the partition went to
        another member meanwhile, nothing is committed and the rollout is delivered again."""
        with self._lock:
            if self._partition.lost:
                _log.warning(
                    "routes.ack_lost",
                    f"{self.ref.key} is delivered again: its partition went to another member",
                    position=self.position,
                )
                return False
            if not self._acked:
                self._acked = True
                self._partition.assembler.release(self._attempt)
            return True
