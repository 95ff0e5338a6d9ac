"""The content of blocks, between the device and host memory: keys and values together with their routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle.blocks import Evicted
from moebus.engine.paddle.capture import CapturedRows, RouteCapture
from moebus.engine.paddle.device import HostCopy
from moebus.engine.paddle.kvcache import KVCache
from moebus.engine.paddle.slots import sequence_slots

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class HostBlock:
    """One block. `keys`, `values`: [layers, block_size, kv_heads, head_dim]."""

    keys: Floats
    values: Floats
    rows: CapturedRows


@dataclass(frozen=True, slots=True)
class _Exported:
    """Blocks on their way; `rows` are on the host already."""

    content: HostCopy
    rows: list[CapturedRows]


def halves(content: HostCopy) -> tuple[Floats, Floats]:
    """Keys and values [layers, N, kv_heads, head_dim] of what `KVCache.copy_out` began."""
    both = content.result()
    layers = len(both) // 2
    # np.stack also copies into memory of numpy's own: what Paddle's numpy() returns is Paddle's, and counts as its
    return np.stack(both[:layers]), np.stack(both[layers:])


class BlockSwap:
    """The BlockCopier of the engine."""

    def __init__(self, cache: KVCache, capture: RouteCapture, block_size: int) -> None:
        self._cache = cache
        self._capture = capture
        self._block_size = block_size

    def export(self, evicted: Sequence[Evicted]) -> _Exported:
        slots = sequence_slots([one.block for one in evicted], len(evicted) * self._block_size, self._block_size)
        rows = [
            self._capture.copy_rows(sequence_slots([one.block], self._block_size, self._block_size), one.generation)
            for one in evicted
        ]
        return _Exported(self._cache.copy_out(slots), rows)

    def fetch(self, exported: object) -> list[HostBlock]:
        assert isinstance(exported, _Exported)
        keys, values = halves(exported.content)
        size = self._block_size
        return [
            HostBlock(keys[:, at : at + size].copy(), values[:, at : at + size].copy(), rows)
            for at, rows in zip(range(0, keys.shape[1], size), exported.rows, strict=True)
        ]

    def restore(self, block: int, generation: int, content: HostBlock) -> None:
        slots = sequence_slots([block], self._block_size, self._block_size)
        self._cache.copy_in(slots, content.keys, content.values)
        self._capture.restore_rows(slots, generation, content.rows)
