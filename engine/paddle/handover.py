"""What a prefill engine hands to a decode engine: keys and values, the first token, and the prompt's route rows.

The format is checked and holds no code: a fixed head, one JSON object, the arrays in C order and little-endian, and the
XXH3-128 of all of it. Sizes follow from the JSON's numbers and are held against a limit before anything is allocated.

    8 bytes   "MOEBUSKV"
    u16       version of the format, 1
    u16       0
    u32       bytes of the JSON object, at most 1 MiB
    u64       bytes of the arrays
    JSON      the fields of `Head`
    arrays    token ids i64 [P]; keys, then values f32 [layers, P, kv_heads, head_dim];
              routes u8 | u16 | u32 [P, moe_layers, top_k], if there are any
    16 bytes  XXH3-128 of everything before
"""

from __future__ import annotations

import os
import struct
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from moebus.engine.paddle.handover_head import HandoverRefused, Head
from moebus.schemas.dtypes import RouteArray

MAGIC = b"MOEBUSKV"
FORMAT = 1
MAX_HEAD = 1 << 20
MAX_BYTES = 4 << 30
"""Bytes of one handover that are read unless another limit is given."""

_FIXED = struct.Struct("<8sHHIQ")
_DIGEST_BYTES = 16
_PIECE = 4 << 20
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Handover:
    """`token_ids` int64 [P]: the prompt. `keys`, `values`: float32 [layers, P, kv_heads, head_dim], draft layers last.
    `routes`: uint8, uint16 or uint32 [P, moe_layers, top_k], None where capture was suspended."""

    head: Head
    token_ids: npt.NDArray[np.int64]
    keys: Floats
    values: Floats
    routes: RouteArray | None

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self._arrays())

    def _arrays(self) -> list[npt.NDArray[Any]]:
        return [self.token_ids, self.keys, self.values, *([] if self.routes is None else [self.routes])]

    def write_to(self, stream: BinaryIO) -> None:
        """Writes one handover to a file or a socket's file; does not close it."""
        head = self.head.to_json()
        start = _FIXED.pack(MAGIC, FORMAT, 0, len(head), self.nbytes) + head
        digest = xxhash.xxh3_128(start)
        _send(stream, start)
        for array in self._arrays():
            data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
            digest.update(data)
            _send(stream, data)
        _send(stream, digest.digest())
        stream.flush()

    @classmethod
    def read_from(cls, stream: BinaryIO, max_bytes: int = MAX_BYTES) -> Handover:
        """Reads one handover, and not a byte more.

        Raises:
            HandoverRefused: cut, damaged, larger than `max_bytes`, or not a handover.
        """
        fixed = _exactly(stream, _FIXED.size)
        magic, version, _, head_bytes, body_bytes = _FIXED.unpack(fixed)
        if magic != MAGIC:
            raise HandoverRefused("handover: this is none (it begins with other bytes)")
        if version != FORMAT:
            raise HandoverRefused(f"handover: format {version} is not known here, {FORMAT} is; use the same release")
        if head_bytes > MAX_HEAD or body_bytes > max_bytes:
            raise HandoverRefused(f"handover: {head_bytes} + {body_bytes} bytes are more than {max_bytes} allow")
        raw = _exactly(stream, head_bytes)
        digest = xxhash.xxh3_128(fixed + raw)
        head = Head.from_json(raw)
        layout = head.layout()
        if sum(_bytes(*one) for one in layout) != body_bytes:
            raise HandoverRefused(f"handover: {head.request_id!r} has {body_bytes} bytes of arrays, not what it says")
        arrays: list[npt.NDArray[Any]] = []
        for shape, dtype in layout:
            data = _exactly(stream, _bytes(shape, dtype))
            digest.update(data)
            arrays.append(np.frombuffer(data, dtype=dtype).reshape(shape))
        if _exactly(stream, _DIGEST_BYTES) != digest.digest():
            raise HandoverRefused(f"handover: {head.request_id!r} is damaged (its checksum differs); send it again")
        made = cls(head, arrays[0], arrays[1], arrays[2], arrays[3] if head.routes else None)
        made.check()
        return made

    def check(self) -> None:
        """Raises HandoverRefused where an array is not what the head says: shapes, types, tokens and ids in range."""
        head, config, name = self.head, self.head.config, self.head.request_id
        if [(array.shape, array.dtype) for array in self._arrays()] != head.layout():
            raise HandoverRefused(f"handover: the arrays of {name!r} do not have the shapes and types of its model")
        if head.versions[-1][0] >= head.prompt_tokens or head.cached_tokens >= head.prompt_tokens:
            raise HandoverRefused(f"handover: {name!r} speaks of rows behind the end of its prompt")
        sampled = self.token_ids if head.first is None else np.append(self.token_ids, head.first[0])
        if sampled.min() < 0 or sampled.max() >= config.vocab_size:
            raise HandoverRefused(f"handover: a token of {name!r} is outside 0..{config.vocab_size - 1}")
        if self.routes is not None and self.routes.max() >= config.num_experts:
            raise HandoverRefused(f"handover: an expert of {name!r} is outside 0..{config.num_experts - 1}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file: beside the target first, then renamed, so that no reader sees half of it."""
        target = Path(path)
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            with draft.open("xb") as stream:
                self.write_to(stream)
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> Handover:
        """Reads a file that `save` wrote.

        Raises:
            HandoverRefused: as `read_from`; also something behind its end.
        """
        with Path(path).open("rb") as stream:
            found = cls.read_from(stream, max_bytes)
            if stream.read(1):
                raise HandoverRefused("handover: the file goes on behind its end")
            return found


def _bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape, dtype=object)) * dtype.itemsize


def _send(stream: BinaryIO, data: bytes | memoryview) -> None:
    """All of it, also to a stream without a buffer, which may take less than it is given."""
    left = memoryview(data)
    while left:
        taken = stream.write(left)
        if not taken:
            raise BlockingIOError("handover: the stream takes nothing; give one that blocks")
        left = left[taken:]


def _exactly(stream: BinaryIO, count: int) -> bytes:
    """`count` bytes, piece by piece: what was only promised takes no memory."""
    pieces: list[bytes] = []
    left = count
    while left:
        piece = stream.read(min(left, _PIECE))
        if not piece:
            raise HandoverRefused(f"handover: cut off, {left} bytes before the end of a part of {count}; send it again")
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
