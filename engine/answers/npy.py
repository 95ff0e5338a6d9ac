"""Arrays of integers in numpy's `.npy` format (versions 1 to 3, as numpy documents it), read without numpy's loader:
the header is a text that anybody may have written."""

from __future__ import annotations

import re
import struct

import numpy as np
import numpy.typing as npt

from moebus.schemas.errors import InvalidInput

MAGIC = b"\x93NUMPY"
MAX_HEADER = 4096
"""Bytes. numpy writes 128 for three dimensions."""
_DIMENSIONS = 3
_MAX_SIZE = 2**31
_HEADER = re.compile(
    rb"\{\s*'descr'\s*:\s*'([<>|=])([iu][1248])'\s*,\s*'fortran_order'\s*:\s*(True|False)\s*,"
    rb"\s*'shape'\s*:\s*\(([0-9, ]{0,100})\)\s*,?\s*\}\s*"
)


def read_npy(raw: bytes, path: str) -> npt.NDArray[np.integer]:
    """The array [rows, layers, top_k], sharing the memory of `raw`; read-only.

    Raises:
        InvalidInput: field `path`: no such header, another type than integers, or not as many bytes as the shape says.
    """
    start, header = _header(raw, path)
    found = _HEADER.fullmatch(header)
    if found is None:
        raise InvalidInput(path, "a .npy header that does not describe an array of integers")
    order, kind, fortran, sizes = found.groups()
    dtype = np.dtype((order + kind).decode())
    shape = tuple(int(size) for size in sizes.split(b",") if size.strip())
    if len(shape) != _DIMENSIONS or max(shape) >= _MAX_SIZE:
        raise InvalidInput(path, f"a .npy array of shape {list(shape)} where [rows, layers, top_k] is needed")
    total = dtype.itemsize
    for size in shape:  # Python's integers: no product wraps around
        total *= size
    if total != len(raw) - start:
        raise InvalidInput(path, f"{len(raw) - start} bytes where {dtype} {list(shape)} has {total}")
    flat: npt.NDArray[np.integer] = np.frombuffer(raw, dtype, offset=start)
    return flat.reshape(shape, order="F" if fortran == b"True" else "C")


def _header(raw: bytes, path: str) -> tuple[int, bytes]:
    """Where the data begins, and the text before it."""
    wide = len(raw) > 6 and raw[6] > 1  # version 1 has two bytes of length, 2 and 3 have four
    begin = 12 if wide else 10
    if not raw.startswith(MAGIC) or len(raw) < begin or raw[6] not in (1, 2, 3):
        raise InvalidInput(path, "not a .npy array")
    size = struct.unpack_from("<I" if wide else "<H", raw, 8)[0]
    if size > MAX_HEADER or begin + size > len(raw):
        raise InvalidInput(path, f"a .npy header of {size} bytes in {len(raw)} bytes")
    return begin + size, raw[begin : begin + size]
