"""The fleet as the members topic shows it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moebus.broker.ports import LogRecord
from moebus.schemas.errors import BadRecord
from moebus.schemas.members import MemberOps, MemberState, decode_member, decode_ops, split_key
from moebus.schemas.target import Target


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member as last heard of. `live`: heard of within 10 s of broker time, or busy until later."""

    state: MemberState
    last_append_ms: int
    live: bool
    ops: MemberOps | None = None

    @property
    def member_id(self) -> str:
        return self.state.member_id

    def as_dict(self) -> dict[str, Any]:
        """A JSON object: the member's own fields, with `live`, `last_append_ms` and its last operations."""
        return {
            **self.state.model_dump(mode="json", exclude_none=True, exclude={"desired", "schema_version"}),
            "live": self.live,
            "last_append_ms": self.last_append_ms,
            "ops": [] if self.ops is None else self.ops.model_dump(mode="json")["ops"],
        }


@dataclass(slots=True)
class Fleet:
    """A fold of the members topic: add its records in log order."""

    _members: dict[str, tuple[MemberState, int]] = field(default_factory=dict)
    _ops: dict[str, MemberOps] = field(default_factory=dict)
    bad_records: int = 0

    def add(self, record: LogRecord) -> None:
        """Takes a record in; what cannot be read is counted and changes nothing."""
        key = split_key(record.key)
        if key is None:
            self.bad_records += 1
            return
        member_id, is_ops = key
        try:
            if record.value is None:
                (self._ops if is_ops else self._members).pop(member_id, None)
            elif is_ops:
                self._ops[member_id] = decode_ops(record.value, record.headers)
            else:
                self._members[member_id] = (decode_member(record.value, record.headers), record.timestamp_ms)
        except BadRecord:
            self.bad_records += 1

    def expected(self, target: Target, offset: int, appended_ms: int) -> tuple[str, ...]:
        """Ids of the workers that answer for a command: live at its append time, matching, and there before it."""
        return tuple(
            sorted(
                member_id
                for member_id, (state, last_ms) in self._members.items()
                if state.kind == "worker"
                and state.since is not None
                and state.since <= offset
                and state.live(last_ms, appended_ms)
                and target.matches(member_id, state.labels)
            )
        )

    def views(self, now_ms: int) -> list[MemberView]:
        """Every member that has not left, in order of id, as of broker time `now_ms`."""
        return [
            MemberView(state, last_ms, state.live(last_ms, now_ms), self._ops.get(member_id))
            for member_id, (state, last_ms) in sorted(self._members.items())
        ]
