"""The tables of one partition as seen through one transaction, reading or writing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import Any, Literal

from moebus.consumers.store import keys
from moebus.consumers.store.doomed import Doomed
from moebus.consumers.store.env import Env
from moebus.consumers.store.state import (
    WHOLE,
    AttemptState,
    Owner,
    State,
    dump_attempt,
    dump_owner,
    load_attempt,
    load_owner,
)
from moebus.schemas.record import CheckLevel
from moebus.schemas.rollout import RolloutId, RolloutKey, ancestors

FORMAT = 2
TimeKind = Literal[b"o", b"w", b"m", b"f", b"t"]
"""open attempts, whole ones, marks of those that ended otherwise, fences, turns."""
_KIND_OF: dict[State, TimeKind] = {"open": b"o", "whole": b"w", "spoilt": b"m", "lost": b"m", "gone": b"m"}
_AGE_OF: dict[State, bytes] = {"whole": b"r", "open": b"p"}
_META = b"meta"


@dataclass(frozen=True, slots=True)
class Meta:
    """What belongs to the partition as a whole. `next_offset` None: nothing was read yet. `now_ms`: the latest append
    time read. `owners`: numbers given to blobs so far. `blobs`: where their bytes lie. `checks`: how closely all
    that is held was looked at."""

    cluster_id: str
    topic_id: str
    next_offset: int | None = None
    now_ms: int = 0
    owners: int = 0
    whole: int = 0
    format: int = FORMAT
    blobs: str = "lmdb"
    checks: CheckLevel = "off"


_META_FIELDS = tuple(one.name for one in fields(Meta))


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes that a run holds: of attempts that are whole (or were, where others use their rows), and of open ones."""

    whole: int
    open: int


_IN_PIECES = b"\0in pieces"
"""Stands for a blob whose bytes follow under keys of their own; no record begins so."""
_PAGE_HEAD = 16


@dataclass(frozen=True, slots=True)
class Fence:
    """A DELETE (`prefix` not empty) or CLEAR: epochs <= `epoch` are removed and refused. `at_ms`: its append time."""

    run: str
    prefix: str
    epoch: int
    at_ms: int

    def __str__(self) -> str:
        if not self.prefix:
            return f"cleared through epoch {self.epoch}"
        return f"deleted by prefix {self.prefix!r} up to epoch {self.epoch}; raise the epoch to use the id again"


@dataclass(frozen=True, slots=True)
class Turn:
    """The highest complete turn of a segment."""

    turn: int
    epoch: int
    at_ms: int


