"""Blobs among objects: the bytes are written first, the transaction that makes them visible comes after.

A crash between the two leaves objects that no entry names; `sweep` finds them. What is removed stays in the trash of
the index until its objects are gone, so that no outage leaves any behind.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, replace
from itertools import islice

from moebus.consumers.store.blobs.parts import failed, parts_of
from moebus.consumers.store.blobs.pointer import ObjectName, Pointer, follows
from moebus.consumers.store.blobs.port import BlobMissing, Blobs, BlobsUnavailable, Objects, Reading, answer_of
from moebus.consumers.store.tables import Tables
from moebus.observability.log import get_logger

_log = get_logger(__name__)
_OBJECT = 4 << 20
"""An object that large is closed: its upload begins while the batch still grows."""
_TURN = 0.2
_PROBE_EVERY = 1.0
_DELETES = 1000
_AHEAD = 4
_LONGEST = 60.0
PROBE = "probe"


@dataclass(slots=True)
class _Open:
    """An object that still grows."""

    name: ObjectName
    parts: list[bytes] = field(default_factory=list)
    size: int = 0


class ExternalBlobs(Blobs):
    """See `Blobs`. `folder`: where this partition's objects lie; nobody else may use it."""

    def __init__(
        self,
        objects: Objects,
        folder: str,
        stopping: threading.Event,
        boots: Callable[[], int] = lambda: secrets.randbits(64),
        now: Callable[[], float] = time.monotonic,
        again: float = 1.0,
    ) -> None:
        """`again`: seconds before a delete that failed is repeated; it doubles, up to a minute."""
        self.identity = f"{objects.where} {folder}"
        self.strays = True
        self.ahead = _AHEAD
        self._objects = objects
        self._folder = folder
        self._stopping = stopping
        self._boots = boots
        self._now = now
        self._again = self._first_again = again
        self._boot = boots()
        self._serial = 0
        self._open: dict[int, _Open] = {}
        self._uploads: dict[ObjectName, Future[None]] = {}
        self._deletes: dict[bytes, Future[None]] = {}
        self._delete_after = float("-inf")
        self._failure: str | None = None
        self._probe: tuple[float, Future[None]] | None = None

    def put(self, tables: Tables, owner: int, index: int, attempt: bytes, data: bytes) -> None:
        found = self._open.get(owner)
        if found is None:
            found = self._open[owner] = _Open(ObjectName(self._boot, self._serial, owner, index, attempt))
            self._serial += 1
        tables.put_blob(owner, index, Pointer(found.name, found.size, len(data)).pack())
        found.parts.append(data)
        found.size += len(data)
        if found.size >= _OBJECT:
            self._upload(self._open.pop(owner))

    def flush(self) -> None:
        for found in self._open.values():
            self._upload(found)
        self._open.clear()

    def settle(self) -> None:
        self.flush()
        waiting = set(self._uploads.values())
        while waiting:
            done, waiting = wait(waiting, _TURN, FIRST_EXCEPTION)
            for future in done:
                self._check(future)
            if waiting and self._stopping.is_set():
                raise BlobsUnavailable(f"{self._objects.where}: the store stops")

    def committed(self) -> None:
        if self._uploads:
            self._failure = self._probe = None
        self._uploads.clear()

    def abandoned(self) -> None:
        """From here on other names: nothing more of this boot can get into the index, so what no entry names now may
        be swept away."""
        if not self._uploads and not self._open:
            return
        for future in self._uploads.values():
            future.cancel()
        self._begin_boot()
        self.strays = True

    def read(self, owner: int, entry: bytes, start: int = 0, stop: int | None = None) -> bytes:
        pointer = _pointer(owner, entry)
        last = pointer.size if stop is None else min(stop, pointer.size)
        if start >= last:
            return b""
        return answer_of(self._get(replace(pointer, offset=pointer.offset + start, size=last - start)))

    def ask(self, wanted: Sequence[tuple[int, bytes]]) -> list[Future[bytes]]:
        asked: list[Future[bytes]] = []
        run: list[Pointer] = []
        for owner, entry in wanted:
            try:
                pointer = _pointer(owner, entry)
            except BlobMissing as error:
                asked += [*self._get_run(run), failed(error)]
                run = []
                continue
            if run and not follows(run[-1], pointer):
                asked += self._get_run(run)
                run = []
            run.append(pointer)
        return [*asked, *self._get_run(run)]

    def due(self, tables: Tables) -> bool:
        self._delete_trash(tables)
        return any(_succeeded(future) for future in self._deletes.values())

    def free(self, tables: Tables, limit: int) -> int:
        left = limit
        for owner, future in list(self._deletes.items()):
            if left <= 0:
                break
            if not _succeeded(future):
                continue
            self._again = self._first_again
            freed = tables.free(owner, left)
            if freed < left:
                del self._deletes[owner]  # if this batch fails, they are deleted again: no harm
            left -= freed
        return limit - left

    def trouble(self) -> str | None:
        if self._failure is None:
            return None
        if self._probe is None or (self._probe[1].done() and self._now() - self._probe[0] >= _PROBE_EVERY):
            if self._probe is not None and _succeeded(self._probe[1]):
                self._failure = self._probe = None
                return None
            name = f"{self._folder}/{PROBE}"
            self._probe = (self._now(), self._objects.put(name, b"moebus"))
        return self._failure

    def forget(self) -> None:
        self._deletes.clear()
        self._begin_boot()
        self.strays = True

    def sweep(self, reading: Reading) -> int:
        """Only names of earlier boots are looked at: what such a name lacks an entry for, it lacks for ever."""
        done, self.strays = 0, False
        names = self._objects.names(self._folder)
        while batch := list(islice(self._strays(names, reading), _DELETES)):
            self._objects.delete(batch).result()
            done += len(batch)
        return done

    def _strays(self, names: Iterator[str], reading: Reading) -> Iterator[str]:
        for full in names:
            name = ObjectName.parse(full.removeprefix(f"{self._folder}/"))
            if name is None or name.boot == self._boot:
                continue
            with reading() as (tables, _):
                entry = tables.blob(name.owner, name.first)
            if entry is None or Pointer.unpack(name.owner, entry).name != name:
                yield full

    def _delete_trash(self, tables: Tables) -> None:
        """Asks for the objects of removed owners to be deleted."""
        failed = [(owner, future) for owner, future in self._deletes.items() if _failed(future)]
        for owner, _ in failed:
            del self._deletes[owner]
        if failed:
            self._put_off(failed[0][1])
        if self._now() < self._delete_after:
            return
        room = _DELETES - len(self._deletes)
        wanted = [owner for owner in tables.trash(_DELETES) if owner not in self._deletes][: max(0, room)]
        if not wanted:
            return
        names = {self._full(str(name)) for owner in wanted for name in _names_of(tables, owner)}
        future = self._objects.delete(sorted(names))
        self._deletes.update(dict.fromkeys(wanted, future))

    def _put_off(self, future: Future[None]) -> None:
        if self._again == self._first_again and not future.cancelled():
            _log.warning("store.blobs", f"objects of what was removed cannot be deleted now: {future.exception()}")
        self._delete_after = self._now() + self._again
        self._again = min(2 * self._again, _LONGEST)

    def _upload(self, found: _Open) -> None:
        self._uploads[found.name] = self._objects.put(self._full(str(found.name)), b"".join(found.parts))

    def _check(self, future: Future[None]) -> None:
        if future.cancelled():
            raise BlobsUnavailable(f"{self._objects.where} is closed")
        error = future.exception()
        if error is None:
            return
        self._failure, self._probe = str(error), None
        raise error

    def _begin_boot(self) -> None:
        self._open.clear()
        self._uploads.clear()
        self._boot = self._boots()
        self._serial = 0

    def _get(self, pointer: Pointer) -> Future[bytes]:
        return self._objects.get(self._full(str(pointer.name)), pointer.offset, pointer.offset + pointer.size)

    def _get_run(self, run: Sequence[Pointer]) -> list[Future[bytes]]:
        """Pointers that follow each other, in one request."""
        if not run:
            return []
        sizes = [pointer.size for pointer in run]
        return parts_of(self._get(replace(run[0], size=sum(sizes))), sizes)

    def _full(self, name: str) -> str:
        return f"{self._folder}/{name}"


def _pointer(owner: int, entry: bytes) -> Pointer:
    try:
        return Pointer.unpack(owner, entry)
    except struct.error:
        raise BlobMissing("an entry of the index is damaged") from None


def _names_of(tables: Tables, owner: bytes) -> Iterator[ObjectName]:
    number = int.from_bytes(owner, "big")
    for entry in tables.entries(owner):
        yield Pointer.unpack(number, entry).name


def _succeeded(future: Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _failed(future: Future[None]) -> bool:
    return future.done() and not _succeeded(future)
