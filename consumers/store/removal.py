"""Everything that takes attempts away: deletes, clears, later turns, age, and the blobs that follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal

from moebus.consumers.store import keys
from moebus.consumers.store.changes import Changes
from moebus.consumers.store.courtesy import press_on
from moebus.consumers.store.decide import Rules
from moebus.consumers.store.doomed import Doomed, hidden
from moebus.consumers.store.state import AttemptState
from moebus.consumers.store.tables import Fence, Tables, Turn
from moebus.schemas.record import Clear, Delete
from moebus.schemas.rollout import RolloutId, RolloutKey, same_segment, structured

Cause = Literal["delete", "clear", "last_turn", "age", "lost", "quota"]
_SLICE = 1000
_PIECE = 10
"""Attempts that are read at once where readers are given way between them."""
AT_ONCE = 50
"""Attempts that a DELETE or CLEAR takes away before the next record is read; the others follow in slices."""


class Removal:
    """Works in one write transaction. `removed`: whole attempts taken away, by cause; `cut`: those that a quota ended
    before they were whole."""

    def __init__(self, tables: Tables, rules: Rules) -> None:
        self._tables = tables
        self._rules = rules
        self.removed: Counter[Cause] = Counter()
        self.changes: Changes | None = None
        """Where whole attempts that go are noted, if anybody wants to know."""
        self.ended: set[RolloutKey] = set()
        """Of whole attempts that went otherwise than by a DELETE or CLEAR, of which readers hear before the commit."""
        self.give_way: Callable[[], None] = press_on
        """Is called between two attempts, or marks, that go."""
        self.cut = 0
        self.doomed = tables.doomed()
        """Removals that are not finished; what they cover counts as gone."""

    def fence(self, record: Delete | Clear, now_ms: int) -> None:
        """Applies a DELETE or CLEAR and remembers it for what comes late."""
        prefix = record.prefix if isinstance(record, Delete) else ""
        epoch = record.epoch if isinstance(record, Delete) else record.through_epoch
        old = self._tables.fence(record.run, prefix)
        fence = Fence(record.run, prefix, max(epoch, old.epoch if old else 0), now_ms)
        self._tables.put_fence(fence, old)
        card = self._tables.card(record.run)
        if isinstance(record, Clear) and card is not None and card[1] <= epoch:
            self._tables.drop_card(record.run)  # what comes in a later epoch may be of another model
        self._go_on(Doomed(record.run, prefix, fence.epoch, now_ms), AT_ONCE)

    def work(self, limit: int) -> bool:
        """Goes on with removals, up to about `limit` attempts; True while there is more."""
        if self.doomed:
            self._go_on(self.doomed[0], limit)
        return bool(self.doomed)

    def _go_on(self, job: Doomed, limit: int) -> None:
        """Does a part of a removal and notes where it stands."""
        self._tables.drop_doomed(job)
        self.doomed = tuple(one for one in self.doomed if one.key != job.key)
        rest = self._slice(job, limit)
        if rest is not None:
            self._tables.put_doomed(rest)
            self.doomed = (rest, *self.doomed)

    def _slice(self, job: Doomed, limit: int) -> Doomed | None:
        """What is left of a removal after up to `limit` attempts; None when it is finished."""
        cause: Cause = "delete" if job.prefix else "clear"
        reason = str(Fence(job.run, job.prefix, job.epoch, job.at_ms))
        left: Doomed | None = job
        while left is not None and limit > 0:
            found = list(islice(self._tables.attempts(left.ranges[left.part], left.after), min(limit, _PIECE)))
            for state in found:
                if state.state != "gone" and state.header.epoch <= job.epoch:
                    self.remove(state, cause, reason, job.at_ms)
            limit -= len(found)
            last = keys.attempt_key(found[-1].key, found[-1].header.attempt) if found else None
            left = left.behind(last) if last is not None else left.next_part()
        return left

    def take_away(self, record: Delete | Clear, now_ms: int, spare: frozenset[bytes] = frozenset()) -> int:
        """Removes what a DELETE or CLEAR covers, but the attempts in `spare`; returns how many went."""
        cause: Cause
        ranges: tuple[bytes, ...]
        if isinstance(record, Delete):
            cause, ranges = "delete", keys.prefix_ranges(record.run, record.prefix)
            fence = Fence(record.run, record.prefix, record.epoch, now_ms)
        else:
            cause, ranges = "clear", (keys.run_range(record.run),)
            fence = Fence(record.run, "", record.through_epoch, now_ms)
        done = 0
        for start in ranges:
            for state in self._all(start):
                if state.state == "gone" or state.header.epoch > fence.epoch or state.header.attempt in spare:
                    continue
                self.remove(state, cause, str(fence), now_ms)
                done += 1
        return done

    def remove(self, state: AttemptState, cause: Cause, reason: str, now_ms: int) -> None:
        """Leaves a mark in place of an attempt."""
        self.give_way()
        if state.state == "whole":
            self.removed[cause] += 1
            if cause not in ("delete", "clear"):
                self.ended.add(state.key)
            if self.changes is not None:
                self.changes.add(state.key)
        elif cause == "quota":
            self.cut += 1
        mark = state.ended("lost" if cause == "lost" else "gone", reason, now_ms)
        self._tables.put_attempt(mark, state)
        self.release(state)

    def release(self, state: AttemptState) -> None:
        """Ends its hold on blobs: its own and those of its base."""
        for part in state.parts:
            if part.owner != state.owner:
                self._tables.add_refs(part.owner, -1)
        if state.owner:
            self._tables.add_refs(state.owner, -1)

    def turn_over(self, state: AttemptState, now_ms: int) -> None:
        """A complete turn removes the lower ones of its segment (`keep=last_turn`)."""
        rollout_id = structured(state.key.rollout_id)
        if rollout_id is None or state.end is None or state.end.status != "complete":
            return
        run, choice, epoch = state.header.run, state.header.choice, state.header.epoch
        old = self._tables.turn(run, rollout_id, choice)
        if old is None or (epoch, rollout_id.turn) >= (old.epoch, old.turn):
            self._tables.put_turn(run, rollout_id, choice, Turn(rollout_id.turn, epoch, now_ms), old)
        start = keys.run_range(run) + f"{rollout_id.data}:{rollout_id.gen}:".encode()
        for lower in self._all(start):
            other = structured(lower.key.rollout_id)
            if hidden(lower.header, self.doomed):
                continue
            if lower.state != "gone" and lower.header.choice == choice and lower.header.epoch <= epoch:
                self._supersede(lower, other, rollout_id, now_ms)

    def _supersede(self, lower: AttemptState, other: RolloutId | None, turn: RolloutId, now_ms: int) -> None:
        if other is not None and same_segment(other, turn) and other.turn < turn.turn:
            self.remove(lower, "last_turn", superseded(turn.turn), now_ms)

    def hold_to_quota(self, state: AttemptState, now_ms: int) -> bool:
        """After `state` took bytes in or became whole: its run keeps at most the quota of whole attempts, and at most
        as much again of open ones. The oldest of the same kind make room; what alone is larger goes itself, before
        anything makes room for it. Returns whether it may stay.

        What its time has ended does not count, so the outcome depends on the log alone, not on when that was swept.
        """
        run = state.key.run
        limit = self._rules.quota(run)
        owner = self._tables.owner(state.owner) if limit is not None else None
        if limit is None or owner is None:
            return True
        quota = f"quota of run {run}: {limit} bytes in a partition"
        if owner.size > limit:
            self.remove(state, "quota", f"{quota}; this one alone is larger", now_ms)
            return False
        kind: Literal["whole", "open"] = "whole" if state.state == "whole" else "open"
        if self._held(run, kind) > limit:
            self._expire(now_ms)
        while self._held(run, kind) > limit:
            old = self._tables.oldest(run, kind, but=state)
            if old is None:  # rows of its base, which nothing else holds any more
                self.remove(state, "quota", f"{quota}; with its base this one is larger", now_ms)
                return False
            self.remove(old, "quota", f"{quota}; the oldest made room for later ones", now_ms)
        return True

    def _held(self, run: str, kind: Literal["whole", "open"]) -> int:
        usage = self._tables.usage(run)
        return usage.whole if kind == "whole" else usage.open

    def _expire(self, now_ms: int) -> None:
        tables, rules = self._tables, self._rules
        while self.work(_SLICE):
            pass
        while tables.due(b"o", now_ms - rules.open_ttl_ms, 1) or tables.due(b"w", now_ms - rules.keep_ttl_ms, 1):
            self.sweep(now_ms)

    def sweep(self, now_ms: int, limit: int = _SLICE) -> bool:
        """What time takes away: open attempts, whole ones, marks, fences, turns; up to `limit` of each a call. True
        while there may be more."""
        tables, rules = self._tables, self._rules
        late = tables.due(b"o", now_ms - rules.open_ttl_ms, limit)
        for _, key in late:
            self.remove(tables.attempt_of(key), "lost", f"not whole {rules.open_ttl_ms // 1000} s after", now_ms)
        old = tables.due(b"w", now_ms - rules.keep_ttl_ms, limit)
        for _, key in old:
            self.remove(tables.attempt_of(key), "age", f"kept for {rules.keep_ttl_ms // 1000} s", now_ms)
        marks = tables.due(b"m", now_ms - rules.fence_ttl_ms, limit)
        for _, key in marks:
            self.give_way()
            tables.drop_attempt(tables.attempt_of(key))
        forgotten = [tables.forget(kind, now_ms - rules.fence_ttl_ms, limit) for kind in (b"f", b"t")]
        return max(len(late), len(old), len(marks), *forgotten) >= limit

    def _all(self, start: bytes) -> Iterator[AttemptState]:
        """In slices, because the loop's body writes to the table that is read."""
        after = b""
        while found := list(islice(self._tables.attempts(start, after), _SLICE)):
            yield from found
            after = keys.attempt_key(found[-1].key, found[-1].header.attempt)


def superseded(turn: int) -> str:
    """Why a lower turn is not there."""
    return f"superseded by turn {turn}"
