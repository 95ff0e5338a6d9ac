"""Which unsigned integer type holds expert ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moebus.schemas.errors import InvalidInput

RouteArray = npt.NDArray[np.unsignedinteger]
"""Expert ids [rows, moe_layers, top_k], uint8, uint16 or uint32; the order of the top-k is the engine's."""

_SIZES: tuple[tuple[int, str], ...] = ((2**8, "uint8"), (2**16, "uint16"), (2**32, "uint32"))


def wire_dtype(num_experts: int) -> np.dtype[np.unsignedinteger]:
    """The smallest type that holds the ids 0 .. num_experts - 1; no value is reserved as fill.

    Raises:
        InvalidInput: field `num_experts`; below 1 or above 2^32.
    """
    return _smallest(num_experts, _count(num_experts))


def fastdeploy_dtype(num_experts: int) -> np.dtype[np.unsignedinteger]:
    """FastDeploy's type for `num_experts` (routed and shared ones together): it reserves all ones as fill.

    Raises:
        InvalidInput: field `num_experts`; below 1 or above 2^32 - 2.
    """
    return _smallest(num_experts, _count(num_experts) + 2)


def fill_value(dtype: npt.DTypeLike) -> int:
    """All ones of an unsigned type: FastDeploy's mark of a row that is not there."""
    return int(np.iinfo(np.dtype(dtype)).max)


def _count(num_experts: int) -> int:
    if not isinstance(num_experts, int) or isinstance(num_experts, bool) or num_experts < 1:
        raise InvalidInput("num_experts", f"{num_experts!r} is not an integer of at least 1")
    return num_experts


def _smallest(num_experts: int, values: int) -> np.dtype[np.unsignedinteger]:
    for capacity, name in _SIZES:
        if values <= capacity:
            return np.dtype(name)
    raise InvalidInput("num_experts", f"{num_experts} is more than 32 bits can number")
