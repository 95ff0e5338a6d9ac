"""Keys and values on the device: per layer one array of slots, written and read by slot number."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle.config import ModelConfig
from moebus.engine.paddle.device import CpuDevice, Device, HostCopy
from moebus.engine.paddle.model import MASKED, Tensor, grouped_attention
from moebus.engine.paddle.runtime import load_paddle
from moebus.engine.paddle.slots import Ints


class KVCache:
    """`[num_slots, kv_heads, head_dim]` float32, twice per layer. Released and allocated as a whole."""

    def __init__(self, config: ModelConfig, device: Device | None = None) -> None:
        self._config = config
        self._device: Device = device or CpuDevice()
        self._paddle = load_paddle()
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.allocate()

    @property
    def resident(self) -> bool:
        return bool(self._keys)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device now."""
        return sum(int(t.size) * t.element_size() for t in (*self._keys, *self._values))

    def allocate(self) -> None:
        """Zeros, not garbage: padding is read, and only then masked."""
        config = self._config
        shape = [config.num_slots, config.num_kv_heads, config.head_dim]
        layers = config.num_layers + config.draft_layers
        keys = [self._paddle.zeros(shape, dtype="float32") for _ in range(layers)]
        values = [self._paddle.zeros(shape, dtype="float32") for _ in range(layers)]
        self._keys, self._values = keys, values

    def release(self) -> None:
        held = (*self._keys, *self._values)
        self._keys, self._values = [], []
        for tensor in held:
            tensor._clear_data()

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [T, kv_heads, head_dim] into `slots` int64 [T]."""
        self._paddle.scatter_(self._keys[layer], slots, k)
        self._paddle.scatter_(self._values[layer], slots, v)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [N, kv_heads, head_dim] of `slots` int64 [N]."""
        return self._paddle.gather(self._keys[layer], slots), self._paddle.gather(self._values[layer], slots)

    def copy_out(self, slots: Ints) -> HostCopy:
        """Begins a copy of `slots` [N] to the host: the keys of each layer, then the values of each layer,
        [N, kv_heads, head_dim] each. The slots may be written to at once."""
        paddle = self._paddle
        where = paddle.to_tensor(slots)
        with paddle.no_grad():
            return self._device.begin_copy([paddle.gather(layer, where) for layer in (*self._keys, *self._values)])

    def copy_in(self, slots: Ints, keys: npt.NDArray[np.float32], values: npt.NDArray[np.float32]) -> None:
        """Keys and values [layers, N, kv_heads, head_dim] from host memory into `slots`."""
        where, upload = self._paddle.to_tensor(slots), self._device.upload
        with self._paddle.no_grad():
            for layer in range(len(self._keys)):
                self.write(layer, where, upload(keys[layer]), upload(values[layer]))


class PagedAttention:
    """Attention of B sequences with Q new tokens each over their cached ones, through their block tables.

    `new_slots` [B * Q]: where the new tokens' keys and values go. `seen_slots` [B, S]: the slots of every sequence's
    positions, padded with any slot; `seen` [B]: how many count (the new ones included).
    """

    def __init__(self, cache: KVCache, new_slots: Ints, seen_slots: Ints, seen: Ints) -> None:
        self._cache = cache
        self._paddle = load_paddle()
        self._batch, self._width = seen_slots.shape
        self._queries = len(new_slots) // self._batch
        self._new = self._paddle.to_tensor(new_slots)
        self._seen = self._paddle.to_tensor(seen_slots.reshape(-1))
        self._mask = self._paddle.to_tensor(_mask(seen, self._queries, self._width))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._cache.write(layer, self._new, k, v)
        keys, values = self._cache.read(layer, self._seen)
        shape = [self._batch, self._width, *keys.shape[1:]]
        q = q.reshape([self._batch, self._queries, *q.shape[1:]])
        return grouped_attention(self._paddle, q, keys.reshape(shape), values.reshape(shape), self._mask)


def _mask(seen: Ints, queries: int, width: int) -> npt.NDArray[np.float32]:
    """[B, 1, 1, Q, S]: query j of a sequence is its position seen - Q + j and sees no later one."""
    last = seen[:, None] - queries + np.arange(queries)
    hidden = np.arange(width)[None, None, :] > last[:, :, None]
    return np.where(hidden, np.float32(MASKED), np.float32(0))[:, None, None]
