"""What a CHUNK or END does to its attempt: a pure function of the record and of what is held.

The outcome is the same on every store that read the same log, whatever the batches and the restarts were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from moebus.consumers.store.state import AttemptState, ChunkInfo, Owner, Part, Shape, cut
from moebus.schemas.record import Base, CheckLevel, Chunk, End, Header, whole_checksum

Verdict = Literal["stored", "completed", "duplicate", "refused", "late", "spoilt", "quarantined"]
"""stored, completed: taken. duplicate: held already. refused: a delete, a clear or a later turn came first. late: other
content for an attempt that has ended. spoilt, quarantined: wrong; a copy goes to the dead letters."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the store holds that bears on a record.

    `attempt`, `owner`: of the record's own attempt, None where never seen. `base`: the attempt that its base names.
    `barrier`: why nothing more is taken under this id and epoch (a fence, a later turn). `fault`: what is wrong with
    the rows of a chunk. `next_owner`: the number that new blobs get.
    """

    attempt: AttemptState | None
    owner: Owner | None
    base: AttemptState | None
    barrier: str | None
    fault: str | None
    next_owner: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What to write. `release`: attempts whose hold on blobs ends first. `pin`: parts whose owners gain a reference.
    `blob`: the record itself is kept, under `owner`."""

    verdict: Verdict
    reason: str = ""
    attempt: AttemptState | None = None
    owner: Owner | None = None
    release: AttemptState | None = None
    pin: tuple[Part, ...] = ()
    blob: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """How long things live, in milliseconds of the broker's clock, what a new turn does to the one before, and how
    closely rows are looked at. `quotas`: bytes that a run may hold in one partition (`*`: every run that is not
    named); `cards`: digests of the model cards of runs whose model is known beforehand."""

    open_ttl_ms: int = 3_600_000
    keep_ttl_ms: int = 86_400_000
    fence_ttl_ms: int = 172_800_000
    last_turn: bool = False
    checks: CheckLevel = "ids"
    quotas: Mapping[str, int] = field(default_factory=dict)
    cards: Mapping[str, str] = field(default_factory=dict)

    def quota(self, run: str) -> int | None:
        """Bytes; None where there is no limit."""
        return self.quotas.get(run, self.quotas.get("*"))


def decide(record: Chunk | End, checksum: int, now_ms: int, facts: Facts, rules: Rules) -> Decision:
    """`checksum`: of the record. `now_ms`: its append time."""
    held = facts.attempt
    if facts.barrier is not None:
        mark = AttemptState(record.header, "gone", 0, now_ms, reason=facts.barrier) if held is None else None
        return Decision("refused", facts.barrier, mark)
    if held is None or held.state == "lost":
        return _begin(record, checksum, now_ms, facts, rules, None)
    if held.state == "open":
        if now_ms - held.at_ms > rules.open_ttl_ms:  # whether or not it was swept yet
            return _begin(record, checksum, now_ms, facts, rules, held)
        assert facts.owner is not None
        return _go_on(record, checksum, now_ms, held, facts.owner, facts.fault, rules.checks)
    if held.state == "whole":
        return _after_the_end(record, checksum, held, facts.owner)
    return Decision("refused" if held.state == "gone" else "late", held.reason)


def _begin(
    record: Chunk | End, checksum: int, now_ms: int, facts: Facts, rules: Rules, old: AttemptState | None
) -> Decision:
    """The first record of an attempt; `old`: what was left of an earlier try."""
    base = record.header.base
    parts: tuple[Part, ...] = ()
    shape = None
    if base is not None:
        wrong = base_fault(record.header, base, facts.base, now_ms - rules.keep_ttl_ms)
        if wrong is not None:
            lost = AttemptState(record.header, "lost", 0, now_ms, reason=wrong)
            return Decision("quarantined", wrong, lost, release=old)
        assert facts.base is not None
        parts, shape = cut(facts.base.parts, base.rows), facts.base.shape
    owner = Owner(facts.next_owner, 1, record.header.attempt, run=record.header.run)
    fresh = AttemptState(record.header, "open", owner.number, now_ms, parts, shape)
    taken = _go_on(record, checksum, now_ms, fresh, owner, facts.fault, rules.checks)
    if taken.verdict == "spoilt":  # it never held anything
        return replace(taken, release=old, owner=None)
    return replace(taken, release=old, pin=parts)


