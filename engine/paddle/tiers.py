"""The prefix cache in two tiers: blocks on the device, and below them blocks in host memory, with their routes."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Generic, Protocol, TypeVar

from moebus.engine.hooks import Hook, no_hook
from moebus.engine.paddle.blocks import BlockPool, Evicted
from moebus.engine.paddle.cache_transfer import NAME, CacheTransfer
from moebus.engine.port import Deadline, Participant

_log = logging.getLogger(__name__)
T = TypeVar("T")
MAX_IN_FLIGHT = 256


class BlockCopier(Protocol[T]):
    """Moves the content of blocks between the tiers."""

    def export(self, evicted: Sequence[Evicted]) -> object:
        """Begins a copy of these blocks; they may be written to as soon as this returns."""
        ...

    def fetch(self, exported: object) -> Sequence[T]:
        """What `export` began, in host memory, one entry per block. Called on another thread."""
        ...

    def restore(self, block: int, generation: int, content: T) -> None:
        """Writes `content` into a block of the device."""
        ...


class HostTier(Generic[T]):
    """Contents by key, the least recently used one out first. Thread-safe."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = Lock()
        self._entries: OrderedDict[bytes, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> T | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: bytes, content: T) -> None:
        with self._lock:
            self._entries[key] = content
            self._entries.move_to_end(key)
            while len(self._entries) > self.capacity:
                self._entries.popitem(last=False)

    def clear(self) -> int:
        with self._lock:
            dropped = len(self._entries)
            self._entries.clear()
            return dropped


@dataclass(frozen=True)
class Taken:
    """Blocks of a sequence. The first `len(keys)` of them hold what is cached, under these keys."""

    blocks: list[int]
    keys: list[bytes]


class CacheTiers(Generic[T]):
    """What sequences take blocks from. Not thread-safe but for `participant` and `drain`: the engine's device lock is
    held around every other call.

    A block that the device evicts goes to the host tier in the background; a prefix that is found there is copied to
    new blocks of the device, where it counts as cached. `cpu_blocks` 0: no host tier.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        salt: str,
        copier: BlockCopier[T],
        *,
        cpu_blocks: int = 0,
        hook: Hook = no_hook,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size, salt, self._evicted)
        self.host: HostTier[T] = HostTier(cpu_blocks)
        self.swapped_in = 0
        self._copier = copier
        self._hook = hook
        self._last_cut: tuple[str, ...] = ()
        self._transfer: CacheTransfer[T] = CacheTransfer(
            self.host.put, lambda key: hook("swap_out", key.hex(), None), min(cpu_blocks, MAX_IN_FLIGHT)
        )

    @property
    def swapped_out(self) -> int:
        """Blocks that reached the host tier since the start."""
        return self._transfer.finished

    @property
    def block_size(self) -> int:
        return self.pool.block_size

    def take(self, tokens: Sequence[int], positions: int, *, cached: bool = True) -> Taken | None:
        """Blocks for `positions` positions of a sequence that begins with `tokens`, as many of them cached as can be
        (none without `cached`); None, and nothing taken, where there are too few now."""
        device, keys, host = self._find(tokens if cached else ())
        self.pool.use(device)
        fresh = self.pool.allocate(-(-positions // self.block_size) - len(device))
        if fresh is None:
            self.pool.release(device)
            return None
        return Taken(device + fresh, keys[: len(device) + self._swap_in(fresh, keys[len(device) :], host)])

    def _find(self, tokens: Sequence[int]) -> tuple[list[int], list[bytes], list[T]]:
        """The longest cached prefix: blocks of the device, then contents of the host tier; and the keys of both."""
        device: list[int] = []
        keys: list[bytes] = []
        host: list[T] = []
        for key in self.pool.prefix_keys(tokens):
            block = None if host else self.pool.find(key)
            content = self.host.get(key) if block is None else None
            if block is not None:
                device.append(block)
            elif content is not None:
                host.append(content)
            else:
                break
            keys.append(key)
        return device, keys, host

    def _swap_in(self, blocks: Sequence[int], keys: Sequence[bytes], host: Sequence[T]) -> int:
        """Fills `blocks` from the host tier; how many hold what is cached."""
        for index, content in enumerate(host):
            block = blocks[index]
            try:
                self._hook("swap_in", keys[index].hex(), None)
                self._copier.restore(block, self.pool.generation(block), content)
            except Exception as error:  # computed again instead
                _log.warning("a cached block could not be copied to the device: %s", error)
                return index
            self.pool.register(block, keys[index])
            self.swapped_in += 1
        return len(host)

    def _evicted(self, evicted: Sequence[Evicted]) -> None:
        if not self.host.capacity:
            return
        new = [one for one in evicted if self.host.get(one.key) is None and not self._transfer.on_the_way(one.key)]
        room = self._transfer.room
        new = new[-room:] if room else []  # the last ones to leave are the heads of prefixes
        if not new:
            return
        try:
            exported = self._copier.export(new)
        except Exception as error:  # a cache entry less; whoever takes the blocks must get them
            _log.warning("%d evicted blocks could not be copied: %s", len(new), error)
            return
        self._transfer.submit([one.key for one in new], lambda: self._copier.fetch(exported))

    def reset(self, salt: str) -> int:
        """Forgets every cached prefix in both tiers; returns how many blocks carried one."""
        self._transfer.cut()
        return self.pool.reset(salt) + self.host.clear()

    # -- the participant

    def drain(self, deadline: Deadline) -> Participant | None:
        """Lets what is on its way arrive, or cuts it at the deadline; None without a host tier."""
        self._last_cut = tuple(key.hex() for key in self._transfer.drain(deadline))
        return self.participant(paused=True)

    def participant(self, *, paused: bool) -> Participant | None:
        """The host tier as it is now; None where there is none."""
        if not self.host.capacity:
            return None
        transfer = self._transfer
        return Participant(
            name=NAME,
            state="paused" if paused else "running",
            in_flight=transfer.in_flight,
            finished=transfer.finished,
            cut=self._last_cut,
        )

    def close(self, timeout: float) -> None:
        self._transfer.close(timeout)
        self.host.clear()
