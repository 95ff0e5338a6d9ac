"""The block pool of the KV cache, and the prefix cache over it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block: XXH3-128 of the block before it and this block's tokens, so of the whole prefix."""
    return xxhash.xxh3_128_digest(parent + np.asarray(tokens, dtype="<i8").tobytes())


class Evicted(NamedTuple):
    """A cached block that is given out for new content: its number, key, and generation until now."""

    block: int
    key: bytes
    generation: int


def ignore_evicted(evicted: Sequence[Evicted]) -> None:
    """What is evicted is gone."""


class BlockPool:
    """Blocks with reference counts. A full block may carry a key; without users it then waits in order of last use, to
    be hit or to be evicted. Not thread-safe: the engine's device lock is held around every call.

    `generation(b)` grows whenever block b is given out for new content. `epoch` grows with every `reset`: what was
    computed before must not be registered after it. `on_evict` is told before an evicted block is written to.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        salt: str,
        on_evict: Callable[[Sequence[Evicted]], None] = ignore_evicted,
    ) -> None:
        self.block_size = block_size
        self._on_evict = on_evict
        self.epoch = 0
        self.evictions = 0
        self._refs = [0] * num_blocks
        self._generations = np.zeros(num_blocks, dtype=np.int64)
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # keyed, without users, least recently used first
        self._given = 0
        self._root = self._salted(salt)

    @property
    def root(self) -> bytes:
        """The parent of a first block's key: depends on the salt (the weight version) and on the reset."""
        return self._root

    @property
    def available(self) -> int:
        """Blocks that can be given out now."""
        return len(self._free) + len(self._idle)

    @property
    def total(self) -> int:
        return len(self._refs)

    def generation(self, block: int) -> int:
        return int(self._generations[block])

    def generations(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of many blocks at once."""
        return self._generations[blocks]

    def prefix_keys(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """The keys of the full blocks at the start of `tokens`, without the last token: that one has to be forwarded
        for its logits."""
        size, parent = self.block_size, self._root
        for start in range(0, (len(tokens) - 1) // size * size, size):
            parent = chain_key(parent, tokens[start : start + size])
            yield parent

    def match(self, tokens: Sequence[int]) -> tuple[list[int], list[bytes]]:
        """The cached blocks of the longest prefix, and their keys; the caller becomes a user of each."""
        blocks: list[int] = []
        keys: list[bytes] = []
        for key in self.prefix_keys(tokens):
            block = self.find(key)
            if block is None:
                break
            blocks.append(block)
            keys.append(key)
        self.use(blocks)
        return blocks, keys

    def find(self, key: bytes) -> int | None:
        """The block that holds the prefix of `key`."""
        return self._by_key.get(key)

    def use(self, blocks: Sequence[int]) -> None:
        """The caller becomes a user of blocks that were found."""
        for block in blocks:
            self._refs[block] += 1
            self._idle.pop(block, None)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks for new content, evicting cached ones if it must; None (and nothing changed) if too few."""
        if count > self.available:
            return None
        evicted: list[Evicted] = []
        blocks = [self._give(evicted) for _ in range(count)]
        if evicted:
            self._on_evict(evicted)
        return blocks

    def _give(self, evicted: list[Evicted]) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            key = self._keys[block]
            assert key is not None  # idle blocks carry one
            evicted.append(Evicted(block, key, self.generation(block)))
            self._forget(block)
            self.evictions += 1
        self._given += 1
        self._generations[block] = self._given
        self._refs[block] = 1
        return block

    def register(self, block: int, key: bytes) -> None:
        """`block` is full and holds the prefix of `key`; the first block of a key keeps it."""
        if key not in self._by_key and self._keys[block] is None:
            self._keys[block] = key
            self._by_key[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """The caller no longer uses these blocks of one sequence, in order of position."""
        for block in reversed(blocks):  # the tail of a prefix is evicted before its head
            self._refs[block] -= 1
            if self._refs[block] < 0:
                raise AssertionError(f"block {block} was released more often than it was taken")
            if self._refs[block] == 0:
                self._retire(block)

    def _retire(self, block: int) -> None:
        if self._keys[block] is None:
            self._free.append(block)
        else:
            self._idle[block] = None

    def reset(self, salt: str) -> int:
        """Forgets every cached prefix; returns how many blocks carried one. Blocks in use stay with their users."""
        dropped = len(self._by_key)
        for block in list(self._by_key.values()):
            self._forget(block)
        self._free.extend(reversed(self._idle))
        self._idle.clear()
        self.epoch += 1
        self._root = self._salted(salt)
        return dropped

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None

    def _salted(self, salt: str) -> bytes:
        return xxhash.xxh3_128_digest(f"{self.epoch}/{salt}".encode())
