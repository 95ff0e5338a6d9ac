"""Checks of what a store or the stream gave against what was asked for. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from moebus.consumers.reader.batch import Shape
from moebus.consumers.reader.rollout import Rollout
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.route_errors import RouteCorrupt, RouteError
from moebus.schemas.route_ref import RouteRef


def check_ref(rollout: Rollout, ref: RouteRef) -> Rollout:
    """`rollout` itself where it is the attempt that `ref` names.

    Raises:
        RouteCorrupt: another number of rows or another token hash than the RouteRef says.
    """
    got = rollout.ref
    if (got.key, got.attempt, got.rows) != (ref.key, ref.attempt, ref.rows) or len(rollout.routes) != ref.rows:
        raise RouteCorrupt(f"{ref.key}: {got.rows} rows of attempt {got.attempt} where the ref says {ref.rows}")
    if ref.token_hash is not None and got.token_hash is not None and got.token_hash != ref.token_hash:
        raise RouteCorrupt(f"{ref.key}: its token hash is {got.token_hash}, the ref says {ref.token_hash}")
    return rollout


def check_card(rollout: Rollout, card: ModelCard | None) -> Rollout:
    """`rollout` itself where it is of the model that the trainer named (or none was named).

    Raises:
        RouteCorrupt: other experts, top-k or layers than the card has.
    """
    if card is None or len(rollout.routes) == 0:
        return rollout
    other = rollout.card_digest is not None and rollout.card_digest != card.digest
    shape = (rollout.num_experts, rollout.top_k) != (card.num_experts, card.top_k)
    if other or shape or not set(rollout.layers) <= set(card.moe_layers):
        raise RouteCorrupt(
            f"{rollout.ref.key}: {rollout.num_experts} experts, top-{rollout.top_k}, layers {list(rollout.layers)} are "
            f"not those of the model card ({card.num_experts}, top-{card.top_k}, {list(card.moe_layers)})"
        )
    return rollout


def shape_of(found: Sequence[Rollout | RouteError], layers: tuple[int, ...] | None, card: ModelCard | None) -> Shape:
    """What the rollouts of a batch have in common, from the first one that has rows, else from the card.

    Raises:
        RouteError: nothing was found and no card was given: the first answer.  InvalidInput: nothing was asked for.
    """
    for one in found:
        if isinstance(one, Rollout) and len(one.routes):
            return Shape(one.layers if layers is None else layers, one.top_k, one.num_experts)
    if card is not None:
        return Shape(card.moe_layers if layers is None else layers, card.top_k, card.num_experts)
    for answer in found:
        if isinstance(answer, RouteError):
            raise answer
    if found:  # rollouts without a row: any shape is right
        return Shape(layers or (), 1, 1)
    raise InvalidInput("refs", "empty; give the reader a model card to make an empty batch")
