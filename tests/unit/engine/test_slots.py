"""Position -> slot, and rows, by the shared cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebus.engine.paddle.slots import sequence_slots, slots_of, step_positions
from moebus.engine.prompts import route_rows

CASES: dict[str, Any] = json.loads((Path(__file__).parents[2] / "cases" / "slots.json").read_text())


@pytest.mark.parametrize("case", CASES["mapping"])
def test_mapping(case: dict[str, Any]) -> None:
    tables = [list(range(row * 100, row * 100 + 100)) for row in range(len(case["now"]))]
    rows, positions = step_positions(case["history"], case["now"])
    assert positions.tolist() == case["positions"]
    assert slots_of(tables, rows, positions, case["block_size"]).tolist() == case["slots"]


@pytest.mark.parametrize("case", CASES["gather"])
def test_gather(case: dict[str, Any]) -> None:
    assert sequence_slots(case["block_table"], case["tokens"], case["block_size"]).tolist() == case["slots"]


@pytest.mark.parametrize("case", CASES["rows"])
def test_rows(case: dict[str, Any]) -> None:
    assert route_rows(case["prompt"], case["output"]) == case["rows"]


def test_rows_without_a_sampled_token() -> None:
    assert route_rows(9, 0) == 9
    assert route_rows(9, 0, prefilled=False) == 0


def test_an_empty_step() -> None:
    rows, positions = step_positions([3, 4], [0, 0])
    assert rows.tolist() == positions.tolist() == []
    assert slots_of([[0], [1]], rows, positions, 8).tolist() == []


def test_gathering_nothing() -> None:
    assert sequence_slots([5, 6], 0, 8).dtype == np.int64
    assert sequence_slots([], 0, 8).tolist() == []
