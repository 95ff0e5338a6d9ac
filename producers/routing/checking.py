"""The check that is too dear for the thread that submits: made where the rows are encoded, before anything is sent."""

from __future__ import annotations

import threading

from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import InvalidInput
from moebus.schemas.record import check_ids

SPLIT_BYTES = 1 << 20
"""From here on two threads look at one half each where that is asked for."""


def check_rows(rows: RouteArray, num_experts: int, hurry: bool) -> None:
    """As `check_ids`, whose errors it raises. `hurry`: nothing else is to do, and a trainer may wait for these rows."""
    if not hurry or rows.nbytes < SPLIT_BYTES or len(rows) < 2:
        check_ids(rows, num_experts)
        return
    half = len(rows) // 2
    wrong: list[InvalidInput | None] = []
    other = threading.Thread(target=lambda: wrong.append(_fault(rows[half:], num_experts)), daemon=True)
    other.start()
    mine = _fault(rows[:half], num_experts)
    other.join()
    fault = mine or wrong[0]  # an index error: the thread had no memory, and the rows were not looked at
    if fault is not None:
        raise fault


def _fault(rows: RouteArray, num_experts: int) -> InvalidInput | None:
    try:
        check_ids(rows, num_experts)
    except InvalidInput as exc:
        return exc
    return None
