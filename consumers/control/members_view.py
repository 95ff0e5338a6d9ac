"""What the members topic says of the workers that this process hosts, for their take-over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moebus.broker.ports import LogRecord
from moebus.schemas.errors import BadRecord
from moebus.schemas.members import LIVE_S, MemberState, decode_member, split_key


@dataclass(slots=True)
class _Seen:
    state: MemberState | None = None
    last_ms: int = 0
    left: bool = False


class MembersView:
    """Fed every record of the members topic in order."""

    def __init__(self, ids: Iterable[str]) -> None:
        self._seen = {worker_id: _Seen() for worker_id in ids}
        self._begun = False

    def feed(self, record: LogRecord) -> None:
        """Takes in one record; those of others and those that cannot be read are ignored."""
        key = split_key(record.key)
        seen = self._seen.get(key[0]) if key is not None and not key[1] else None
        if seen is None:
            return
        if record.value is None:
            seen.left = True
            return
        try:
            state = decode_member(record.value, record.headers)
        except BadRecord:
            return
        if state.kind == "worker":
            seen.state, seen.last_ms, seen.left = state, record.timestamp_ms, False

    def begin(self) -> None:
        """All that was there before this process has been fed: whoever left by now is no predecessor. Who leaves
        later hands over; a second call does nothing."""
        for seen in self._seen.values():
            if seen.left and not self._begun:
                seen.state = None
        self._begun = True

    def prior(self, worker_id: str) -> MemberState | None:
        """The last state of the process before this one; None for a new worker, also after a graceful leave."""
        return self._seen[worker_id].state

    def silent(self, worker_id: str, now_ms: int) -> bool:
        """Whether the process before this one has left or was silent for 10 s."""
        seen = self._seen[worker_id]
        return seen.left or seen.state is None or now_ms - seen.last_ms >= LIVE_S * 1000
