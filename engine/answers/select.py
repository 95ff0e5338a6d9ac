"""From the rows and layers that a server counts to those of a record: MoE layers by global number, rows that were
recorded, ids checked. Nothing here guesses: what cannot have come out of a router is refused, by row and layer."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from moebus.engine.answers.payload import Integers
from moebus.schemas.dtypes import RouteArray, fill_value
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import check_ids

Mask = npt.NDArray[np.bool_]
_SURE_BITS = 32
"""A top-1 layer of zeros alone is refused where even routing gives one in less than 2^-32 of all cases."""


def select(found: Integers, card: ModelCard, path: str, start: int) -> tuple[RouteArray, Mask]:
    """Routes [rows, moe_layers, top_k] of the card's type, and which rows hold any [rows].

    A row is not recorded where every id of its MoE layers is -1 (all ones of an unsigned type that no expert needs), or
    where all are 0 with a top-k above 1. `start`: number of the first row, for messages.

    Raises:
        InvalidInput: field `path`: a layer that does not route and is not constant, one that routes and is all zeros,
            a row that only some layers have, an id out of range, or one expert twice in a top-k.
    """
    moe = _moe_layers(found, card)
    gone = _not_recorded(moe, card, path, start)
    some = bool(gone.any())
    kept, rows = (moe[~gone], np.flatnonzero(~gone) + start) if some else (moe, np.arange(len(moe)) + start)
    if found.shape[1] != len(card.moe_layers):
        _check_dense(found[~gone] if some else found, card, path)
    _check_zeros(kept, card, path)
    _check_range(kept, card, path, rows)
    narrow: RouteArray = np.ascontiguousarray(kept, dtype=card.dtype)
    _check_twice(narrow, card, path, rows)
    if not some:
        return narrow, ~gone
    routes: RouteArray = np.zeros(card.shape(len(moe)), card.dtype)
    routes[~gone] = narrow
    return routes, ~gone


def _moe_layers(found: Integers, card: ModelCard) -> Integers:
    layers = card.moe_layers
    if found.shape[1] == len(layers) or not len(found):
        return found.reshape(card.shape(len(found)))
    if layers[-1] - layers[0] == len(layers) - 1:
        return found[:, layers[0] : layers[-1] + 1]
    return found[:, list(layers)]


def _not_recorded(moe: Integers, card: ModelCard, path: str, start: int) -> Mask:
    """Rows [rows] without routes. Most answers have none, which one look at the ids says."""
    gone: Mask = np.zeros(len(moe), np.bool_)
    if card.top_k > 1 and len(moe):
        suspect = np.flatnonzero(~moe[:, 0].any(axis=1))
        gone[suspect] = ~moe[suspect].any(axis=(1, 2))
    if moe.size and not (int(moe.min()) >= 0 and int(moe.max()) < card.num_experts):
        filled = _filled(moe, card.num_experts)
        gone |= np.asarray(filled.all(axis=(1, 2)))
        _whole_rows(filled, gone, card, path, start)
    return gone


def _filled(moe: Integers, num_experts: int) -> Mask:
    """Ids that stand for "not recorded"."""
    if moe.dtype.kind == "i":
        return np.asarray(moe == -1)
    fill = fill_value(moe.dtype)
    return np.asarray(moe == fill) if fill >= num_experts else np.zeros(moe.shape, np.bool_)


def _whole_rows(filled: Mask, gone: Mask, card: ModelCard, path: str, start: int) -> None:
    torn = filled.any(axis=2) & ~gone[:, None]
    if torn.any():
        row, layer = (int(place) for place in np.argwhere(torn)[0])
        raise InvalidInput(path, f"row {row + start} is recorded, but not in layer {card.moe_layers[layer]}")


def _check_dense(found: Integers, card: ModelCard, path: str) -> None:
    routing = set(card.moe_layers)
    for layer in range(found.shape[1]):
        if layer not in routing and len(found) and (found[:, layer] != found[0, layer, 0]).any():
            raise InvalidInput(
                path, f"layer {layer} does not route by the model card, but its ids differ: wrong layers"
            )


def _check_zeros(moe: Integers, card: ModelCard, path: str) -> None:
    if not len(moe) or (card.top_k == 1 and len(moe) * math.log2(card.num_experts) < _SURE_BITS):
        return
    used = moe.any(axis=(0, 2))
    if not used.all():
        layer = card.moe_layers[int(np.argmin(used))]
        raise InvalidInput(path, f"layer {layer} routes by the model card, but all its ids are 0: it was not recorded")


def _check_range(moe: Integers, card: ModelCard, path: str, rows: npt.NDArray[np.intp]) -> None:
    if not moe.size or (int(moe.min()) >= 0 and int(moe.max()) < card.num_experts):
        return
    row, layer, k = np.argwhere((moe < 0) | (moe >= card.num_experts))[0]
    where = f"row {rows[row]}, layer {card.moe_layers[int(layer)]}"
    raise InvalidInput(path, f"{where}: expert id {moe[row, layer, k]} where there are {card.num_experts} experts")


def _check_twice(routes: RouteArray, card: ModelCard, path: str, rows: npt.NDArray[np.intp]) -> None:
    try:
        check_ids(routes, card.num_experts)
    except InvalidInput:
        ordered = np.sort(routes, axis=2)
        row, layer, k = np.argwhere(ordered[..., 1:] == ordered[..., :-1])[0]
        where = f"row {rows[row]}, layer {card.moe_layers[int(layer)]}"
        raise InvalidInput(path, f"{where}: expert {ordered[row, layer, k]} is twice in the top-{card.top_k}") from None
