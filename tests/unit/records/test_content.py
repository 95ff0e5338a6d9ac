"""How closely rows are looked at, by level."""

from __future__ import annotations

import numpy as np
import pytest

from moebus.schemas.errors import InvalidInput
from moebus.schemas.record import CheckLevel, check_content
from moebus.schemas.record.content import CONSTANT_ROWS, is_constant
from tests.support.routes import CARD, make_routes

GOOD = make_routes(CONSTANT_ROWS * 2)
ONE_ROW = np.repeat(make_routes(1), CONSTANT_ROWS, axis=0)
ZEROS = np.zeros((CONSTANT_ROWS, 3, 2), np.uint8)
ZEROS_OF_ONE = np.zeros((CONSTANT_ROWS, 3, 1), np.uint8)
HIGH = np.full((1, 3, 2), 16, np.uint8) + np.arange(2, dtype=np.uint8)


@pytest.mark.parametrize(
    ("rows", "refused"),
    [
        (GOOD, ()),
        (HIGH, ("ids", "full")),
        (ZEROS, ("ids", "full")),
        (ONE_ROW, ("full",)),
        (ZEROS_OF_ONE, ("full",)),
        (ONE_ROW[1:], ()),
        (GOOD[:0], ()),
    ],
    ids=["good", "high", "zeros", "one row", "zeros of top-1", "few rows", "no rows"],
)
@pytest.mark.parametrize("level", ["off", "ids", "full"])
def test_levels(rows: np.ndarray, refused: tuple[str, ...], level: CheckLevel) -> None:
    if level in refused:
        with pytest.raises(InvalidInput, match="routes"):
            check_content(rows, CARD.num_experts, level)
    else:
        check_content(rows, CARD.num_experts, level)


def test_one_row_that_differs_is_enough() -> None:
    for place in range(CONSTANT_ROWS):
        rows = ONE_ROW.copy()
        rows[place, 2] = rows[place, 2][::-1]
        assert not is_constant(rows)
