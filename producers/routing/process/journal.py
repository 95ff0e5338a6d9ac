"""The journal file, mapped: entries in a ring. Written by the publisher; the child reads and, alone, marks."""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt
import xxhash

from moebus.producers.routing.process import layout
from moebus.producers.routing.process.layout import Entry
from moebus.schemas.errors import SettingsError


class Journal:
    """A file that `format_file` or a publisher before made. Not thread-safe; one process writes entries at a time."""

    def __init__(self, fd: int, *, populate: bool = False, sum_rows: bool = True) -> None:
        """Keeps no hold of `fd`. `populate`: maps every page now, so that no write later waits for one. `sum_rows`:
        the sum of an entry covers its rows; in memory, where no power cut leaves half of them, that is time lost.

        Raises:
            SettingsError: the file is no journal of this version.
        """
        capacity = layout.unpack_file(os.pread(fd, layout.FILE.size, 0))
        if capacity is None or os.fstat(fd).st_size != layout.HEAD_BYTES + capacity:
            raise SettingsError("publisher.journal: the file is not a journal that this version of moebus wrote")
        self.capacity = capacity
        flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if populate else 0)
        self._map = mmap.mmap(fd, layout.HEAD_BYTES + capacity, flags=flags)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._tails = 0
        self._sum_rows = sum_rows

    def close(self) -> None:
        """Unmaps the file as soon as nobody looks at its rows any more."""
        self._bytes = np.empty(0, np.uint8)
        try:
            self._map.close()
        except BufferError:  # an array on it is still alive; the last one unmaps it
            return

    # Writing

    def write(
        self, seq: int, position: int, size: int, kind: int, created_ms: int, meta: bytes,
        rows: npt.NDArray[np.integer] | None = None, dtype: npt.DTypeLike = np.uint8,
    ) -> Entry:  # fmt: skip
        """Writes an entry; its header comes last, so that half an entry is none. The one copy of the rows."""
        at = layout.HEAD_BYTES + position
        body = at + layout.ALIGN
        self._map[body : body + len(meta)] = meta
        state, nbytes = xxhash.xxh3_64(meta), 0
        if rows is not None and rows.size:
            nbytes = rows.size * np.dtype(dtype).itemsize
            first = body + layout.up(len(meta))
            there = self._bytes[first : first + nbytes]
            np.copyto(there.view(dtype).reshape(rows.shape), rows, casting="unsafe")
            if self._sum_rows:
                state.update(there.data)
        entry = Entry(
            position, kind, size, seq, created_ms, nbytes, state.intdigest(), len(meta), self._sum_rows
        )  # fmt: skip
        self._map[at : at + layout.ALIGN] = layout.pack_entry(entry)
        return entry

    def write_pad(self, seq: int, position: int, size: int) -> None:
        """An entry that says nothing; it is settled."""
        at = layout.HEAD_BYTES + position
        self._map[at : at + layout.ALIGN] = layout.pack_entry(Entry(position, layout.PAD, size, seq, 0, 0, 0, 0))
        self.mark(position)

    def mark(self, position: int) -> None:
        """The entry there is settled."""
        self._map[layout.HEAD_BYTES + position + layout.STATE_AT] = 1

    def hold(self, position: int, held: bool) -> None:
        """The child has the entry there in hand, or no longer."""
        self._map[layout.HEAD_BYTES + position + layout.HAND_AT] = held

    def count_try(self, position: int) -> int:
        """After the end of a child: how often one ended with the entry there in hand; 0 where this one did not."""
        at = layout.HEAD_BYTES + position
        if not self._map[at + layout.HAND_AT]:
            return 0
        self._map[at + layout.HAND_AT] = 0
        tries = min(255, self._map[at + layout.TRIES_AT] + 1)
        self._map[at + layout.TRIES_AT] = tries
        return tries

    def set_tail(self, position: int, seq: int) -> None:
        """Where the oldest entry in use lies; what is before it may be overwritten."""
        self._tails += 1
        at = layout.TAIL_AT[self._tails % 2]
        self._map[at : at + layout.TAIL.size] = layout.pack_tail(self._tails, position, seq)

    def set_owner(self, owner: bytes) -> None:
        """8 bytes: who writes here from now on. Takes back a wish to take over."""
        self._map[layout.OWNER_AT : layout.OWNER_AT + 8] = owner
        self._map[layout.TAKEOVER_AT] = 0

    # Reading

    def entry(self, position: int, seq: int) -> Entry | None:
        """The entry with this number, if it is written whole."""
        at = layout.HEAD_BYTES + position
        found = layout.unpack_entry(self._map[at : at + layout.ALIGN], position)
        return found if found is not None and found.seq == seq and found.size <= self.capacity - position else None

    def settled(self, position: int) -> bool:
        return self._map[layout.HEAD_BYTES + position + layout.STATE_AT] != 0

    def suspect(self, position: int) -> bool:
        """Whether a child has ended with the entry there in hand."""
        return self._map[layout.HEAD_BYTES + position + layout.TRIES_AT] != 0

    def raw(self, entry: Entry) -> bytes:
        """All bytes of an entry."""
        at = layout.HEAD_BYTES + entry.position
        return self._map[at : at + entry.size]

    def meta(self, entry: Entry) -> bytes:
        at = layout.HEAD_BYTES + entry.position + layout.ALIGN
        return self._map[at : at + entry.meta_bytes]

    def data(self, entry: Entry) -> npt.NDArray[np.uint8]:
        """The rows' bytes, in the file itself."""
        at = layout.HEAD_BYTES + entry.position + entry.data_at
        return self._bytes[at : at + entry.data_bytes]

    def whole(self, entry: Entry) -> bool:
        """Whether meta and rows are those that were written (they are not after a power cut at a bad moment)."""
        state = xxhash.xxh3_64(self.meta(entry))
        if entry.data_summed:
            state.update(self.data(entry).data)
        return state.intdigest() == entry.checksum

    def tail(self) -> tuple[int, int]:
        """Position and sequence number where reading starts.

        Raises:
            SettingsError: both copies are damaged.
        """
        raw = (self._map[at : at + layout.TAIL.size] for at in layout.TAIL_AT)
        good = [tail for tail in map(layout.unpack_tail, raw) if tail is not None]
        if not good:
            raise SettingsError("publisher.journal: the file is damaged; move it away and start again")
        self._tails, position, seq = max(good)
        return position, seq

    @property
    def owner(self) -> bytes:
        """What `set_owner` wrote last."""
        return self._map[layout.OWNER_AT : layout.OWNER_AT + 8]

    @property
    def takeover(self) -> bool:
        """Whether a new publisher wants the file: a child without a parent leaves it."""
        return self._map[layout.TAKEOVER_AT] != 0

    def want(self) -> None:
        """Asks a child without a parent to leave."""
        self._map[layout.TAKEOVER_AT] = 1


class Cursor:
    """Walks over the entries in order, as far as they are written."""

    def __init__(self, journal: Journal, position: int, seq: int) -> None:
        self._journal = journal
        self.position = position
        self.seq = seq

    def next(self) -> Entry | None:
        """The next entry, settled or not; None where the writer has not come further."""
        entry = self._journal.entry(self.position, self.seq)
        if entry is not None:
            self.position = (self.position + entry.size) % self._journal.capacity
            self.seq += 1
        return entry


def format_file(fd: int, capacity: int) -> None:
    """An empty journal in a file that has its length already."""
    os.pwrite(fd, bytes(layout.HEAD_BYTES), 0)
    os.pwrite(fd, layout.pack_file(capacity), 0)
    for at in layout.TAIL_AT:
        os.pwrite(fd, layout.pack_tail(0, 0, 1), at)
