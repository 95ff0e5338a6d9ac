"""What the drop-in for FastDeploy's routing store works with: the model's shape, ids, layers that come one by one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moebus.producers.routing import FenceReceipt, Receipt, RoutingPublisher, Stored
from moebus.schemas.dtypes import fill_value
from moebus.schemas.errors import InvalidInput
from moebus.schemas.fastdeploy_ids import parse_request_id
from moebus.schemas.model_card import ModelCard
from moebus.schemas.rollout import RolloutId, check_rollout_id, structured

Ids = npt.NDArray[np.integer]
_REQUEST = "chatcmpl-"
OPEN_ROLLOUTS = 4096
"""Rollouts whose layers may be incomplete at the same time; the oldest is given up beyond that."""


def card_of(fd_config: Any) -> ModelCard:
    """The card of the model that FastDeploy serves, from its `model_config`.

    Raises:
        InvalidInput: naming what it lacks, or where `routing_replay_config` says another number.
    """
    model = fd_config.model_config
    first, depth = _integer(model, "moe_layer_start_index"), _integer(model, "num_hidden_layers")
    glm = any("Glm4Moe" in str(name) for name in getattr(model, "architectures", None) or ())
    top_k = _integer(model, *(("num_experts_per_tok", "moe_k") if glm else ("moe_k", "num_experts_per_tok")))
    card = ModelCard(_integer(model, "moe_num_experts", "n_routed_experts"), top_k, tuple(range(first, depth)))
    replay = fd_config.routing_replay_config
    for name, ours in (("num_moe_layers", len(card.moe_layers)), ("moe_top_k", card.top_k)):
        said = getattr(replay, name, 0)
        if said and said != ours:
            raise InvalidInput(f"routing_replay_config.{name}", f"{said}, but the model has {ours}")
    return card


def split_id(text: str) -> tuple[str, int]:
    """(rollout id, choice) of a request id `chatcmpl-{user}-{uuid4}_{choice}` or of a rollout id (choice 0).

    Raises:
        InvalidInput: field `request_id` or `rollout_id`.
    """
    if isinstance(text, str) and text.startswith(_REQUEST):
        parsed = parse_request_id(text)
        return parsed.rollout_id, parsed.choice
    return check_rollout_id(text), 0


def turn_before(rollout_id: str) -> str | None:
    """The turn before that of a structured id; None at turn 0 and for ids without turns."""
    parts = structured(rollout_id)
    if parts is None or parts.turn == 0:
        return None
    return str(RolloutId(parts.data, parts.gen, parts.turn - 1, parts.segment))


def split_layer(key: str) -> tuple[str, int]:
    """(id, layer index) of a store key `{rollout_id}_{layer}`.

    Raises:
        InvalidInput: field `routing_key`.
    """
    name, line, layer = key.rpartition("_")
    if not line or not name or not (layer.isascii() and layer.isdigit()):
        raise InvalidInput("routing_key", f"{key[:80]!r} does not end in _ and the index of a layer")
    return name, int(layer)


def missing_row(rows: Ids) -> int | None:
    """The first row of [tokens, layers, top_k] of which a layer holds only fill: it was never captured. None: no such
    row."""
    fill = fill_value(rows.dtype) if rows.dtype.kind == "u" else -1
    gaps = np.flatnonzero((rows == fill).all(axis=2).any(axis=1))
    return int(gaps[0]) if len(gaps) else None


@dataclass(eq=False)
class Layered:
    """The layers of one rollout that have come, each [tokens, top_k]."""

    layers: dict[int, Ids] = field(default_factory=dict)
    extra: Any = None


class LayerCollector:
    """Puts rollouts together whose layers come one by one, in any order. Not thread-safe."""

    def __init__(self, layers: int) -> None:
        self._count = layers
        self._open: OrderedDict[tuple[str, int], Layered] = OrderedDict()
        self._given_up: list[tuple[tuple[str, int], Layered]] = []

    def add(self, key: tuple[str, int], layer: int, rows: Ids) -> tuple[Layered, Ids | None]:
        """What is there of `key`, and once every layer has come, all of it as [layers, tokens, top_k]. The array of a
        layer is copied: FastDeploy may use its buffer again. A layer with other rows than those before begins anew.

        Raises:
            InvalidInput: field `layer_idx`: not one of the model.
        """
        if not 0 <= layer < self._count:
            raise InvalidInput("layer_idx", f"{layer}; the model has {self._count} MoE layers")
        held = self._open.get(key)
        if held is not None and any((one.shape, one.dtype) != (rows.shape, rows.dtype) for one in held.layers.values()):
            self._given_up.append((key, self._open.pop(key)))
            held = None
        if held is None:
            held = self._open[key] = Layered()
        held.layers[layer] = np.array(rows, copy=True)
        if len(held.layers) < self._count:
            return held, None
        del self._open[key]
        return held, np.stack([held.layers[index] for index in range(self._count)])

    def given_up(self) -> list[tuple[tuple[str, int], Layered]]:
        """Takes out those that were begun anew, and the oldest ones beyond the bound: they will not be whole."""
        old, self._given_up = self._given_up, []
        return old + [self._open.popitem(last=False) for _ in range(len(self._open) - OPEN_ROLLOUTS)]

    def clear(self) -> list[tuple[tuple[str, int], Layered]]:
        """Takes out everything that is not whole."""
        left = list(self._open.items())
        self._open.clear()
        return left


def publish_rows(publisher: RoutingPublisher, key: tuple[str, int], rows: Ids) -> Receipt[Stored]:
    """Routes [tokens, moe_layers, top_k]; of status missing where a row was never captured.

    Raises:
        InvalidInput: naming the argument.  PublisherClosed.
    """
    gap = missing_row(rows)
    if gap is not None:
        return publisher.submit(None, *key, status="missing", finish_reason=f"row {gap} was never captured")
    return publisher.submit(rows, *key)


def clear_earlier(publisher: RoutingPublisher) -> FenceReceipt | None:
    """The receipt of a clear of all epochs before the publisher's; None where there is none."""
    return publisher.clear(publisher.epoch - 1) if publisher.epoch > 0 else None


def _integer(model: Any, *names: str) -> int:
    for name in names:
        value = getattr(model, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise InvalidInput(f"model_config.{names[0]}", f"FastDeploy's model_config has no integer {' or '.join(names)}")
