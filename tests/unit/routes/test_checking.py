"""The publisher's check of large arrays, in two halves: nothing between them is missed."""

from __future__ import annotations

import numpy as np
import pytest

from moebus.producers.routing.checking import SPLIT_BYTES, check_rows
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import InvalidInput


def large() -> RouteArray:
    rows = SPLIT_BYTES // (20 * 8) + 3
    first = np.random.default_rng(0).integers(0, 200, (rows, 20, 1))
    return ((first + np.arange(8) * 7) % 200).astype(np.uint8)


def test_good_rows_pass() -> None:
    for hurry in (False, True):
        check_rows(large(), 200, hurry)
        check_rows(large()[:1], 200, hurry)
        check_rows(large()[:0], 200, hurry)


@pytest.mark.parametrize("hurry", [False, True])
@pytest.mark.parametrize("place", ["first", "before the middle", "middle", "last"])
def test_one_fault_is_found_wherever_it_is(place: str, hurry: bool) -> None:
    rows = large()
    row = {"first": 0, "before the middle": len(rows) // 2 - 1, "middle": len(rows) // 2, "last": len(rows) - 1}[place]
    twice, high = rows.copy(), rows.copy()
    twice[row, 19, 7] = twice[row, 19, 0]
    with pytest.raises(InvalidInput, match="twice"):
        check_rows(twice, 200, hurry)
    high[row, 0, 0] = 200
    with pytest.raises(InvalidInput, match="expert id 200"):
        check_rows(high, 200, hurry)
