"""Routing replay for a trainer: the experts are given, the gates are recomputed from the router's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle.config import ModelConfig
from moebus.engine.paddle.model import Route, Tensor
from moebus.engine.paddle.reference import whole_logits
from moebus.engine.paddle.routing import OwnRouting, gate_weights, top_experts
from moebus.engine.paddle.runtime import load_paddle
from moebus.schemas.errors import FatalError, InvalidInput
from moebus.schemas.model_card import ModelCard

BoolRows = npt.NDArray[np.bool_]


class ReplayUnused(FatalError):
    """A forward has not asked for the routes that it was to replay; the text names the layers."""


class RouterReplay:
    """Routes by recorded experts; also a hook for a model of the user's own: call it in each MoE layer.

    `routes`: any integer type, [rows, moe_layers, top_k] in the order of `card.moe_layers`, one row per token of the
    forward. `valid`: bool [rows]; rows that are not valid use the model's own top-k. `norm_topk`: the gates add up to
    1. Gradients reach the router through the gates.

    Raises:
        InvalidInput: field `routes` or `valid`; a wrong shape or type, an id out of range, an expert twice in a top-k.
    """

    def __init__(
        self,
        card: ModelCard,
        routes: npt.NDArray[np.integer],
        valid: BoolRows | None = None,
        *,
        norm_topk: bool = True,
    ) -> None:
        rows = len(routes) if isinstance(routes, np.ndarray) and routes.ndim else 0
        self.valid = np.ones(rows, dtype=np.bool_) if valid is None else valid
        check_routes(card, routes, self.valid)
        self._card = card
        self._norm_topk = norm_topk
        self._ids = routes.astype(np.int64)  # int64 before any kernel sees them: narrow ids are misread by some
        self._own = load_paddle().to_tensor(~self.valid[:, None]) if not self.valid.all() else None
        self._index = {layer: position for position, layer in enumerate(card.moe_layers)}
        self._forwards = dict.fromkeys(card.moe_layers, 0)

    @property
    def rows_used(self) -> int:
        """Rows whose recorded experts are used."""
        return int(self.valid.sum())

    @property
    def forwards(self) -> dict[int, int]:
        """How often each layer has asked for its routes."""
        return dict(self._forwards)

    def check_used(self) -> int:
        """Rows that every layer has replayed; to be asked after a forward, as a hook that was never called looks just
        like replay without any effect.

        Raises:
            ReplayUnused: a layer has not asked.
        """
        idle = [layer for layer, count in self._forwards.items() if not count]
        if idle:
            raise ReplayUnused(f"replay: layers {idle} did not ask for their routes; is the hook in their routers?")
        return self.rows_used

    def part(
        self, *, layers: Sequence[int] | None = None, rows: slice | npt.NDArray[np.integer] | None = None
    ) -> RouterReplay:
        """The replay of one rank: `layers` (global numbers, ascending) of a pipeline stage, `rows` (which of these, in
        the order of the rank's tokens) of a context-parallel one. None: all.

        Raises:
            InvalidInput: field `layers`, `moe_layers` or `rows`; one that is not here, or none at all.
        """
        card = self._card if layers is None else replace(self._card, moe_layers=tuple(layers))
        for layer in card.moe_layers:
            if layer not in self._index:
                raise InvalidInput("layers", f"{layer} is not one of the MoE layers {list(self._card.moe_layers)}")
        count = len(self._ids)
        if isinstance(rows, np.ndarray):
            if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
                raise InvalidInput("rows", "a slice or an array of row numbers is needed")
            if rows.size and (rows.min() < 0 or rows.max() >= count):
                raise InvalidInput("rows", f"a row is outside 0..{count - 1}")
        chosen = np.arange(count)[rows if rows is not None else slice(None)]
        columns = [self._index[layer] for layer in card.moe_layers]
        return RouterReplay(card, self._ids[chosen][:, columns], self.valid[chosen], norm_topk=self._norm_topk)

    def __call__(self, layer: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Ids int64 [rows, top_k] and gates [rows, top_k] of global layer `layer` for its router logits [rows, E]."""
        ids = self.select(layer, logits)
        return ids, gate_weights(logits, ids, norm_topk=self._norm_topk)

    def select(self, layer: int, logits: Tensor) -> Tensor:
        """The ids alone, for a model that computes gates in its own way."""
        if layer not in self._index:
            raise InvalidInput("layer", f"{layer} is not one of the MoE layers {list(self._card.moe_layers)}")
        given = np.ascontiguousarray(self._ids[:, self._index[layer]])
        if logits.shape[0] != len(given):
            raise InvalidInput("routes", f"{len(given)} rows for a forward of {logits.shape[0]} tokens")
        if logits.shape[1] != self._card.num_experts:
            raise InvalidInput("routes", f"{logits.shape[1]} router logits for {self._card.num_experts} experts")
        self._forwards[layer] += 1
        ids = load_paddle().to_tensor(given)
        if self._own is None:
            return ids
        return load_paddle().where(self._own, top_experts(logits, self._card.top_k), ids)


def check_routes(card: ModelCard, routes: npt.NDArray[np.integer], valid: BoolRows) -> None:
    """Raises InvalidInput as RouterReplay says. On the host: on a device a duplicate passes silently."""
    if not isinstance(routes, np.ndarray) or not np.issubdtype(routes.dtype, np.integer):
        raise InvalidInput("routes", "an array of integers is needed")
    if routes.ndim != 3 or routes.shape[1:] != card.shape(0)[1:]:
        raise InvalidInput("routes", f"shape {routes.shape}; [rows, {len(card.moe_layers)}, {card.top_k}] is needed")
    if valid.dtype != np.bool_ or valid.shape != (len(routes),):
        raise InvalidInput("valid", f"a bool array [{len(routes)}] is needed, not {valid.dtype} {list(valid.shape)}")
    used = routes[valid]
    if used.size and (used.min() < 0 or used.max() >= card.num_experts):
        raise InvalidInput("routes", f"an expert id is outside 0..{card.num_experts - 1}")
    ordered = np.sort(used, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise InvalidInput("routes", "an expert appears twice in one top-k")


@dataclass(frozen=True)
class PerturbedRouter:
    """`inner` on router logits that are off as a trainer's are: N(0, noise) added, or rounded to bfloat16."""

    inner: Route
    noise: float = 0.0
    bf16: bool = False
    seed: int = 0

    def __call__(self, layer: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        paddle = load_paddle()
        exact = logits.detach().numpy()
        changed = exact
        if self.noise:
            draw = np.random.default_rng([self.seed, layer]).standard_normal(exact.shape)
            changed = changed + (self.noise * draw).astype(np.float32)
        if self.bf16:
            changed = round_bf16(changed)
        return self.inner(layer, logits + paddle.to_tensor(changed - exact))


def round_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The nearest bfloat16 of each finite value (ties to even), as float32."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    result: npt.NDArray[np.float32] = rounded.astype(np.uint32).view(np.float32)
    return result


def replay_logprobs(
    config: ModelConfig,
    weights: Mapping[str, object],
    token_ids: npt.NDArray[np.int64],
    routes: npt.NDArray[np.integer] | None,
    *,
    valid: BoolRows | None = None,
    router_noise: float = 0.0,
    router_bf16: bool = False,
    seed: int = 0,
) -> npt.NDArray[np.float32]:
    """Log probabilities float32 [n - 1] of token_ids[1:] under a trainer's forward; entry i is of token i + 1.

    `token_ids`: int64 [n], n >= 2. `routes`: [n - 1 or n, moe_layers, top_k], None for the model's own top-k.
    `valid`: bool, one per row of routes. `router_noise` and `router_bf16`: as PerturbedRouter.

    Raises:
        InvalidInput: as RouterReplay, or fewer than two tokens.
    """
    if len(token_ids) < 2:
        raise InvalidInput("token_ids", f"{len(token_ids)} tokens; two or more are needed")
    rows = len(token_ids) - 1
    route: Route = OwnRouting(config)
    if routes is not None:
        if len(routes) not in (rows, rows + 1):
            raise InvalidInput("routes", f"{len(routes)} rows for {len(token_ids)} tokens; {rows} are needed")
        used = None if valid is None else valid[:rows]
        route = RouterReplay(config.card(), routes[:rows], used, norm_topk=config.norm_topk)
    if router_noise or router_bf16:
        route = PerturbedRouter(route, router_noise, router_bf16, seed)
    paddle = load_paddle()
    with paddle.no_grad():
        logits = whole_logits(config, weights, token_ids[:-1], route)
        logprobs = paddle.nn.functional.log_softmax(logits, axis=-1).numpy()
    picked: npt.NDArray[np.float32] = logprobs[np.arange(rows), token_ids[1:]]
    return picked
