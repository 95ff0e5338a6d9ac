"""The content of blocks, between the device and host memory: keys and values together with their routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle.blocks import Evicted
from moebus.engine.paddle.capture import CapturedRows, RouteCapture
from moebus.engine.paddle.kvcache import KVCache
from moebus.engine.paddle.model import Tensor
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
    """Copies on the device; `rows` are on the host already."""

    keys: Tensor
    values: Tensor
    rows: list[CapturedRows]


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
        return _Exported(*self._cache.copy_out(slots), rows)

    def fetch(self, exported: object) -> list[HostBlock]:
        assert isinstance(exported, _Exported)
        # arrays of numpy's own: what numpy() returns is memory of Paddle's, and counts
        keys, values = np.array(exported.keys.numpy()), np.array(exported.values.numpy())
        size = self._block_size
        return [
            HostBlock(keys[:, at : at + size].copy(), values[:, at : at + size].copy(), rows)
            for at, rows in zip(range(0, keys.shape[1], size), exported.rows, strict=True)
        ]

    def restore(self, block: int, generation: int, content: HostBlock) -> None:
        slots = sequence_slots([block], self._block_size, self._block_size)
        self._cache.copy_in(slots, content.keys, content.values)
        self._capture.restore_rows(slots, generation, content.rows)
