"""RouteBatch: the routes of many rollouts as one packed array, aligned with the trainer's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moebus.consumers.reader.dense import PaddedRoutes, RouteShard, TorchRoutes, as_torch, cut_shard, pad, places
from moebus.consumers.reader.exports import Exports
from moebus.consumers.reader.fill import fill_rows
from moebus.consumers.reader.rollout import Rollout, select_layers
from moebus.consumers.reader.shard import MegatronShard
from moebus.schemas.dtypes import RouteArray, wire_dtype
from moebus.schemas.errors import InvalidInput
from moebus.schemas.route_errors import RouteError
from moebus.schemas.route_ref import RouteRef, token_hash


@dataclass(frozen=True, slots=True)
class Shape:
    """What all routes of a batch have in common. `layers`: global numbers of the MoE layers in the batch."""

    layers: tuple[int, ...]
    top_k: int
    num_experts: int


@dataclass(frozen=True, eq=False)
class RouteBatch:
    """Routes of several rollouts, one after the other, one row per token.

    `routes` [tokens, layers, top_k]: expert ids, uint8, uint16 or uint32, writable. `valid` [tokens] bool: False where
    nothing was recorded (a last token that was never forwarded; every row of an absent rollout); such rows hold
    distinct ids spread evenly over the experts. `cu_seqlens` [len(refs) + 1] int32: rollout i has the rows
    cu_seqlens[i] to cu_seqlens[i + 1]. `absent`: index of a ref -> why it has no routes (only with `missing="mask"`).
    `from_tokens`: a rollout has as many rows as its tokens, the last one included; else as many as were recorded.
    """

    routes: RouteArray
    valid: npt.NDArray[np.bool_]
    cu_seqlens: npt.NDArray[np.int32]
    refs: tuple[RouteRef, ...]
    layers: tuple[int, ...]
    num_experts: int
    absent: Mapping[int, RouteError]
    from_tokens: bool = False

    @property
    def top_k(self) -> int:
        return int(self.routes.shape[2])

    @property
    def absent_fraction(self) -> float:
        """Rows of absent rollouts over all rows; 0.0 for an empty batch."""
        lengths = np.diff(self.cu_seqlens)
        total = int(lengths.sum())
        return float(sum(int(lengths[index]) for index in self.absent)) / total if total else 0.0

    def per_router(self, layers: Sequence[int] | None = None) -> list[npt.NDArray[np.int64]]:
        """One int64 array [tokens, top_k] for each global layer number of `layers` (default: all of the batch), as
        Megatron-Core's router replay takes them.

        Raises:
            InvalidInput: field `layers`, a layer that the batch does not hold.
        """
        wanted = self.layers if layers is None else tuple(layers)
        return [self.routes[:, place].astype(np.int64) for place in places(self.layers, wanted, "batch")]

    def shard(self, shard: MegatronShard, layers: Sequence[int] | None = None) -> RouteShard:
        """The rows and layers of one rank. `layers`: global numbers of its pipeline stage (default: all).

        Raises:
            InvalidInput: field `layers`, a layer that the batch does not hold.
        """
        wanted = self.layers if layers is None else tuple(layers)
        return cut_shard(self.routes, self.valid, self._lengths(), shard, self.layers, wanted, self.num_experts)

    def padded(self, length: int | None = None, offsets: Sequence[int] | None = None) -> PaddedRoutes:
        """As a rectangle [rollouts, length, layers, top_k]; padding has legal ids and is not valid.

        `length`: default what the longest needs. `offsets`: padding before each rollout (prompts padded on the left).

        Raises:
            InvalidInput: field `length` or `offsets`.
        """
        return pad(self.routes, self.valid, self._lengths(), length, offsets, self.num_experts)

    def torch(self) -> TorchRoutes:
        """Torch tensors that share the memory of these arrays (uint16 and uint32 need torch 2.3 or newer).

        Raises:
            InvalidInput: field `torch`: it is not installed.
        """
        return as_torch(self.routes, self.valid, self.cu_seqlens)

    @property
    def export(self) -> Exports:
        """The layouts of other systems: `batch.export.slime()`, `.verl()`, `.sglang(...)`, `.fastdeploy(...)`."""
        absent = frozenset(self.absent)
        return Exports(
            self.routes, self.valid, self.cu_seqlens, self.layers, self.num_experts, self.from_tokens, absent
        )

    def _lengths(self) -> list[int]:
        lengths: list[int] = np.diff(self.cu_seqlens).tolist()
        return lengths


def check_tokens(refs: Sequence[RouteRef], tokens: Sequence[npt.ArrayLike]) -> list[int]:
    """Tokens of each rollout, once they were held against its RouteRef.

    Raises:
        InvalidInput: field `tokens`: not one sequence per ref, fewer tokens than rows, or another token hash.
    """
    if len(tokens) != len(refs):
        raise InvalidInput("tokens", f"{len(tokens)} sequences for {len(refs)} refs; one per ref is needed")
    lengths = []
    for ref, sequence in zip(refs, tokens, strict=True):
        ids = np.asarray(sequence)
        rows = ref.rows
        if ids.ndim != 1 or len(ids) < rows:
            raise InvalidInput(
                "tokens", f"{ref.key} has {rows} rows; tokens of shape {list(ids.shape)} do not cover it"
            )
        if ref.token_hash is not None and token_hash(ids[:rows]) != ref.token_hash:
            raise InvalidInput("tokens", f"{ref.key}: the first {rows} tokens are not those whose routes were recorded")
        lengths.append(len(ids))
    return lengths


def build_batch(
    refs: Sequence[RouteRef],
    found: Sequence[Rollout | RouteError],
    shape: Shape,
    lengths: Sequence[int] | None = None,
) -> RouteBatch:
    """Packs what was found. `lengths`: rows to give each rollout (default: its recorded rows).

    Raises:
        InvalidInput: rollouts of another model, or without a layer that is asked for.
    """
    sizes = [ref.rows for ref in refs] if lengths is None else list(lengths)
    bounds = np.zeros(len(refs) + 1, np.int32)
    np.cumsum(sizes, out=bounds[1:])
    total = int(bounds[-1])
    routes = np.empty((total, len(shape.layers), shape.top_k), wire_dtype(shape.num_experts))
    valid = np.zeros(total, np.bool_)
    absent: dict[int, RouteError] = {}
    for index, one in enumerate(found):
        if isinstance(one, RouteError):
            absent[index] = one
            continue
        if not len(one.routes):
            continue
        _same_model(one, shape)
        rows = slice(int(bounds[index]), int(bounds[index]) + one.ref.rows)
        routes[rows] = select_layers(one, shape.layers)
        valid[rows] = True
    fill_rows(routes, np.flatnonzero(~valid), shape.num_experts)
    return RouteBatch(routes, valid, bounds, tuple(refs), shape.layers, shape.num_experts, absent, lengths is not None)


def _same_model(one: Rollout, shape: Shape) -> None:
    if (one.top_k, one.num_experts) != (shape.top_k, shape.num_experts):
        raise InvalidInput(
            "refs",
            f"{one.ref.key} is of a model with {one.num_experts} experts and top-{one.top_k}, "
            f"others with {shape.num_experts} and top-{shape.top_k}; resolve them apart",
        )
