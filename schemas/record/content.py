"""How closely rows of expert ids are looked at, besides their checksum."""

from __future__ import annotations

from typing import Literal

from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import InvalidInput
from moebus.schemas.record.codec import check_ids

CheckLevel = Literal["off", "ids", "full"]
"""off: checksums, structure and counts alone, which are always looked at. ids: also each id below the number of experts
and none twice in a top-k (so rows of zeros are found where top-k is above 1), and the layers against the model card
that the END names. full: also chunks in which every row is the same."""
_CLOSENESS: tuple[CheckLevel, ...] = ("off", "ids", "full")
CONSTANT_ROWS = 64
"""So many rows that are all alike in every layer are no routes; fewer may be, of a token that repeats itself."""


def check_content(rows: RouteArray, num_experts: int, level: CheckLevel) -> None:
    """Rows [n, layers, top_k].

    Raises:
        InvalidInput: field `routes`.
    """
    if level == "off":
        return
    check_ids(rows, num_experts)
    if level == "full" and is_constant(rows):
        raise InvalidInput("routes", f"all {len(rows)} rows are the same: they were not captured")


def weaker(one: CheckLevel, other: CheckLevel) -> CheckLevel:
    """What can be said of rows some of which were looked at as `one`, the others as `other`."""
    return min(one, other, key=_CLOSENESS.index)


def is_constant(rows: RouteArray) -> bool:
    """Whether these are `CONSTANT_ROWS` or more rows, all alike. Nearly always two rows are enough to say no."""
    if len(rows) < CONSTANT_ROWS or (rows[0] != rows[-1]).any() or (rows[0] != rows[len(rows) // 2]).any():
        return False
    return bool((rows == rows[0]).all())
