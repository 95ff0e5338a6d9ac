"""An array of routes -> the records of one attempt, and back. Pure functions; the producer and the tests share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moebus.schemas.dtypes import RouteArray, wire_dtype
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record.checksum import stored_checksum, whole_checksum
from moebus.schemas.record.codec import check_ids, pack, unpack
from moebus.schemas.record.encode import encode
from moebus.schemas.record.layout import TARGET_CHUNK_BYTES, check_header, check_versions
from moebus.schemas.record.types import Chunk, CodecName, End, Header, Status, Versions


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, for its END: see `End`."""

    status: Status = "complete"
    finish_reason: str = ""
    token_hash: str | None = None
    prompt_rows: int | None = None
    prompt_hash: str | None = None


def check_routes(routes: npt.NDArray[np.integer], card: ModelCard) -> RouteArray:
    """Routes [rows, moe_layers, top_k] in the card's wire type (no copy where they have it already).

    Raises:
        InvalidInput: field `routes`; wrong shape, not integers, an id out of range, or one twice in a top-k.
    """
    if routes.ndim != 3 or routes.shape[1:] != card.shape(0)[1:]:
        want = f"[rows, {len(card.moe_layers)}, {card.top_k}]"
        raise InvalidInput("routes", f"shape {list(routes.shape)} where the model card says {want}")
    if routes.dtype.kind not in "iu":
        raise InvalidInput("routes", f"integers are needed, not {routes.dtype}")
    if routes.dtype.kind == "i" and routes.size and int(routes.min()) < 0:
        raise InvalidInput("routes", f"expert id {int(routes.min())}; leave out rows that were not recorded")
    if routes.size and int(routes.max()) >= card.num_experts:  # before the cast, which would wrap
        raise InvalidInput("routes", f"expert id {int(routes.max())} where there are {card.num_experts} experts")
    typed = routes.astype(card.dtype, copy=False)
    check_ids(typed, card.num_experts)
    return typed


def chunk_rows(
    routes: RouteArray,
    header: Header,
    card: ModelCard,
    *,
    versions: Versions = (),
    codec: CodecName = "zstd",
    target: int = TARGET_CHUNK_BYTES,
    check: bool = False,
) -> Iterator[Chunk]:
    """Splits the attempt's own rows into chunks of equal size, each at most `target` bytes unpacked.

    `routes`: as `check_routes` gave them, row 0 being row `header.own_start` of the rollout. `versions`: absolute rows,
    the first one at or below the own start. `check`: look at the ids of each chunk, just before it is made. The same
    arguments always give the same chunks.

    Raises:
        InvalidInput: field `routes` where one row alone is above `target`, or as `check_ids`; or as `check_versions`.
    """
    check_header(header)
    row_bytes = len(card.moe_layers) * card.top_k * wire_dtype(card.num_experts).itemsize
    if row_bytes > target:
        raise InvalidInput("routes", f"one row has {row_bytes} bytes; at most {target} fit a record")
    total, own = len(routes), header.own_start
    count = -(-total // (target // row_bytes))
    check_versions(_within(versions, own, total), own, total) if total else None
    for index in range(count):
        first, last = total * index // count, total * (index + 1) // count
        if check:
            check_ids(routes[first:last], card.num_experts)
        used, payload = pack(routes[first:last], codec)
        yield Chunk(
            header, index, own + first, last - first, card.moe_layers, card.top_k, card.num_experts, used, payload,
            _within(versions, own + first, last - first),
        )  # fmt: skip


def _within(versions: Versions, start: int, rows: int) -> Versions:
    """The ranges that touch rows [start, start + rows), the first one cut to `start`."""
    before = [entry for entry in versions if entry[0] <= start]
    inside = [entry for entry in versions if start < entry[0] < start + rows]
    return (*((start, version) for _, version in before[-1:]), *inside)


def encode_attempt(
    routes: RouteArray,
    header: Header,
    card: ModelCard,
    outcome: Outcome,
    *,
    versions: Versions = (),
    codec: CodecName = "zstd",
    target: int = TARGET_CHUNK_BYTES,
    check: bool = False,
) -> Iterator[bytes]:
    """The records of one attempt in order, encoded: its chunks, then its END. Arguments as `chunk_rows`."""
    checksums = []
    for chunk in chunk_rows(routes, header, card, versions=versions, codec=codec, target=target, check=check):
        data = encode(chunk)
        checksums.append(stored_checksum(data))
        yield data
    yield encode(
        End(
            header, header.own_start + len(routes), len(checksums), whole_checksum(checksums), outcome.status,
            outcome.finish_reason, card.digest, outcome.token_hash, outcome.prompt_rows, outcome.prompt_hash,
        )
    )  # fmt: skip


def assemble(end: End, chunks: Sequence[Chunk], checksums: Sequence[int]) -> RouteArray:
    """The attempt's own rows [rows - own_start, layers, top_k] from its chunks 0 .. n-1 in order.

    `checksums`: the record checksums of the chunks. No chunks: an array of shape [0, 0, 0].

    Raises:
        InvalidInput: naming what does not fit: count, index, rows, layers or the whole checksum.
    """
    if len(chunks) != end.chunks or [chunk.index for chunk in chunks] != list(range(end.chunks)):
        raise InvalidInput("chunks", f"{len(chunks)} of {end.chunks} chunks, or not in order")
    if whole_checksum(checksums) != end.checksum:
        raise InvalidInput("checksum", "the chunks are not those that the END names")
    row = end.header.own_start
    for chunk in chunks:
        if chunk.start != row or chunk.header != end.header or _shape(chunk) != _shape(chunks[0]):
            raise InvalidInput("chunks", f"chunk {chunk.index} does not go on where the one before ended")
        row += chunk.rows
    if row != end.rows:
        raise InvalidInput("rows", f"the chunks end at row {row}, the END says {end.rows}")
    if not chunks:
        return np.empty((0, 0, 0), np.uint8)
    return np.concatenate([unpack(chunk) for chunk in chunks])


def _shape(chunk: Chunk) -> tuple[tuple[int, ...], int, int]:
    return chunk.layers, chunk.top_k, chunk.num_experts


def merge_versions(parts: Sequence[Versions]) -> Versions:
    """One list of ranges from those of consecutive chunks; a range that goes on is not repeated."""
    merged: list[tuple[int, str]] = []
    for row, version in (entry for part in parts for entry in part):
        if not merged or merged[-1][1] != version:
            merged.append((row, version))
    return tuple(merged)
