"""Reading a partition: finding attempts, planning their rows, fetching them chunk by chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from moebus.consumers.store import keys
from moebus.consumers.store.blobs.port import BlobMissing, BlobsUnavailable, answer_of
from moebus.consumers.store.doomed import hides
from moebus.consumers.store.env import EnvClosed
from moebus.consumers.store.fresh import NOTHING, Fresh
from moebus.consumers.store.partition import Partition
from moebus.consumers.store.state import AttemptState, Owner
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import BadRecord
from moebus.schemas.record import CheckLevel, Chunk, Clear, Delete, Versions, decode, merge_versions, unpack
from moebus.schemas.rollout import RolloutKey
from moebus.schemas.route_errors import RouteCorrupt, RouteDeleted, StoreCatchingUp

Asked = tuple[bytes, "Future[bytes]"]
"""An entry of the index, and the bytes it names, on their way."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a partition holds under one identity. `fence`: what deletes it, None where nothing does. `applied`: next
    offset of the partition."""

    attempts: tuple[AttemptState, ...]
    fence: str | None
    applied: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, last) of one stored chunk (0 is the chunk's first row). `attempt`: whose chunk it must be."""

    owner: int
    index: int
    attempt: bytes
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How to read rows [start, stop) of a whole attempt."""

    pieces: tuple[Piece, ...]
    versions: Versions


class View:
    """Any thread may use it."""

    def __init__(self, partition: Partition, fresh: Fresh = NOTHING) -> None:
        """`fresh`: what is to be seen besides what is committed."""
        self._partition = partition
        self._fresh = fresh

    def find(self, key: RolloutKey) -> Finding:
        """Every attempt of a rollout; those that a delete read a moment ago removes are shown as gone."""
        with self._partition.reading() as (tables, pending):
            if self._fresh.dropped:  # what was read again is in these tables, and may have other numbers
                self._fresh = NOTHING
            held = self._fresh.over(key, list(tables.attempts(keys.choice_range(key))))
            found = tuple(_seen(state, pending) for state in held)
            fence = tables.fence_over(key.run, key.rollout_id)
            meta = tables.meta()
        covering = [record for record in pending if hides(record, key.run, key.rollout_id, 0)]
        text = str(fence) if fence is not None else _reason(covering[0]) if covering else None
        return Finding(found, text, meta.next_offset or 0 if meta else 0)

    def page(self, run: str, prefix: str | None, after: bytes, limit: int) -> list[AttemptState]:
        """The whole attempts below a prefix (of the whole run where it is None), in order of their keys."""
        ranges = (keys.run_range(run),) if prefix is None else keys.prefix_ranges(run, prefix)
        with self._partition.reading() as (tables, pending):
            shown: list[AttemptState] = []
            for start in ranges:
                if not after or after < start or after.startswith(start):
                    found = tables.whole_attempts(start, after if after.startswith(start) else b"")
                    whole = (state for state in found if _seen(state, pending).state == "whole")
                    shown += islice(whole, limit - len(shown))
        return shown

    def plan(self, state: AttemptState, start: int, stop: int) -> Plan:
        """Raises RouteDeleted where its blobs went in the meantime, EnvClosed where all was rebuilt or stopped."""
        pieces: list[Piece] = []
        versions: list[Versions] = []
        with self._partition.reading() as (tables, _):
            for part in state.parts:
                low, high = max(part.start, start), min(part.stop, stop)
                if low < high:
                    owner = self._fresh.owner(part.owner) or tables.owner(part.owner)
                    if owner is not None and part.owner == state.owner and owner.attempt != state.header.attempt:
                        raise EnvClosed  # rebuilt since `state` was found: the numbers are others' now
                    _plan_part(owner, low, high, pieces, versions)
        return Plan(tuple(pieces), merge_versions(versions))

    def only(self, plan: Plan) -> View:
        """To fetch the rows of a plan with, and nothing else."""
        return View(self._partition, self._fresh.only((piece.owner, piece.index) for piece in plan.pieces))

    @property
    def checked(self) -> CheckLevel:
        """How closely the rows were looked at when they were taken in."""
        return self._partition.checked

    @property
    def ahead(self) -> int:
        """How many pieces to ask for before their turn."""
        return self._partition.blobs.ahead

    def ask(self, pieces: Sequence[Piece]) -> list[Asked | None]:
        """Their bytes on the way; None for what the index does not have, and for what needs no way."""
        entries = [None if self._held(piece) else self._entry(piece) for piece in pieces]
        found = [(piece.owner, entry) for piece, entry in zip(pieces, entries, strict=True) if entry is not None]
        asked = iter(self._partition.blobs.ask(found))
        return [(entry, next(asked)) if entry is not None else None for entry in entries]

    def fetch(self, piece: Piece, layers: Sequence[int] | None, asked: Asked | None = None) -> RouteArray:
        """Rows [piece.last - piece.first, layers, top_k], C order; a copy. `layers`: positions, None for all. `asked`:
        what `ask` gave.

        Raises:
            RouteDeleted: removed in the meantime.  RouteCorrupt: what is stored is not what was written.
            StoreCatchingUp: its bytes cannot be had now.
        """
        try:
            chunk = self._held(piece) or decode(self._bytes(piece, asked))
            if not isinstance(chunk, Chunk) or chunk.header.attempt != piece.attempt:
                raise RouteDeleted("removed while it was read")
            rows = unpack(chunk)[piece.first : piece.last]
        except BadRecord as error:
            self._partition.damaged = f"stored chunk {piece.index}: {error}"
            raise RouteCorrupt(self._partition.damaged) from error
        return np.ascontiguousarray(rows if layers is None else rows[:, layers, :])

    def _bytes(self, piece: Piece, asked: Asked | None) -> bytes:
        blobs = self._partition.blobs
        entry = asked[0] if asked is not None else self._entry(piece)
        if entry is None:
            raise RouteDeleted("removed while it was read")
        try:
            return answer_of(asked[1]) if asked is not None else blobs.read(piece.owner, entry)
        except BlobsUnavailable as error:
            raise StoreCatchingUp(f"the bytes cannot be had now: {error}") from error
        except BlobMissing as error:
            if not self._still_held(piece, entry):
                raise RouteDeleted("removed while it was read") from None
            self._partition.damaged = f"stored chunk {piece.index}: {error}"
            raise RouteCorrupt(self._partition.damaged) from error

    def _held(self, piece: Piece) -> Chunk | None:
        """In memory, as it was taken in a moment ago."""
        return self._fresh.chunk(piece.owner, piece.index)

    def _entry(self, piece: Piece) -> bytes | None:
        try:
            with self._partition.reading() as (tables, _):
                return tables.blob(piece.owner, piece.index)
        except EnvClosed:
            return None

    def _still_held(self, piece: Piece, entry: bytes) -> bool:
        """Not once its owner has gone, or the partition was rebuilt, with other names for the same chunks."""
        try:
            with self._partition.reading() as (tables, _):
                return tables.owner(piece.owner) is not None and tables.blob(piece.owner, piece.index) == entry
        except EnvClosed:
            return False


def _plan_part(owner: Owner | None, low: int, high: int, pieces: list[Piece], versions: list[Versions]) -> None:
    if owner is None:
        raise RouteDeleted("removed while it was read")
    for chunk in owner.chunks:
        first, last = max(chunk.start, low), min(chunk.start + chunk.rows, high)
        if first < last:
            pieces.append(Piece(owner.number, chunk.index, owner.attempt, first - chunk.start, last - chunk.start))
            versions.append(_clip(chunk.versions, first, last))


def _clip(versions: Versions, first: int, last: int) -> Versions:
    before = [(first, version) for row, version in versions if row <= first]
    return (*before[-1:], *((row, version) for row, version in versions if first < row < last))


def _seen(state: AttemptState, pending: tuple[Delete | Clear, ...]) -> AttemptState:
    for record in pending:
        if state.state != "gone" and hides(record, state.key.run, state.key.rollout_id, state.header.epoch):
            return replace(state, state="gone", reason=_reason(record))
    return state


def _reason(record: Delete | Clear) -> str:
    if isinstance(record, Clear):
        return f"cleared through epoch {record.through_epoch}"
    return f"deleted by prefix {record.prefix!r} up to epoch {record.epoch}; raise the epoch to use the id again"


def rows_of(view: View, plan: Plan, layers: Sequence[int] | None = None) -> Iterator[RouteArray]:
    """The rows of a plan, one array a chunk."""
    if not view.ahead:
        for piece in plan.pieces:
            yield view.fetch(piece, layers)
        return
    rest = iter(plan.pieces)
    waiting: deque[tuple[Piece, Asked | None]] = deque()
    while True:
        if len(waiting) <= view.ahead:
            some = list(islice(rest, view.ahead))
            waiting.extend(zip(some, view.ask(some), strict=True))
        if not waiting:
            return
        piece, asked = waiting.popleft()
        yield view.fetch(piece, layers, asked)
