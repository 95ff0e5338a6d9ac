"""What the open batch has made whole, kept in memory so that it is readable before its commit.

It is in the log already, acknowledged: the commit only spares reading it again. A reader that sees it a moment early
sees what every store has come to at that place of its log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moebus.consumers.store.state import AttemptState, Owner
from moebus.schemas.record import Chunk
from moebus.schemas.rollout import RolloutKey

MOST_BYTES = 8 << 20
"""Of one partition's open batch. What does not fit is readable after the commit."""
ENTRY_BYTES, ITEM_BYTES = 1024, 160
"""What a chunk or an attempt costs besides its bytes, and each part, chunk and version that an attempt lists."""


class Fresh:
    """Written by the thread that ingests and only ever added to, so any thread may read; a new one for each batch."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self.dropped = False
        """Its batch came to nothing: who has not begun to read from it must not, its numbers will be others'."""
        self._left = MOST_BYTES if most_bytes is None else most_bytes
        self._whole: dict[RolloutKey, tuple[AttemptState, ...]] = {}
        self._owners: dict[int, Owner] = {}
        self._chunks: dict[tuple[int, int], Chunk] = {}
        self._touched: set[int] = set()
        self._lacking: set[int] = set()

    @property
    def readable(self) -> bool:
        """Whether anything of it is."""
        return bool(self._whole)

    def took(self, owner: Owner) -> None:
        """The batch changes what is known of `owner`."""
        self._touched.add(owner.number)

    def took_chunk(self, owner: int, chunk: Chunk) -> None:
        """The batch brings a chunk of `owner`."""
        if owner not in self._lacking and self._room(len(chunk.payload)):
            self._chunks[owner, chunk.index] = chunk
        else:
            self._lacking.add(owner)

    def made_whole(self, state: AttemptState, owner: Owner) -> bool:
        """`owner`: of its own rows. False: it cannot be read before the commit, since bytes of it are not held here, or
        another attempt's rows that it goes on from are in the same case."""
        others = {part.owner for part in state.parts} - {owner.number} - self._owners.keys()
        items = len(state.parts) + sum(1 + len(chunk.versions) for chunk in owner.chunks)
        if owner.number in self._lacking or others & self._touched or not self._room(items * ITEM_BYTES):
            return False
        self._owners[owner.number] = owner
        self._whole[state.key] = (*self._whole.get(state.key, ()), state)  # last: now it is seen
        return True

    def over(self, key: RolloutKey, held: Sequence[AttemptState]) -> tuple[AttemptState, ...]:
        """What is committed under `key`, and what the batch has made whole since. What a commit has ended stays so."""
        fresh = {state.header.attempt: state for state in self._whole.get(key, ())}
        if not fresh:
            return tuple(held)
        kept = [s for s in held if s.header.attempt not in fresh or s.state not in ("open", "lost")]
        known = {state.header.attempt for state in kept}
        return (*kept, *(state for attempt, state in fresh.items() if attempt not in known))

    def owner(self, number: int) -> Owner | None:
        return self._owners.get(number)

    def chunk(self, owner: int, index: int) -> Chunk | None:
        return self._chunks.get((owner, index))

    def only(self, wanted: Iterable[tuple[int, int]]) -> Fresh:
        """These chunks (owner, index) alone, so that who reads slowly does not keep the others in memory."""
        part = Fresh(0)
        part._chunks = {place: self._chunks[place] for place in wanted if place in self._chunks}
        return part

    def _room(self, size: int) -> bool:
        if self._left < size + ENTRY_BYTES:
            return False
        self._left -= size + ENTRY_BYTES
        return True


NOTHING = Fresh(0)
"""For those who want what is committed and nothing else."""
