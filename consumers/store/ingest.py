"""One record of the log into the tables: look up the facts, decide, write."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moebus.consumers.store.decide import Decision, Facts, Rules, Verdict, decide
from moebus.consumers.store.removal import Removal, superseded
from moebus.consumers.store.state import AttemptState, Owner
from moebus.consumers.store.tables import Meta, Tables
from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.record import CheckLevel, Chunk, Clear, Delete, End, check_content, decode, stored_checksum, unpack
from moebus.schemas.rollout import RolloutKey, structured


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a record. `kind`: chunk, end, delete, clear or unreadable. `reason`: where it was not taken.
    `dead`: a copy has to go to the dead letters. `completed`: the attempt that it made whole."""

    kind: str
    verdict: Verdict
    reason: str = ""
    dead: bool = False
    completed: AttemptState | None = None
    fence: Delete | Clear | None = None


class Ingest:
    """Works in one write transaction of one partition."""

    def __init__(self, tables: Tables, meta: Meta, rules: Rules) -> None:
        self.meta = meta
        self.removal = Removal(tables, rules)
        self._tables = tables
        self._rules = rules

    def apply(self, value: bytes | None, now_ms: int) -> Outcome:
        """`value`: of a Kafka record; `now_ms`: its append time. Never raises for what the record holds."""
        self.meta = replace(self.meta, now_ms=max(self.meta.now_ms, now_ms))
        try:
            record = decode(value)
        except BadRecord as error:
            return Outcome("unreadable", "quarantined", error.reason, dead=True)
        if isinstance(record, (Delete, Clear)):
            self.removal.fence(record, now_ms)
            return Outcome(record.kind.name.lower(), "stored", fence=record)
        assert value is not None
        return self._attempt(record, value, now_ms)

    def _attempt(self, record: Chunk | End, value: bytes, now_ms: int) -> Outcome:
        header = record.header
        held = self._tables.attempt(header.key, header.attempt)
        owner = self._tables.owner(held.owner) if held is not None and held.owner else None
        barrier = self._barrier(record)
        fault = _fault(record, self._rules.checks) if barrier is None else None
        facts = Facts(held, owner, self._base(record), barrier, fault, self.meta.owners + 1)
        decision = decide(record, stored_checksum(value), now_ms, facts, self._rules)
        self._write(decision, held, record, value)
        whole = decision.attempt if decision.verdict == "completed" else None
        if whole is not None and self._rules.last_turn:
            self.removal.turn_over(whole, now_ms)
        dead = decision.verdict in ("spoilt", "quarantined")
        return Outcome(record.kind.name.lower(), decision.verdict, decision.reason, dead, whole)

    def _base(self, record: Chunk | End) -> AttemptState | None:
        base = record.header.base
        if base is None:
            return None
        return self._tables.attempt(RolloutKey(record.header.run, base.rollout_id, base.choice), base.attempt)

    def _barrier(self, record: Chunk | End) -> str | None:
        header = record.header
        fence = self._tables.fence_over(header.run, header.rollout_id)
        if fence is not None and header.epoch <= fence.epoch:
            return str(fence)
        rollout_id = structured(header.rollout_id) if self._rules.last_turn else None
        turn = self._tables.turn(header.run, rollout_id, header.choice) if rollout_id else None
        if turn is None or rollout_id is None or header.epoch > turn.epoch or rollout_id.turn >= turn.turn:
            return None
        return superseded(turn.turn)

    def _write(self, decision: Decision, held: AttemptState | None, record: Chunk | End, value: bytes) -> None:
        for part in decision.pin:
            self._tables.add_refs(part.owner, 1)
        if decision.release is not None:
            self.removal.release(decision.release)
        if decision.owner is not None:
            self._own(decision.owner)
        if decision.blob and decision.owner is not None and isinstance(record, Chunk):
            self._tables.put_blob(decision.owner.number, record.index, value)
        if decision.attempt is not None:
            self._tables.put_attempt(decision.attempt, held)
        if decision.verdict == "completed":
            self.meta = replace(self.meta, whole=self.meta.whole + 1)

    def _own(self, owner: Owner) -> None:
        self._tables.put_owner(owner)
        self.meta = replace(self.meta, owners=max(self.meta.owners, owner.number))


def _fault(record: Chunk | End, checks: CheckLevel) -> str | None:
    """What is wrong with the rows of a chunk."""
    if isinstance(record, End) or checks == "off":
        return None
    try:
        check_content(unpack(record), record.num_experts, checks)
    except BadRecord as error:
        return error.reason
    except InvalidInput:
        return "expert_ids"
    return None
