"""One rollout as a trainer gets it: rows of expert ids and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass

from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import InvalidInput
from moebus.schemas.record import CheckLevel, Status, Versions, check_content
from moebus.schemas.route_errors import RouteCorrupt
from moebus.schemas.route_ref import RouteRef


@dataclass(frozen=True, slots=True)
class Rollout:
    """A whole attempt. `routes` [rows, layers, top_k] in the wire's type (uint8, uint16 or uint32), maybe read-only;
    `routes[i]` is row `start + i`. `ref.rows` counts all rows, also where only some were asked for. `versions`
    is None where a store had too many for its answer."""

    ref: RouteRef
    routes: RouteArray
    layers: tuple[int, ...]
    top_k: int
    num_experts: int
    status: Status
    finish_reason: str = ""
    epoch: int = 0
    versions: Versions | None = ()
    card_digest: str | None = None
    start: int = 0


def check_rollout(rollout: Rollout, checks: CheckLevel = "ids") -> Rollout:
    """`rollout` itself, once its ids were looked at: as closely as `checks` says; the shape is always
    looked at.

    Raises:
        RouteCorrupt: naming the rollout and what is wrong.
    """
    routes = rollout.routes
    if routes.shape[1:] != (len(rollout.layers), rollout.top_k) or rollout.start + len(routes) > rollout.ref.rows:
        want = [rollout.ref.rows, len(rollout.layers), rollout.top_k]
        raise RouteCorrupt(f"{rollout.ref.key}: shape {list(routes.shape)} where {want} is said")
    try:
        check_content(routes, rollout.num_experts, checks)
    except InvalidInput as exc:
        raise RouteCorrupt(f"{rollout.ref.key}: {exc.reason}") from None
    return rollout


def select_layers(rollout: Rollout, layers: tuple[int, ...]) -> RouteArray:
    """The rows of some layers, [rows, len(layers), top_k], in the order asked for (a view where they are all).

    Raises:
        InvalidInput: field `layers`, where the rollout has no such layer.
    """
    if layers == rollout.layers:
        return rollout.routes
    place = {layer: index for index, layer in enumerate(rollout.layers)}
    missing = [layer for layer in layers if layer not in place]
    if missing:
        raise InvalidInput("layers", f"{rollout.ref.key} has no layer {missing[0]}; it has {list(rollout.layers)}")
    return rollout.routes[:, [place[layer] for layer in layers]]
