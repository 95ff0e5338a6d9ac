"""A file that `paddle.load` reads as a NumPy array, without Paddle.

`paddle.save` of an array is a pickle of it. The few bytes around the data are written here by hand: nothing is pickled
and nothing is ever unpickled. `numpy.core.multiarray._reconstruct` is the name that NumPy 1 and 2 both know.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from moebus.schemas.dtypes import RouteArray

_HEAD = b"\x80\x03cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01("
_TYPE = (
    b"tcnumpy\ndtype\nX\x02\x00\x00\x00%b\x89\x88\x87R"
    b"(K\x03X\x01\x00\x00\x00%bNNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
)
_MAX = 2**31 - 1


def pdtensor(array: RouteArray) -> Iterator[bytes | memoryview]:
    """The pieces of the file: before, the data, after. `array`: unsigned, C order, little-endian, below 2 GiB.

    Raises:
        ValueError: another array.
    """
    dtype = array.dtype
    if dtype.kind != "u" or dtype.itemsize > 4 or not array.flags.c_contiguous or array.nbytes > _MAX:
        raise ValueError(f"{dtype} {array.shape} is no contiguous array of unsigned integers below 2 GiB")
    if dtype.newbyteorder("<") != dtype:
        raise ValueError("big-endian")
    shape = b"".join(b"J" + struct.pack("<i", length) for length in array.shape)
    order = b"|" if dtype.itemsize == 1 else b"<"
    yield _HEAD + shape + _TYPE % (f"u{dtype.itemsize}".encode(), order) + b"\x89B" + struct.pack("<I", array.nbytes)
    yield array.tobytes()
    yield b"tb."
