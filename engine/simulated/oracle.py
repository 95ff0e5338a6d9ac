"""Tokens and routes as hash functions of (seed, weight version, tokens so far).

A chain h(0) = H(seed, version), h(i + 1) = H(h(i), token i) stands for the model's state: row i of the routes and
the token after token i follow from h(i + 1) alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from math import gcd

import numpy as np
import numpy.typing as npt
import xxhash

from moebus.engine.simulated.config import SimulatedConfig
from moebus.schemas.dtypes import RouteArray

_PAIR = struct.Struct("<Qq")
_LINK = xxhash.xxh3_64_intdigest


def chain_root(seed: int, version: str) -> int:
    """h(0), 64 bits."""
    return _LINK(f"{seed}/{version}".encode())


def chain_next(state: int, token: int) -> int:
    """h(i + 1) from h(i) and token i."""
    return _LINK(_PAIR.pack(state, token))


def chain(root: int, tokens: Iterable[int]) -> list[int]:
    """[h(1), ..., h(n)]."""
    states = []
    for token in tokens:
        root = chain_next(root, token)
        states.append(root)
    return states


def next_token(config: SimulatedConfig, state: int, temperature: float, sample_seed: int) -> tuple[int, float]:
    """The token sampled after `state` and its log probability (natural log, in (-4, 0]).

    Greedy (temperature 0) ignores `sample_seed`.
    """
    drawn = _LINK(_PAIR.pack(state, sample_seed if temperature > 0 else -1))
    return drawn % config.vocab_size, -4.0 * ((drawn >> 40) / float(1 << 24))


def expected_routes(config: SimulatedConfig, version: str, token_ids: npt.ArrayLike) -> RouteArray:
    """Routes [n, moe_layers, top_k] of all `token_ids` [n] under weights `version`.

    A request's own rows are the first P + O - 1 of them. The experts of a row are distinct, in no special order.
    """
    tokens = np.asarray(token_ids, dtype=np.int64).tolist()
    return routes_of_states(config, chain(chain_root(config.seed, version), tokens))


def routes_of_states(config: SimulatedConfig, states: list[int]) -> RouteArray:
    """Routes [n, moe_layers, top_k] of chain states h(1)..h(n)."""
    count = config.num_experts
    layers = np.asarray(config.moe_layers, dtype=np.uint64) + np.uint64(1)
    mixed = _mix(np.asarray(states, dtype=np.uint64)[:, None] ^ (layers * np.uint64(0x9E3779B97F4A7C15)))
    # start + j * stride with stride prime to the number of experts never repeats within a top-k
    strides = np.asarray([s for s in range(1, count + 1) if gcd(s, count) == 1][:64], dtype=np.uint64)
    stride = strides[(mixed >> np.uint64(32)) % np.uint64(len(strides))]
    steps = np.arange(config.top_k, dtype=np.uint64)
    ids = (mixed % np.uint64(count))[..., None] + stride[..., None] * steps
    routes: RouteArray = (ids % np.uint64(count)).astype(config.card().dtype)
    return routes


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed
