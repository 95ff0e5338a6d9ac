"""One partition of the store: its environment, the open batch, and what was read but is not committed yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lmdb

from moebus.consumers.store.blobs.inline import InlineBlobs
from moebus.consumers.store.blobs.port import Blobs, BlobsUnavailable
from moebus.consumers.store.courtesy import press_on
from moebus.consumers.store.decide import Rules
from moebus.consumers.store.env import Env, wipe
from moebus.consumers.store.figures import Batch, Figures, RunFigures
from moebus.consumers.store.fresh import Fresh
from moebus.consumers.store.ingest import Ingest, Outcome
from moebus.consumers.store.tables import Meta, Tables
from moebus.schemas.errors import BadRecord
from moebus.schemas.record import CheckLevel, Clear, Delete, Kind, decode, weaker

_KIND_AT = 5
_RECORD_OVERHEAD = 16_384  # index pages that a record may touch
_GATHER_BELOW = 0.5
RESERVE = 0.05
"""Part of the map, or of what the disk leaves of it, that is kept for deletes."""
_FREE_SLICE, _FREE_PIECE = 500, 10
REMOVE_SLICE = 50


class StoreFull(Exception):
    """The record does not fit; nothing of it was kept. What was applied before it in this batch stays unless `lost`."""

    def __init__(self, detail: str, lost: bool) -> None:
        super().__init__(detail)
        self.lost = lost


@dataclass(frozen=True, slots=True)
class Guard:
    """Which log the data came from."""

    cluster_id: str
    topic_id: str


class Partition:
    """`apply`, `commit`, `rollback`, `tidy` and `rebuild` belong to one thread; the rest to any."""

    def __init__(
        self,
        number: int,
        path: Path,
        guard: Guard,
        rules: Rules,
        map_bytes: int,
        sync: bool = True,
        blobs: Blobs | None = None,
        room: Callable[[], int] | None = None,
    ) -> None:
        """Opens what is there; data of another log, of another format or with its blobs elsewhere is removed and read
        again. `blobs`: where the bytes lie, default LMDB. `room()`: bytes that its file may grow to, default what the
        disk leaves of the map.

        Raises:
            SettingsError: the folder cannot be used.
        """
        self.number = number
        self.path = path
        self._rules = rules
        self._map_bytes = map_bytes
        self._sync = sync
        self._txn: Any = None
        self._ingest: Ingest | None = None
        self._batch = Batch()
        self._pending: tuple[Delete | Clear, ...] = ()
        self._unfinished: tuple[Delete | Clear, ...] = ()
        self._scattered = False
        self.fresh = Fresh()
        """What of the open batch is readable already."""
        self.turns = 0
        """Of deletes read and batches ended: what was seen in one turn is of one moment."""
        self.blobs = blobs or InlineBlobs()
        self.damaged: str | None = None
        """What a reader found missing or unreadable; the one that writes rebuilds."""
        self.watched = False
        """Whether batches note what they change."""
        self.env = Env(path, map_bytes, sync=sync)
        self._share = room
        self._room = self._ask_room()
        self._meta = self._load(guard)
        self.next_offset = self._meta.next_offset
        self._used = self._measure()

    def _load(self, guard: Guard) -> Meta:
        with self.env.reading() as txn:
            found = Tables(self.env, txn).meta()
            self._unfinished = tuple(job.record for job in Tables(self.env, txn).doomed())
        fresh = self._fresh(guard)
        if found is not None and _origin(found) != _origin(fresh):
            self._empty()
            found = None
        return replace(found, checks=weaker(found.checks, self._rules.checks)) if found is not None else fresh

    def _fresh(self, guard: Guard) -> Meta:
        return Meta(guard.cluster_id, guard.topic_id, blobs=self.blobs.identity, checks=self._rules.checks)

    def _empty(self) -> None:
        self._unfinished = ()
        self.env.close()
        wipe(self.path)
        self.env = Env(self.path, self._map_bytes, sync=self._sync)

    def rebuild(self, guard: Guard) -> None:
        """Throws everything away: the log is read again from its start."""
        self.rollback()
        self._empty()
        self.blobs.forget()
        self.damaged = None
        self._meta = self._fresh(guard)
        self.next_offset = None
        self._used = 0

    @property
    def checked(self) -> CheckLevel:
        """How closely all rows that are held were looked at."""
        return self._meta.checks

    @property
    def guard(self) -> Guard:
        return Guard(self._meta.cluster_id, self._meta.topic_id)

    @property
    def now_ms(self) -> int:
        """The latest append time that is committed."""
        return self._meta.now_ms

    @property
    def dirty(self) -> bool:
        """Whether something waits for a commit."""
        return self._txn is not None

    @property
    def completes(self) -> bool:
        """Whether the open batch makes an attempt whole."""
        return self._batch.whole > 0

    @property
    def batch_bytes(self) -> int:
        return self._batch.bytes

    @property
    def batch_limit(self) -> int:
        """Bytes that an open batch may have: pages it takes must not be those that deletes will need."""
        return max(1, int(self._room * RESERVE / 2))

    def figures(self, *, ask: bool = True) -> Figures:
        """`ask`: how much room there is now; else as of the last commit."""
        meta = self._meta
        room = self._ask_room() if ask else self._room
        return Figures(meta.next_offset, meta.now_ms, meta.whole, self._used, self._map_bytes, room)

    def runs(self, limit: int = 100) -> list[RunFigures]:
        """The first `limit` runs that hold anything, as of the last commit. Any thread may ask.

        Raises:
            EnvClosed: rebuilt or stopped in the meantime.
        """
        rules = self._rules
        with self.reading() as (tables, _):
            found = [(run, used, tables.card(run)) for run, used in tables.usages(limit)]
        return [
            RunFigures(run, used.whole, used.open, rules.quota(run), rules.cards.get(run, card[0] if card else None))
            for run, used, card in found
        ]

    def apply(self, offset: int, value: bytes | None, now_ms: int) -> Outcome:
        """One record into the open batch. `now_ms`: its append time.

        Raises:
            StoreFull: no room; DELETE and CLEAR have a reserve of their own.
        """
        size = len(value or b"")
        if _frees(value):
            self._pending = (*self._pending, *_fence_of(value))  # readers know it before anything is taken away
            self.turns += 1
        elif self._level(size) > 1 - RESERVE:
            raise StoreFull(self._fill(), lost=False)
        with self._guarded() as ingest:
            outcome = ingest.apply(value, now_ms)
        if outcome.completed is not None:
            self._batch.whole += 1
            if not outcome.readable:
                self._batch.now_readable.append(now_ms)
            if self.watched:
                self._batch.changes.add(outcome.completed.key)
        self._batch.bytes += size + _RECORD_OVERHEAD
        self.next_offset = offset + 1
        return outcome

    def skip_to(self, offset: int) -> None:
        """Where reading starts in an empty partition."""
        self._meta = replace(self._meta, next_offset=offset)
        self.next_offset = offset

    def commit(self) -> Batch:
        """Data, index and next offset become durable together; bytes that lie elsewhere are durable before.

        Raises:
            StoreFull: not even this fits, or bytes cannot be written; the batch is lost and is read again.
        """
        if self._txn is None or self._ingest is None:
            return Batch()
        try:
            self.blobs.settle()
        except BlobsUnavailable as error:
            self.rollback()
            raise StoreFull(str(error), lost=True) from error
        batch, removal = self._batch, self._ingest.removal
        batch.removed.update({str(cause): count for cause, count in removal.removed.items()})
        if removal.cut:
            batch.removed["quota_open"] += removal.cut
        whole = self._ingest.meta.whole - removal.removed.total()
        meta = replace(self._ingest.meta, next_offset=self.next_offset, whole=whole)
        try:
            Tables(self.env, self._txn).put_meta(meta)
            self._txn.commit()
        except lmdb.Error as error:
            self.rollback()
            self._raise_full(error)
            raise
        self._meta = meta
        self._unfinished = tuple(job.record for job in removal.doomed)
        self.blobs.committed()
        self._reset()  # after the commit: a reader that misses the fence here finds it in the tables
        self._used = self._measure()
        if self._used < _GATHER_BELOW * self._room:
            self._scattered = False
        return batch

    def rollback(self) -> None:
        """Drops the open batch; reading goes on from the last commit."""
        self.fresh.dropped = True  # first: see `View.find`
        if self._txn is not None:
            self._txn.abort()
        self.blobs.abandoned()
        self._reset()
        self.next_offset = self._meta.next_offset

    def tidy(self, now_ms: int, give_way: Callable[[], None] = press_on) -> bool:
        """Takes away a slice of what is deleted or what time has ended, and frees a slice of what was removed; True
        when there may be more. `give_way`: is called again and again, for readers.

        Raises:
            StoreFull: the batch is lost.
        """
        with self.env.reading() as txn:
            if not self._due(Tables(self.env, txn), now_ms):
                return False
        with self._guarded() as ingest:
            removal, tables = ingest.removal, Tables(self.env, self._txn)
            removal.give_way = give_way
            more = removal.work(REMOVE_SLICE) or removal.sweep(now_ms, REMOVE_SLICE)
            removal.give_way = press_on
            limit = REMOVE_SLICE if more else _FREE_SLICE  # marks take room, so some has to come back meanwhile
            for _ in range(0, limit, _FREE_PIECE):
                give_way()
                if self.blobs.free(tables, _FREE_PIECE) < _FREE_PIECE:
                    return more
            return True

    def take_away(self, record: Delete | Clear, now_ms: int, spare: frozenset[bytes]) -> int:
        """What a DELETE or CLEAR further on in the log will remove anyway, now, to make room; returns how many went.

        Raises:
            StoreFull: the batch is lost.
        """
        with self._guarded() as ingest:
            return ingest.removal.take_away(record, now_ms, spare)

    @contextmanager
    def reading(self) -> Iterator[tuple[Tables, tuple[Delete | Clear, ...]]]:
        """The tables as of the last commit, and the deletes read since. Keep it short.

        Raises:
            EnvClosed: rebuilt or stopped in the meantime.
        """
        pending = self._pending + self._unfinished  # first: see `commit`
        env = self.env
        with env.reading() as txn:
            yield Tables(env, txn), pending

    def close(self) -> None:
        """Drops the open batch and closes; a second call does nothing."""
        self.rollback()
        self.env.close()

    @contextmanager
    def _guarded(self) -> Iterator[Ingest]:
        """The open batch; whatever goes wrong inside, it is dropped, since half of a record may be written."""
        try:
            yield self._begin()
        except Exception as error:
            self.rollback()
            if isinstance(error, lmdb.Error):
                self._raise_full(error)
            raise

    def _raise_full(self, error: lmdb.Error) -> None:
        if self.env.is_full(error):
            self._scattered = self._scattered or self._level(0) <= 1 - RESERVE  # room, but not in one piece
            raise StoreFull(str(error), lost=True) from error

    def _begin(self) -> Ingest:
        if self._ingest is None:
            self._txn = self.env.begin_write()
            tables = Tables(self.env, self._txn, self._scattered)
            self._ingest = Ingest(tables, self._meta, self._rules, self.blobs, self.fresh)
            self._ingest.removal.changes = self._batch.changes if self.watched else None
        return self._ingest

    def _reset(self) -> None:
        self._txn = None
        self._ingest = None
        self._batch = Batch()
        self._pending = ()
        self.fresh = Fresh()
        self.turns += 1
        self._room = self._ask_room()

    def _ask_room(self) -> int:
        return self.env.room_bytes() if self._share is None else self._share()

    def _fill(self) -> str:
        of = "its map" if self._room >= self._map_bytes else "its share of the disk"
        return f"{self._used} of the {self._room} bytes of {of} are in use"

    def _due(self, tables: Tables, now_ms: int) -> bool:
        rules = self._rules
        limits = {
            b"o": rules.open_ttl_ms, b"w": rules.keep_ttl_ms, b"m": rules.fence_ttl_ms, b"f": rules.fence_ttl_ms,
            b"t": rules.fence_ttl_ms,
        }  # fmt: skip
        if self._unfinished or self.blobs.due(tables):
            return True
        return any(tables.due(kind, now_ms - ttl, 1) for kind, ttl in limits.items())  # type: ignore[arg-type]

    def _level(self, size: int) -> float:
        return (self._used + self._batch.bytes + size + _RECORD_OVERHEAD) / self._room

    def _measure(self) -> int:
        with self.env.reading() as txn:
            return self.env.used_bytes(txn)


def _origin(meta: Meta) -> tuple[int, str, str, str]:
    """What data must have come from to be of use."""
    return meta.format, meta.cluster_id, meta.topic_id, meta.blobs


def _fence_of(value: bytes | None) -> tuple[Delete | Clear, ...]:
    """The DELETE or CLEAR in a record, if it is one."""
    try:
        record = decode(value)
    except BadRecord:
        return ()
    return (record,) if isinstance(record, (Delete, Clear)) else ()


def _frees(value: bytes | None) -> bool:
    return value is None or len(value) <= _KIND_AT or value[_KIND_AT] in (Kind.DELETE, Kind.CLEAR)
