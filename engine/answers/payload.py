"""The field with the routes, in every form that servers send it, as one array of integers [rows, layers, top_k].

text      base64 of a `.npy` file (vLLM), or of bare integers (SGLang: int32; FastDeploy: no type is sent either)
object    {data, shape, dtype, start} (Dynamo and others); `data` is base64
array     nested lists

What the model card and the number of tokens allow is known before anything is decoded; longer texts are refused unread.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import numpy.typing as npt

from moebus.engine.answers import fields
from moebus.engine.answers.npy import MAGIC, MAX_HEADER, read_npy
from moebus.schemas.base import echo, json_type
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import MAX_LAYERS, ModelCard

Integers = npt.NDArray[np.integer]
Layers = Literal["all", "moe"]
"""Which layers a server counts: all of the model, or those that route."""
_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in
           ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")}  # fmt: skip
_UNNAMED = {1: "uint8", 2: "uint16", 4: "int32", 8: "int64"}
"""By bytes an id: what an object without `dtype` holds (prime-rl sends uint8 so)."""
_WIDEST = 8


class Pieces(list[object]):
    """Routes that came in pieces (`AnswerStream`), each an object that says where it starts."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What an array may be. `rows`: one of these. `layers`: None = both are possible, the size has to tell."""

    card: ModelCard
    rows: tuple[int, ...]
    layers: Layers | None = None

    def has_layers(self, number: int) -> bool:
        """Whether a server can have counted so many layers."""
        moe = len(self.card.moe_layers)
        if number == moe and self.layers != "all":
            return True
        depth = self.card.num_hidden_layers
        whole = number == depth if depth is not None else self.card.moe_layers[-1] < number <= MAX_LAYERS
        return whole and self.layers != "moe"

    @property
    def max_bytes(self) -> int:
        return (
            max(self.rows) * (self.card.num_hidden_layers or MAX_LAYERS) * self.card.top_k * _WIDEST + MAX_HEADER + 12
        )

    @property
    def words(self) -> str:
        """For messages."""
        depth = self.card.num_hidden_layers
        layers = f"{len(self.card.moe_layers)} MoE layers" + (f" or all {depth}" if depth else "")
        return f"{' or '.join(map(str, self.rows))} rows, {layers}, top-{self.card.top_k}"


def dtype_of(name: object, path: str) -> np.dtype[np.integer]:
    """A type by the name servers give it. Raises InvalidInput (field `path`)."""
    found = _DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise InvalidInput(path, f"{echo(name)} is unknown; known are {', '.join(_DTYPES)}")
    return found


def start_of(value: object, path: str) -> int | None:
    """The first row that an object says it holds; None where it says nothing."""
    first = value[0] if isinstance(value, Pieces) else value
    return fields.count(first, "start", path) if isinstance(first, Mapping) else None


def read_array(value: object, path: str, allowed: Allowed, bare: Sequence[np.dtype[np.integer]]) -> Integers:
    """The array of `value`. `bare`: types that a text without a header may have; none = such a text is refused.

    Raises:
        InvalidInput: field `path` or a field in it.
    """
    if isinstance(value, str):
        raw = _base64(value, path, allowed)
        if raw.startswith(MAGIC):
            found = read_npy(raw, path)
        elif bare:
            return _bare(raw, path, allowed, bare)
        else:
            raise InvalidInput(path, "base64 of something else than a .npy array")
    elif isinstance(value, Pieces):
        found = _pieces(value, path, allowed)
    elif isinstance(value, Mapping):
        found = _object(value, path, allowed)
    elif isinstance(value, (list, tuple)):
        found = _nested(value, path, allowed)
    else:
        raise InvalidInput(path, f"routes as text, object or array are needed, not {json_type(value)}")
    rows, layers, top_k = found.shape
    if rows not in allowed.rows or top_k != allowed.card.top_k or not (allowed.has_layers(layers) or not rows):
        raise InvalidInput(path, f"shape {list(found.shape)} where there are {allowed.words}")
    return found