def base_fault(header: Header, base: Base, held: AttemptState | None, oldest_ms: int) -> str | None:
    """Why an attempt cannot go on from `base`; None where it can. `oldest_ms`: what ended before has had its time."""
    if held is None or held.state != "whole" or held.end is None or held.at_ms < oldest_ms:
        return "base_not_held"
    if held.header.group != header.group:
        return "base_mismatch"
    end = held.end
    known = {end.rows: end.token_hash, end.prompt_rows: end.prompt_hash}
    if end.prompt_rows == end.rows:
        known = {end.rows: end.token_hash or end.prompt_hash}
    if base.rows not in known or base.rows > end.rows:
        return "base_mismatch"
    expected = known[base.rows]
    if base.token_hash is not None and expected is not None and base.token_hash != expected:
        return "base_mismatch"
    return None


def _go_on(
    record: Chunk | End,
    checksum: int,
    now_ms: int,
    held: AttemptState,
    owner: Owner,
    fault: str | None,
    checks: CheckLevel,
) -> Decision:
    wrong = fault or _contradiction(record, checksum, held, owner)
    if wrong is not None:
        return Decision("spoilt", wrong, held.ended("spoilt", wrong, now_ms), release=held)
    if _is_held(record, checksum, held, owner):
        return Decision("duplicate", attempt=replace(held, at_ms=now_ms))
    if isinstance(record, End):
        held = replace(held, end=record)
    else:
        info = ChunkInfo(record.index, record.start, record.rows, checksum, record.versions)
        chunks = tuple(sorted((*owner.chunks, info), key=lambda chunk: chunk.index))
        shape = _shape(record)
        owner, held = replace(owner, shape=shape, chunks=chunks), replace(held, shape=shape)
    return _settle(replace(held, at_ms=now_ms), owner, isinstance(record, Chunk), now_ms, checks)


def _settle(held: AttemptState, owner: Owner, blob: bool, now_ms: int, checks: CheckLevel) -> Decision:
    """Whole, if nothing is missing any more."""
    end = held.end
    if end is None or len(owner.chunks) < end.chunks:
        return Decision("stored", "", held, owner, blob=blob)
    wrong = _misfit(end, owner) or (other_card(end, owner) if checks != "off" else None)
    if wrong is not None:
        return Decision("spoilt", wrong, held.ended("spoilt", wrong, now_ms), release=held)
    own = end.header.own_start
    parts = (*held.parts, Part(owner.number, own, end.rows)) if end.rows > own else held.parts
    return Decision("completed", "", replace(held, state="whole", parts=parts), owner, blob=blob)


def _misfit(end: End, owner: Owner) -> str | None:
    row = end.header.own_start
    for chunk in owner.chunks:
        if chunk.start != row:
            return "rows_do_not_join"
        row += chunk.rows
    if row != end.rows:
        return "row_count"
    if whole_checksum(chunk.checksum for chunk in owner.chunks) != end.checksum:
        return "whole_checksum"
    return None


def other_card(end: End, owner: Owner) -> str | None:
    """Where the layers, top-k or experts of the chunks are not those of the model card that the END names."""
    if end.card_digest is None or owner.shape is None or owner.shape.card.digest == end.card_digest:
        return None
    return "other_card"


def _contradiction(record: Chunk | End, checksum: int, held: AttemptState, owner: Owner) -> str | None:
    if record.header != held.header:
        return "other_header"
    count = held.end.chunks if held.end else None
    if isinstance(record, End):
        if held.end is not None and held.end != record:
            return "other_end"
        return "chunk_beyond_end" if owner.chunks and owner.chunks[-1].index >= record.chunks else None
    if count is not None and record.index >= count:
        return "chunk_beyond_end"
    if held.shape is not None and held.shape != _shape(record):
        return "other_shape"
    return "other_content" if _differs(record.index, checksum, owner) else None


def _differs(index: int, checksum: int, owner: Owner) -> bool:
    return any(chunk.index == index and chunk.checksum != checksum for chunk in owner.chunks)


def _is_held(record: Chunk | End, checksum: int, held: AttemptState, owner: Owner) -> bool:
    if isinstance(record, End):
        return held.end == record
    return any(chunk.index == record.index for chunk in owner.chunks)


def _after_the_end(record: Chunk | End, checksum: int, held: AttemptState, owner: Owner | None) -> Decision:
    if isinstance(record, End):
        return Decision("duplicate" if held.end == record else "late", "other_end" if held.end != record else "")
    same = owner is not None and any(
        chunk.index == record.index and chunk.checksum == checksum for chunk in owner.chunks
    )
    return Decision("duplicate") if same else Decision("late", "other_content")


def _shape(chunk: Chunk) -> Shape:
    return Shape(chunk.layers, chunk.top_k, chunk.num_experts)
