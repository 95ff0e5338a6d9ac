"""One record of the log into the tables: look up the facts, decide, write."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from moebus.consumers.store.blobs.port import Blobs
from moebus.consumers.store.decide import Decision, Facts, Rules, Verdict, decide
from moebus.consumers.store.doomed import hidden
from moebus.consumers.store.fresh import Fresh
from moebus.consumers.store.removal import Removal, superseded
from moebus.consumers.store.state import AttemptState, Owner
from moebus.consumers.store.tables import Meta, Tables, Usage
from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import CheckLevel, Chunk, Clear, Delete, End, check_content, decode, stored_checksum, unpack
from moebus.schemas.rollout import RolloutKey, structured


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a record. `kind`: chunk, end, delete, clear or unreadable. `reason`: where it was not taken.
    `dead`: a copy has to go to the dead letters. `completed`: the attempt that it made whole; `readable`: before the
    commit. `over_quota`: the run that had to give something up for it. `detail`: for people, with `dead`."""

    kind: str
    verdict: Verdict
    reason: str = ""
    dead: bool = False
    completed: AttemptState | None = None
    readable: bool = False
    fence: Delete | Clear | None = None
    over_quota: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a record by itself: the reason by which it is counted, and a text for people."""

    reason: str
    detail: str


class Ingest:
    """Works in one write transaction of one partition."""

    def __init__(self, tables: Tables, meta: Meta, rules: Rules, blobs: Blobs, fresh: Fresh) -> None:
        """`fresh`: is told what becomes readable."""
        self.meta = meta
        self.removal = Removal(tables, rules)
        self._tables = tables
        self._rules = rules
        self._blobs = blobs
        self._fresh = fresh

    def apply(self, value: bytes | None, now_ms: int) -> Outcome:
        """`value`: of a Kafka record; `now_ms`: its append time. Never raises for what the record holds.

        Time never goes back, though the append times of two brokers may: what was swept stays so in every decision.
        """
        now_ms = max(self.meta.now_ms, now_ms)
        self.meta = replace(self.meta, now_ms=now_ms)
        try:
            record = decode(value)
        except BadRecord as error:
            return Outcome("unreadable", "quarantined", error.reason, dead=True, detail=error.detail)
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
        fault = self._fault(record) if barrier is None else None
        wrong = fault.reason if fault is not None else None
        facts = Facts(held, owner, self._base(record), barrier, wrong, self.meta.owners + 1)
        decision = decide(record, stored_checksum(value), now_ms, facts, self._rules)
        self._write(decision, held, record, value)
        kind = record.kind.name.lower()
        whole = decision.attempt if decision.verdict == "completed" else None
        if whole is not None:
            self._completed(whole, now_ms)
        gone = self._given_up()
        new = decision.attempt if decision.verdict in ("stored", "completed") else None
        if new is not None and not self.removal.hold_to_quota(new, now_ms):
            return Outcome(kind, "refused", "quota", over_quota=header.run)
        gave = header.run if self._given_up() > gone else None
        dead = decision.verdict in ("spoilt", "quarantined")
        readable = whole is not None and self._show(whole, decision.owner)
        detail = fault.detail if fault is not None and decision.reason == wrong else ""
        return Outcome(kind, decision.verdict, decision.reason, dead, whole, readable, over_quota=gave, detail=detail)

    def _show(self, whole: AttemptState, owner: Owner | None) -> bool:
        """Before the commit; not beside an attempt of the same id that the batch takes away, which is still seen."""
        return owner is not None and whole.key not in self.removal.ended and self._fresh.made_whole(whole, owner)

    def _given_up(self) -> int:
        return self.removal.removed["quota"] + self.removal.cut

    def _completed(self, whole: AttemptState, now_ms: int) -> None:
        header, end = whole.header, whole.end
        if self._rules.last_turn:
            self.removal.turn_over(whole, now_ms)
        if end is not None and end.card_digest is not None and self._card(header.run) is None:
            self._tables.put_card(header.run, end.card_digest, header.epoch)

    def _card(self, run: str) -> str | None:
        """Digest of the model card that the run is held to: by the settings, else by its first END that had one."""
        if run in self._rules.cards:
            return self._rules.cards[run]
        held = self._tables.card(run)
        return held[0] if held is not None else None

    def _fault(self, record: Chunk | End) -> Fault | None:
        """What is wrong with a record by itself, or by the model of its run."""
        checks = self._rules.checks
        if checks == "off":
            return None
        said = _card_of(record)
        card = self._card(record.header.run) if said is not None else None
        if card is not None and card != said:
            return Fault(
                "other_model", f"{_model(record)}card {said}; run {record.header.run} has the model card {card}"
            )
        return _content_fault(record, checks) if isinstance(record, Chunk) else None

    def _base(self, record: Chunk | End) -> AttemptState | None:
        base = record.header.base
        if base is None:
            return None
        held = self._tables.attempt(RolloutKey(record.header.run, base.rollout_id, base.choice), base.attempt)
        if held is not None and hidden(held.header, self.removal.doomed):
            return held.ended("gone", "deleted", held.at_ms)
        return held

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
            self._own(decision.owner, len(value) if decision.blob else 0, decision.verdict == "completed")
        if decision.blob and decision.owner is not None and isinstance(record, Chunk):
            self._blobs.put(self._tables, decision.owner.number, record.index, record.header.attempt, value)
            self._fresh.took_chunk(decision.owner.number, record)
        if decision.attempt is not None:
            self._tables.put_attempt(decision.attempt, held)
        if decision.verdict == "completed":
            self.meta = replace(self.meta, whole=self.meta.whole + 1)

    def _own(self, owner: Owner, more: int, whole: bool) -> None:
        size = owner.size + more
        self._fresh.took(owner)
        self._tables.put_owner(replace(owner, size=size, whole=whole))
        change = Usage(size, -owner.size) if whole else Usage(0, more)
        if change.whole or change.open:
            self._tables.add_usage(owner.run, change)
        self.meta = replace(self.meta, owners=max(self.meta.owners, owner.number))


def _card_of(record: Chunk | End) -> str | None:
    if isinstance(record, End):
        return record.card_digest
    return card_digest(record.layers, record.top_k, record.num_experts)


def _model(record: Chunk | End) -> str:
    if isinstance(record, End):
        return ""
    return f"{record.num_experts} experts, top-{record.top_k}, layers {list(record.layers)}, "


@lru_cache(1024)
def card_digest(layers: tuple[int, ...], top_k: int, num_experts: int) -> str:
    """Of the model card that a chunk's header tells."""
    return ModelCard(num_experts, top_k, layers).digest


def _content_fault(record: Chunk, checks: CheckLevel) -> Fault | None:
    """What is wrong with the rows of a chunk."""
    try:
        check_content(unpack(record), record.num_experts, checks)
    except BadRecord as error:
        return Fault(error.reason, error.detail)
    except InvalidInput as error:
        return Fault("expert_ids", error.reason)
    return None
