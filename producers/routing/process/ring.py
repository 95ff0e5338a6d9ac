"""Which bytes of the ring are in use. Pure bookkeeping: no file, no lock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Slot:
    """A place in the ring. `pad`: it only fills the room before the end, so that the next one starts at 0."""

    seq: int
    position: int
    size: int
    pad: bool = False
    settled: bool = False


class Ring:
    """Slots in order of their sequence numbers; room comes back from the oldest on, once that is settled."""

    def __init__(self, capacity: int, position: int = 0, seq: int = 1) -> None:
        """`position`, `seq`: of the next slot."""
        self.capacity = capacity
        self.used = 0
        self._head = position
        self._seq = seq
        self._slots: dict[int, Slot] = {}

    @property
    def next_seq(self) -> int:
        return self._seq

    @property
    def tail(self) -> tuple[int, int]:
        """Position and sequence number of the oldest slot in use, or of the next one."""
        oldest = next(iter(self._slots.values()), None)
        return (oldest.position, oldest.seq) if oldest else (self._head, self._seq)

    def restore(self, size: int, *, settled: bool) -> Slot:
        """A slot that lies in the file already."""
        slot = self._add(size, pad=False)
        if settled:
            self.settle(slot.seq)
        return slot

    def place(self, size: int, keep: int = 0) -> Slot | None:
        """The next slot of `size` bytes, leaving at least `keep` bytes free; a pad where the end is too near (write
        it, settle it and ask again); None where there is no room yet."""
        to_end = self.capacity - self._head
        free = self.capacity - self.used
        if size <= to_end:
            return self._add(size, pad=False) if size + keep <= free else None
        if self.used == 0 or to_end + size + keep <= free:  # a pad that helps nobody would only take room
            return self._add(to_end, pad=True)
        return None

    def _add(self, size: int, *, pad: bool) -> Slot:
        slot = Slot(self._seq, self._head, size, pad)
        self._slots[slot.seq] = slot
        self._seq += 1
        self._head = (self._head + size) % self.capacity
        self.used += size
        return slot

    def settle(self, seq: int) -> bool:
        """The slot is done with. True where the tail moved."""
        slot = self._slots.get(seq)
        if slot is None or slot.settled:
            return False
        slot.settled = True
        before = len(self._slots)
        while (oldest := next(iter(self._slots.values()), None)) is not None and oldest.settled:
            del self._slots[oldest.seq]
            self.used -= oldest.size
        return len(self._slots) != before