class Tables:
    """Reads and writes through `txn`; lives no longer than it. `scattered`: blobs are written in pieces of a page: LMDB
    keeps a value in pages that lie together, and a file that is nearly full may have no such run of pages left."""

    def __init__(self, env: Env, txn: Any, scattered: bool = False) -> None:
        self._db = env.tables
        self._txn = txn
        self._env = env
        self._scattered = scattered

    # attempts

    def attempt(self, key: RolloutKey, attempt: bytes) -> AttemptState | None:
        data = self._get("attempts", keys.attempt_key(key, attempt))
        return load_attempt(key, attempt, data) if data is not None else None

    def put_attempt(self, state: AttemptState, old: AttemptState | None) -> None:
        """`old`: the state that it replaces."""
        key = keys.attempt_key(state.key, state.header.attempt)
        if old is not None:
            self._delete("times", keys.time_key(_KIND_OF[old.state], old.at_ms, key))
            if old.state in _AGE_OF:
                self._delete("times", keys.age_key(_AGE_OF[old.state], old.key.run, old.at_ms, key))
        self._put("attempts", key, dump_attempt(state))
        self._put("times", keys.time_key(_KIND_OF[state.state], state.at_ms, key), b"")
        if state.state in _AGE_OF:
            self._put("times", keys.age_key(_AGE_OF[state.state], state.key.run, state.at_ms, key), b"")

    def drop_attempt(self, state: AttemptState) -> None:
        """Forgets it altogether, mark included."""
        key = keys.attempt_key(state.key, state.header.attempt)
        self._delete("times", keys.time_key(_KIND_OF[state.state], state.at_ms, key))
        self._delete("attempts", key)

    def attempts(self, start: bytes, after: bytes = b"") -> Iterator[AttemptState]:
        """All whose key starts with `start`, in order of the keys; with `after`, those behind that key."""
        for key, value in self._scan("attempts", start, after):
            yield load_attempt(*keys.split_attempt_key(key), value)

    def whole_attempts(self, start: bytes, after: bytes = b"") -> Iterator[AttemptState]:
        """Those of `attempts` that are whole; marks, of which a large delete leaves many, are passed over unread."""
        for key, value in self._scan("attempts", start, after):
            if value.startswith(WHOLE):
                yield load_attempt(*keys.split_attempt_key(key), value)

    # owners and blobs

    def owner(self, number: int) -> Owner | None:
        data = self._get("owners", keys.owner_key(number))
        return load_owner(number, data) if data is not None else None

    def put_owner(self, owner: Owner) -> None:
        self._put("owners", keys.owner_key(owner.number), dump_owner(owner))

    def add_refs(self, number: int, change: int) -> None:
        """At 0 the owner goes, and its blobs go to the trash."""
        owner = self.owner(number)
        if owner is None:
            raise LookupError(f"owner {number} of {self._env.path} is missing: remove the folder, it is rebuilt")
        if owner.refs + change > 0:
            self.put_owner(replace(owner, refs=owner.refs + change))
            return
        self._delete("owners", keys.owner_key(number))
        self.add_usage(owner.run, Usage(-owner.size, 0) if owner.whole else Usage(0, -owner.size))
        if owner.chunks:
            self._put("trash", keys.owner_key(number), b"")

    # runs

    def usage(self, run: str) -> Usage:
        data = self._get("usage", run.encode())
        return Usage(*json.loads(data)) if data is not None else Usage(0, 0)

    def add_usage(self, run: str, change: Usage) -> None:
        held = self.usage(run)
        held = Usage(held.whole + change.whole, held.open + change.open)
        if held.whole or held.open:
            self._put("usage", run.encode(), json.dumps([held.whole, held.open]).encode())
        else:
            self._delete("usage", run.encode())

    def usages(self, limit: int) -> list[tuple[str, Usage]]:
        """Those of the first `limit` runs that hold anything."""
        return [(name.decode(), Usage(*json.loads(held))) for name, held in islice(self._scan("usage", b""), limit)]

    def oldest(self, run: str, state: Literal["whole", "open"], but: AttemptState) -> AttemptState | None:
        """The attempt in this state whose last record is the oldest, `but` one left out."""
        start, own = keys.age_range(_AGE_OF[state], run), keys.attempt_key(but.key, but.header.attempt)
        for raw in islice(self._keys("times", start), 2):
            key = raw[len(start) + 8 :]
            if key != own:
                return self.attempt_of(key)
        return None

    def card(self, run: str) -> tuple[str, int] | None:
        """Digest of the model card that a run is held to, and the epoch that brought it."""
        data = self._get("cards", run.encode())
        if data is None:
            return None
        digest, epoch = json.loads(data)
        return digest, epoch

    def put_card(self, run: str, digest: str, epoch: int) -> None:
        self._put("cards", run.encode(), json.dumps([digest, epoch]).encode())

    # removals that are not finished

    def doomed(self) -> tuple[Doomed, ...]:
        return tuple(Doomed.load(key, value) for key, value in self._scan("doomed", b""))

    def put_doomed(self, job: Doomed) -> None:
        self._put("doomed", job.key, job.dump())

    def drop_doomed(self, job: Doomed) -> None:
        self._delete("doomed", job.key)

    def drop_card(self, run: str) -> None:
        self._delete("cards", run.encode())

    # blobs

    def blob(self, owner: int, index: int) -> bytes | None:
        key = keys.blob_key(owner, index)
        entry = self._get("blobs", key)
        if entry != _IN_PIECES:
            return entry
        return b"".join(piece for name, piece in self._scan("blobs", key) if name != key)

    def put_blob(self, owner: int, index: int, data: bytes) -> None:
        key, piece = keys.blob_key(owner, index), self._env.page - _PAGE_HEAD
        if self._scattered and len(data) > piece:
            for number, start in enumerate(range(0, len(data), piece)):
                self._put("blobs", keys.piece_key(key, number), data[start : start + piece])
            data = _IN_PIECES
        self._put("blobs", key, data)

    def entries(self, owner: bytes) -> Iterator[bytes]:
        """What the table of blobs holds of an owner; `owner` as `trash` gives it."""
        for _, entry in self._scan("blobs", owner):
            yield entry

    def trash(self, limit: int) -> list[bytes]:
        """Owners (first bytes of their blobs' keys) whose blobs are still to be freed; the first `limit`."""
        return list(islice(self._keys("trash"), limit))

    def free(self, owner: bytes, limit: int) -> int:
        """Frees up to `limit` blobs, or pieces of blobs, of a trashed owner; returns how many."""
        done = 0
        with self._txn.cursor(self._db["blobs"]) as cursor:
            found = cursor.set_range(owner)
            while found and done < limit and cursor.key().startswith(owner):
                found = cursor.delete()  # moves on
                done += 1
        if done < limit:
            self._delete("trash", owner)
        return done

    # fences and turns

    def fence(self, run: str, prefix: str) -> Fence | None:
        """That of a DELETE; with an empty prefix, of a CLEAR."""
        data = self._get("fences", keys.fence_key(run, prefix))
        return Fence(run, prefix, *json.loads(data)) if data is not None else None

    def put_fence(self, fence: Fence, old: Fence | None) -> None:
        key = keys.fence_key(fence.run, fence.prefix)
        if old is not None:
            self._delete("times", keys.time_key(b"f", old.at_ms, key))
        self._put("fences", key, json.dumps([fence.epoch, fence.at_ms]).encode())
        if fence.prefix:  # a CLEAR stays
            self._put("times", keys.time_key(b"f", fence.at_ms, key), b"")

    def fence_over(self, run: str, rollout_id: str) -> Fence | None:
        """The fence of the highest epoch that covers an id."""
        found = [self.fence(run, prefix) for prefix in ("", *ancestors(rollout_id))]
        return max((fence for fence in found if fence is not None), key=lambda fence: fence.epoch, default=None)

    def turn(self, run: str, rollout_id: RolloutId, choice: int) -> Turn | None:
        data = self._get("turns", keys.turn_key(run, rollout_id, choice))
        return Turn(*json.loads(data)) if data is not None else None

    def put_turn(self, run: str, rollout_id: RolloutId, choice: int, turn: Turn, old: Turn | None) -> None:
        key = keys.turn_key(run, rollout_id, choice)
        if old is not None:
            self._delete("times", keys.time_key(b"t", old.at_ms, key))
        self._put("turns", key, json.dumps([turn.turn, turn.epoch, turn.at_ms]).encode())
        self._put("times", keys.time_key(b"t", turn.at_ms, key), b"")

    # time

    def due(self, kind: TimeKind, before_ms: int, limit: int) -> list[tuple[int, bytes]]:
        """(time, key) of what is older than `before_ms`, oldest first."""
        found: list[tuple[int, bytes]] = []
        for raw in self._keys("times", kind):
            at_ms, key = keys.split_time_key(raw)
            if at_ms >= before_ms or len(found) >= limit:
                break
            found.append((at_ms, key))
        return found

    def attempt_of(self, key: bytes) -> AttemptState:
        """Of a key that `due` gave."""
        data = self._get("attempts", key)
        assert data is not None
        return load_attempt(*keys.split_attempt_key(key), data)

    def forget(self, kind: TimeKind, before_ms: int, limit: int) -> int:
        """Drops up to `limit` fences or turns older than `before_ms`; returns how many."""
        table = {b"f": "fences", b"t": "turns"}[kind]
        old = self.due(kind, before_ms, limit)
        for at_ms, key in old:
            self._delete("times", keys.time_key(kind, at_ms, key))
            self._delete(table, key)
        return len(old)

    # meta

    def meta(self) -> Meta | None:
        data = self._get("meta", _META)
        if data is None:
            return None
        said: dict[str, Any] = json.loads(data)
        return Meta(**{name: said[name] for name in _META_FIELDS if name in said})  # a later version may say more

    def put_meta(self, meta: Meta) -> None:
        self._put("meta", _META, json.dumps(asdict(meta)).encode())

    def used_bytes(self) -> int:
        return self._env.used_bytes(self._txn)

    def _get(self, table: str, key: bytes) -> bytes | None:
        found: bytes | None = self._txn.get(key, db=self._db[table])
        return found

    def _put(self, table: str, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=self._db[table])

    def _delete(self, table: str, key: bytes) -> None:
        self._txn.delete(key, db=self._db[table])

    def _scan(self, table: str, start: bytes, after: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        with self._txn.cursor(self._db[table]) as cursor:
            found = cursor.set_range(max(start, after))
            if found and after and cursor.key() == after:
                found = cursor.next()
            while found and cursor.key().startswith(start):
                yield cursor.item()
                found = cursor.next()

    def _keys(self, table: str, start: bytes = b"") -> Iterator[bytes]:
        with self._txn.cursor(self._db[table]) as cursor:
            found = cursor.set_range(start) if start else cursor.first()
            while found and cursor.key().startswith(start):
                yield cursor.key()
                found = cursor.next()
