"""Arrays of routes in the layouts that other systems use, and back. Pure.

Ours is [rows, moe_layers, top_k], row i for token i, MoE layers only. The others:

fastdeploy  [moe_layers, max_model_len, top_k], the smallest unsigned type that leaves all ones free as fill
sglang      base64 of int32 [rows, num_hidden_layers, top_k], zeros in the layers that do not route; no shape is sent
slime       int32 [tokens - 1, layers, top_k]; miles has the same
verl        int16 [tokens, layers, top_k]; the last token's row is zeros
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moebus.schemas.dtypes import RouteArray, fastdeploy_dtype, fill_value, wire_dtype
from moebus.schemas.errors import InvalidInput

Ids = npt.NDArray[np.integer]


def to_fastdeploy(routes: Ids, num_experts: int, max_model_len: int, shared_experts: int = 0) -> RouteArray:
    """[rows, layers, top_k] -> [layers, max_model_len, top_k]; rows that are not there are all ones.

    Raises:
        InvalidInput: field `max_model_len`, where there are more rows; field `num_experts`.
    """
    rows, layers, top_k = routes.shape
    if rows > max_model_len:
        raise InvalidInput("max_model_len", f"{max_model_len}, but there are {rows} rows")
    dtype = fastdeploy_dtype(num_experts + shared_experts)
    padded: RouteArray = np.full((layers, max_model_len, top_k), fill_value(dtype), dtype)
    padded[:, :rows] = routes.transpose(1, 0, 2)
    return padded


def from_fastdeploy(padded: Ids, num_experts: int) -> RouteArray:
    """[layers, max_model_len, top_k] of any unsigned type -> [rows, layers, top_k]: the rows before the first one that
    is all fill.

    Raises:
        InvalidInput: field `routes`: not such an array, a row that only some layers have, or an id out of range.
    """
    if padded.ndim != 3 or padded.dtype.kind != "u":
        raise InvalidInput("routes", f"{padded.dtype} {list(padded.shape)} where FastDeploy has unsigned [L, M, K]")
    missing = (padded == fill_value(padded.dtype)).all(axis=2)
    rows = int(np.argmax(missing[0])) if missing.size and missing[0].any() else padded.shape[1]
    if missing[:, :rows].any() or not missing[:, rows:].all():
        raise InvalidInput("routes", f"the layers have not the same rows, or there are rows behind row {rows}")
    return _narrow(padded[:, :rows].transpose(1, 0, 2), num_experts)


def to_sglang(routes: Ids, layers: Sequence[int], num_hidden_layers: int) -> str:
    """[rows, layers, top_k] -> base64 of little-endian int32 [rows, num_hidden_layers, top_k]."""
    wide = to_all_layers(routes, layers, num_hidden_layers).astype("<i4")
    return base64.b64encode(wide.tobytes()).decode("ascii")


def from_sglang(
    text: str | bytes, layers: Sequence[int], top_k: int, num_experts: int, num_hidden_layers: int
) -> RouteArray:
    """The inverse of `to_sglang`; the text has no shape, so the model has to be known.

    Raises:
        InvalidInput: field `routes`: not base64, not whole rows, or an id out of range.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput("routes", "not base64") from None
    row = num_hidden_layers * top_k * 4
    if len(raw) % row:
        raise InvalidInput("routes", f"{len(raw)} bytes are not whole rows of {row} bytes")
    wide = np.frombuffer(raw, "<i4").reshape(-1, num_hidden_layers, top_k)
    return _narrow(wide[:, list(layers)], num_experts)


def to_slime(routes: Ids) -> npt.NDArray[np.int32]:
    """Rows of all tokens but the last [tokens - 1, layers, top_k] -> int32."""
    return np.ascontiguousarray(routes, dtype=np.int32)


def from_slime(routes: Ids, num_experts: int) -> RouteArray:
    """int32 [tokens - 1, layers, top_k] -> the smallest unsigned type.

    Raises:
        InvalidInput: field `routes`: another type or an id out of range.
    """
    if routes.dtype != np.int32:
        raise InvalidInput("routes", f"{routes.dtype} where slime and miles have int32")
    return _narrow(routes, num_experts)


def to_verl(routes: Ids, num_experts: int) -> npt.NDArray[np.int16]:
    """Rows of all tokens but the last [tokens - 1, layers, top_k] -> int16 [tokens, layers, top_k].

    Raises:
        InvalidInput: field `num_experts`, where int16 has not so many ids.
    """
    if num_experts - 1 > np.iinfo(np.int16).max:
        raise InvalidInput("num_experts", f"{num_experts} experts have ids beyond verl's int16")
    padded = np.zeros((len(routes) + 1, *routes.shape[1:]), np.int16)
    padded[:-1] = routes
    return padded


def from_verl(padded: Ids, num_experts: int) -> RouteArray:
    """int16 [tokens, layers, top_k] -> [tokens - 1, layers, top_k] of the smallest unsigned type.

    Raises:
        InvalidInput: field `routes`: another type, no row, a last row that is not zeros, or an id out of range.
    """
    if padded.dtype != np.int16 or not len(padded):
        raise InvalidInput("routes", f"{padded.dtype} {list(padded.shape)} where verl has int16 [tokens, L, K]")
    if padded[-1].any():
        raise InvalidInput("routes", "the last row is not zeros: verl's array ends with a row that was never forwarded")
    return _narrow(padded[:-1], num_experts)


def to_all_layers(routes: Ids, layers: Sequence[int], num_hidden_layers: int) -> Ids:
    """[rows, layers, top_k] -> [rows, num_hidden_layers, top_k] by global layer number, zeros where none routes.

    Raises:
        InvalidInput: field `num_hidden_layers`, where a layer lies beyond.
    """
    if layers and max(layers) >= num_hidden_layers:
        raise InvalidInput("num_hidden_layers", f"{num_hidden_layers}, but layer {max(layers)} routes")
    wide = np.zeros((len(routes), num_hidden_layers, routes.shape[2]), routes.dtype)
    wide[:, list(layers)] = routes
    return wide


def _narrow(routes: Ids, num_experts: int) -> RouteArray:
    if routes.size and not 0 <= int(routes.min()) <= int(routes.max()) < num_experts:
        raise InvalidInput("routes", f"ids from {routes.min()} to {routes.max()} where there are {num_experts} experts")
    narrow: RouteArray = np.ascontiguousarray(routes, dtype=wire_dtype(num_experts))
    return narrow
