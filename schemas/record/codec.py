"""Packing rows of expert ids into a payload and back."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import zstandard

from moebus.schemas.dtypes import RouteArray, wire_dtype
from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.record.layout import decoded_size
from moebus.schemas.record.types import Chunk, CodecName

_LEVEL = 1

_SCRATCH_BYTES = 128 << 10
_SAMPLE_BYTES, _WORTH = 64 << 10, 0.97
"""So many bytes have to shrink to less than this share of them, or the rest is not tried."""
_local = threading.local()  # zstd contexts are dear to make and belong to one thread


def pack(rows: RouteArray, codec: CodecName) -> tuple[CodecName, bytes]:
    """Rows [n, layers, top_k], C order, little-endian. Falls back to `raw` where zstd saves nothing."""
    plain = np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<"))
    if codec == "zstd" and plain.nbytes:
        packed = _compress(plain)
        if packed is not None:
            return "zstd", packed
    return "raw", plain.tobytes()


def unpack(chunk: Chunk) -> RouteArray:
    """The rows of a chunk, [rows, layers, top_k] in the wire's type; read-only, it may share the payload's memory.

    Raises:
        BadRecord: reason `payload`; nothing larger than the header's size is ever allocated.
    """
    dtype = wire_dtype(chunk.num_experts).newbyteorder("<")
    size = decoded_size(chunk)
    if chunk.codec == "raw":
        if len(chunk.payload) != size:
            raise BadRecord("payload", f"{len(chunk.payload)} raw bytes where the header says {size}")
        flat = np.frombuffer(chunk.payload, dtype)
    else:
        flat = _join(_decompress(chunk.payload, size), dtype)
    return flat.reshape(chunk.rows, len(chunk.layers), chunk.top_k)


def check_ids(rows: RouteArray, num_experts: int) -> None:
    """Raises InvalidInput (field `routes`) where an id is not below `num_experts` or twice in one top-k."""
    if rows.size == 0:
        return
    if int(rows.max()) >= num_experts:
        raise InvalidInput("routes", f"expert id {int(rows.max())} where there are {num_experts} experts")
    if _has_twice(rows):
        raise InvalidInput("routes", "one expert twice in the top-k of a token")


def _has_twice(rows: RouteArray) -> bool:
    """Compares each position of the top-k with those up to half of it further on, round the corner too: every pair.

    In few calls over much: after each of them Python's lock has to be had again. Some thousand tokens at a time: memory
    that is used again is faster than new memory, which the kernel has to clear page by page.
    """
    top_k = rows.shape[-1]
    flat = rows.reshape(-1, top_k)
    if top_k > 16:  # the pairs below grow with the square
        ordered = np.sort(flat, axis=-1)
        return bool((ordered[:, 1:] == ordered[:, :-1]).any())
    if top_k == 1:
        return False
    apart = top_k // 2
    size = min(len(flat), max(1, _SCRATCH_BYTES // (top_k * rows.dtype.itemsize)))
    round_ = np.empty((top_k + apart, size), rows.dtype)
    equal = np.empty((apart, top_k, size), np.bool_)
    step, one = round_.strides
    shifted = np.lib.stride_tricks.as_strided(round_[1:], (apart, top_k, size), (step, step, one), writeable=False)
    for first in range(0, len(flat), size):
        part = flat[first : first + size]
        count = len(part)
        np.copyto(round_[:top_k, :count], part.T)
        np.copyto(round_[top_k:, :count], round_[:apart, :count])
        if np.equal(shifted[..., :count], round_[:top_k, :count], out=equal[..., :count]).any():
            return True
    return False


def _compress(plain: RouteArray) -> bytes | None:
    """None where it saves too little. Evenly chosen ids of 256 experts do not shrink at all."""
    if plain.nbytes > 2 * _SAMPLE_BYTES:
        sample = _planes(plain.reshape(-1)[: _SAMPLE_BYTES // plain.itemsize])
        if len(_compressor().compress(sample)) >= _WORTH * len(sample):
            return None
    packed: bytes = _compressor().compress(_planes(plain))
    return packed if len(packed) < plain.nbytes else None


def _planes(plain: RouteArray) -> bytes:
    """All low bytes first, then the next ones: ids fit zstd better so. Single bytes stay as they are."""
    width = plain.dtype.itemsize
    if width == 1:
        return plain.tobytes()
    planes: bytes = plain.reshape(-1).view(np.uint8).reshape(-1, width).T.tobytes()
    return planes


def _join(raw: bytes, dtype: np.dtype[np.unsignedinteger]) -> RouteArray:
    if dtype.itemsize == 1:
        return np.frombuffer(raw, dtype)
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1)
    joined: npt.NDArray[np.unsignedinteger] = np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
    return joined


def _decompress(payload: bytes, size: int) -> bytes:
    try:
        frame = zstandard.get_frame_parameters(payload)
        if frame.content_size != size:  # the library would allocate what the frame says
            raise BadRecord("payload", f"a zstd frame of {frame.content_size} bytes where the header says {size}")
        raw: bytes = _decompressor().decompress(payload, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadRecord("payload", f"zstd: {error}") from None
    if len(raw) != size:
        raise BadRecord("payload", f"{len(raw)} decoded bytes where the header says {size}")
    return raw


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=_LEVEL)
    found: zstandard.ZstdCompressor = _local.compressor
    return found


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _local.decompressor
    return found
