"""Other forms of a batch: one rank's share, padded to a rectangle, as torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from moebus.consumers.reader.fill import fill_rows
from moebus.consumers.reader.shard import MegatronShard
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import InvalidInput


@dataclass(frozen=True, eq=False)
class RouteShard:
    """What one rank holds of a batch.

    `routes` [local_tokens, layers, top_k], writable. `valid` [local_tokens] bool. `rows` [local_tokens] int64: the row
    of the batch that each one is, -1 for padding. `cu_seqlens` [sequences + 1] int32: bounds of the sequences on this
    context rank, before the tensor split. `layers`: global numbers.
    """

    routes: RouteArray
    valid: npt.NDArray[np.bool_]
    rows: npt.NDArray[np.int64]
    cu_seqlens: npt.NDArray[np.int32]
    layers: tuple[int, ...]
    num_experts: int

    def per_router(self, layers: Sequence[int] | None = None) -> list[npt.NDArray[np.int64]]:
        """One int64 array [local_tokens, top_k] for each global layer number (default: all of the shard).

        Raises:
            InvalidInput: field `layers`, a layer that the shard does not hold.
        """
        wanted = self.layers if layers is None else tuple(layers)
        return [self.routes[:, place].astype(np.int64) for place in places(self.layers, wanted, "shard")]


@dataclass(frozen=True, eq=False)
class PaddedRoutes:
    """`routes` [sequences, length, layers, top_k] and `valid` [sequences, length] bool."""

    routes: RouteArray
    valid: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class TorchRoutes:
    """The arrays of a batch as torch tensors that share their memory: types and shapes as there."""

    routes: Any
    valid: Any
    cu_seqlens: Any


def places(held: Sequence[int], wanted: Sequence[int], what: str) -> list[int]:
    """Positions of `wanted` among `held`. Raises InvalidInput (field `layers`)."""
    place = {layer: index for index, layer in enumerate(held)}
    for layer in wanted:
        if layer not in place:
            raise InvalidInput("layers", f"layer {layer} is not in the {what}; it has {list(held)}")
    return [place[layer] for layer in wanted]


def cut_shard(
    routes: RouteArray,
    valid: npt.NDArray[np.bool_],
    lengths: Sequence[int],
    shard: MegatronShard,
    held: tuple[int, ...],
    layers: tuple[int, ...],
    num_experts: int,
) -> RouteShard:
    """The rows of `shard` and some layers. Padding gets legal ids, as rows without routes have them."""
    rows = shard.rows(lengths)
    there = rows >= 0
    mine = np.empty((len(rows), len(layers), routes.shape[2]), routes.dtype)
    picked = rows[there]
    mine[there] = routes[picked] if layers == held else routes[picked][:, places(held, layers, "batch")]
    fill_rows(mine, np.flatnonzero(~there), num_experts)
    is_valid = np.zeros(len(rows), np.bool_)
    is_valid[there] = valid[picked]
    bounds = np.concatenate([[0], np.cumsum(shard.local_lengths(lengths))]).astype(np.int32)
    return RouteShard(mine, is_valid, rows, bounds, layers, num_experts)


def pad(
    routes: RouteArray,
    valid: npt.NDArray[np.bool_],
    lengths: Sequence[int],
    length: int | None,
    offsets: Sequence[int] | None,
    num_experts: int,
) -> PaddedRoutes:
    """See `RouteBatch.padded`."""
    before = [0] * len(lengths) if offsets is None else list(offsets)
    if len(before) != len(lengths) or any(offset < 0 for offset in before):
        raise InvalidInput("offsets", f"{len(before)} for {len(lengths)} sequences; one of at least 0 each")
    needed = max((offset + size for offset, size in zip(before, lengths, strict=True)), default=0)
    total = needed if length is None else length
    if total < needed:
        raise InvalidInput("length", f"{total}, but a sequence ends at {needed}")
    dense = np.empty((len(lengths), total, *routes.shape[1:]), routes.dtype)
    is_valid = np.zeros((len(lengths), total), np.bool_)
    there = np.zeros((len(lengths), total), np.bool_)
    first = 0
    for index, (offset, size) in enumerate(zip(before, lengths, strict=True)):
        dense[index, offset : offset + size] = routes[first : first + size]
        is_valid[index, offset : offset + size] = valid[first : first + size]
        there[index, offset : offset + size] = True
        first += size
    flat = dense.reshape(-1, *routes.shape[1:])
    fill_rows(flat, np.flatnonzero(~there.reshape(-1)), num_experts)
    return PaddedRoutes(dense, is_valid)


def as_torch(routes: RouteArray, valid: npt.NDArray[np.bool_], cu_seqlens: npt.NDArray[np.int32]) -> TorchRoutes:
    """See `RouteBatch.torch`."""
    try:
        torch: Any = import_module("torch")
    except ImportError:
        raise InvalidInput("torch", "it is not installed; `routes` and `valid` are numpy arrays") from None
    return TorchRoutes(torch.from_numpy(routes), torch.from_numpy(valid), torch.from_numpy(cu_seqlens))
