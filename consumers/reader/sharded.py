"""Reading only the rows that one rank holds: every row of a rollout travels to one context and tensor rank alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moebus.consumers.reader.batch import Shape
from moebus.consumers.reader.dense import RouteShard
from moebus.consumers.reader.fill import fill_rows
from moebus.consumers.reader.rollout import Rollout, select_layers
from moebus.consumers.reader.shard import MegatronShard
from moebus.schemas.dtypes import wire_dtype
from moebus.schemas.model_card import ModelCard
from moebus.schemas.route_errors import RouteCorrupt
from moebus.schemas.route_ref import RouteRef


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows [start, stop) of the ref at `index`."""

    index: int
    start: int
    stop: int


def slices_of(rows: npt.NDArray[np.int64], refs: Sequence[RouteRef], lengths: Sequence[int]) -> list[Slice]:
    """What has to be read for `rows` of the packed batch (-1: padding): recorded rows only, in runs without a gap."""
    found: list[Slice] = []
    first = 0
    for index, (ref, length) in enumerate(zip(refs, lengths, strict=True)):
        mine = np.sort(rows[(rows >= first) & (rows < first + min(length, ref.rows))]) - first
        first += length
        if not len(mine):
            continue
        cuts = np.flatnonzero(np.diff(mine) > 1) + 1
        found += [Slice(index, int(run[0]), int(run[-1]) + 1) for run in np.split(mine, cuts)]
    return found


def check_slice(rollout: Rollout, ref: RouteRef, piece: Slice) -> Rollout:
    """`rollout` itself where it is these rows of the attempt that `ref` names.

    Raises:
        RouteCorrupt: other rows, or another number of rows or token hash than the RouteRef says.
    """
    got = rollout.ref
    rows = (rollout.start, len(rollout.routes))
    if (got.key, got.attempt, got.rows) != (ref.key, ref.attempt, ref.rows) or rows != (
        piece.start, piece.stop - piece.start,
    ):  # fmt: skip
        raise RouteCorrupt(
            f"{ref.key}: {rows[1]} of {got.rows} rows where rows {piece.start} to {piece.stop} were asked"
        )
    if None not in (ref.token_hash, got.token_hash) and got.token_hash != ref.token_hash:
        raise RouteCorrupt(f"{ref.key}: its token hash is {got.token_hash}, the ref says {ref.token_hash}")
    return rollout


def shape_of_slices(found: Sequence[Rollout], layers: tuple[int, ...] | None, card: ModelCard | None) -> Shape:
    """What they have in common, also where they hold no row; else that of the card."""
    for one in found:
        if one.layers:
            return Shape(one.layers if layers is None else layers, one.top_k, one.num_experts)
    if card is not None:
        return Shape(card.moe_layers if layers is None else layers, card.top_k, card.num_experts)
    return Shape(layers or (), 1, 1)  # rollouts without a row: any shape is right


def build_shard(
    rows: npt.NDArray[np.int64],
    lengths: Sequence[int],
    found: Sequence[tuple[Slice, Rollout]],
    shard: MegatronShard,
    shape: Shape,
) -> RouteShard:
    """Puts the slices where they belong; everything else is filled and not valid.

    Raises:
        RouteCorrupt: a slice of another model.  InvalidInput: one without a layer that is asked for.
    """
    routes = np.empty((len(rows), len(shape.layers), shape.top_k), wire_dtype(shape.num_experts))
    valid = np.zeros(len(rows), np.bool_)
    starts = np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))])
    for piece, rollout in found:
        if (rollout.top_k, rollout.num_experts) != (shape.top_k, shape.num_experts):
            raise RouteCorrupt(f"{rollout.ref.key} is of another model than the other rollouts; resolve them apart")
        first = starts[piece.index]
        places = np.flatnonzero((rows >= first + piece.start) & (rows < first + piece.stop))
        routes[places] = select_layers(rollout, shape.layers)[rows[places] - first - piece.start]
        valid[places] = True
    fill_rows(routes, np.flatnonzero(~valid), shape.num_experts)
    bounds = np.concatenate([[0], np.cumsum(shard.local_lengths(lengths))]).astype(np.int32)
    return RouteShard(routes, valid, rows, bounds, shape.layers, shape.num_experts)