def _base64(value: str, path: str, allowed: Allowed) -> bytes:
    longest = 4 * -(-allowed.max_bytes // 3)
    if len(value) > longest:
        raise InvalidInput(path, f"{len(value)} characters, but {allowed.words} have at most {longest}")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput(path, "not base64") from None


def _bare(raw: bytes, path: str, allowed: Allowed, dtypes: Sequence[np.dtype[np.integer]]) -> Integers:
    """The one shape and type that give so many bytes."""
    top_k = allowed.card.top_k
    if not raw and 0 in allowed.rows:
        return np.empty((0, len(allowed.card.moe_layers), top_k), dtypes[0])
    fitting = []
    for dtype, rows in product(dtypes, allowed.rows):
        layers, rest = divmod(len(raw), max(rows, 1) * top_k * dtype.itemsize)
        if rows and not rest and allowed.has_layers(layers):
            fitting.append((dtype, (rows, layers, top_k)))
    if len(fitting) != 1:
        shapes = "; ".join(f"{dtype} {list(shape)}" for dtype, shape in fitting)
        why = f"can be {shapes}: say `layers`" if fitting else f"do not fit {allowed.words}"
        raise InvalidInput(path, f"{len(raw)} bytes without a shape {why}")
    dtype, shape = fitting[0]
    return np.frombuffer(raw, dtype).reshape(shape)


def _object(value: Mapping[str, object], path: str, allowed: Allowed) -> Integers:
    data = fields.text(value, "data", path)
    if data is None:
        raise InvalidInput(fields.join(path, "data"), "missing")
    if value.get("encoding", "base64") != "base64":
        raise InvalidInput(fields.join(path, "encoding"), f"{echo(value['encoding'])} is unknown; known is base64")
    sizes = fields.items(value.get("shape"), fields.join(path, "shape"))
    shape = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**31]
    if len(sizes) != 3 or len(shape) != 3:
        raise InvalidInput(fields.join(path, "shape"), "three sizes [rows, layers, top_k] are needed")
    raw = _base64(data, fields.join(path, "data"), allowed)
    number = shape[0] * shape[1] * shape[2]
    if value.get("dtype") is not None:
        dtype = dtype_of(value["dtype"], fields.join(path, "dtype"))
    else:
        dtype = _DTYPES[_UNNAMED.get(len(raw) // max(number, 1), "uint8")]
    if len(raw) != number * dtype.itemsize:
        raise InvalidInput(
            fields.join(path, "data"), f"{len(raw)} bytes where {dtype} {shape} has {number * dtype.itemsize}"
        )
    return np.frombuffer(raw, dtype).reshape(shape)


def _pieces(value: Pieces, path: str, allowed: Allowed) -> Integers:
    arrays: list[Integers] = []
    row: int | None = None
    for piece in value:
        one = fields.mapping(piece, path)
        start = fields.count(one, "start", path)
        if start is None or (row is not None and start != row):
            raise InvalidInput(fields.join(path, "start"), f"{start}, but the rows before end at {row}")
        arrays.append(_object(one, path, allowed))
        row = start + len(arrays[-1])
        if len({array.shape[1:] for array in arrays}) > 1:
            raise InvalidInput(path, "pieces of different shapes")
        if row - (start_of(value, path) or 0) > max(allowed.rows):
            raise InvalidInput(path, f"more rows than the {max(allowed.rows)} there are")
    return np.concatenate(arrays)


def _nested(value: Sequence[object], path: str, allowed: Allowed) -> Integers:
    if not value:
        return np.empty((0, len(allowed.card.moe_layers), allowed.card.top_k), np.uint8)
    if len(value) not in allowed.rows:
        raise InvalidInput(path, f"{len(value)} rows where there are {allowed.words}")
    layers = fields.items(value[0], fields.at(path, 0))
    if not allowed.has_layers(len(layers)):
        raise InvalidInput(fields.at(path, 0), f"{len(layers)} layers where there are {allowed.words}")
    try:
        found = np.array(value)
    except (ValueError, OverflowError):
        raise InvalidInput(path, "rows of different shapes") from None
    if found.ndim != 3 or found.dtype.kind not in "iu":
        raise InvalidInput(path, f"{found.dtype} {list(found.shape)} where integers [rows, layers, top_k] are needed")
    return found
