"""docs/control-requirements.md names every row once, and only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/control-requirements.md").read_text()
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)


def test_every_row_is_there() -> None:
    rows = re.findall(r"^\| (\w+) \|", PAGE, re.M)
    wanted = [f"R{n}" for n in range(1, 29)] + [f"F{n}" for n in range(1, 21)]
    assert [row for row in rows if row[0] in "RF" and row[1:].isdigit()] == wanted
    assert [int(row) for row in rows if row.isdigit()] == [1, 3, 4, 5, 7, 8, 9, 10, 11, 12, 14, 15]


def test_every_row_names_a_test_or_says_why_not() -> None:
    for line in re.findall(r"^\| [RF]\d+ .*$", PAGE, re.M):
        assert "::test_" in line or "does not apply: " in line, line


def test_every_test_that_is_named_exists() -> None:
    assert len(NAMED) > 80
    missing = [f"{file}::{name}" for file, name in NAMED if f"def {name}(" not in _text(ROOT / "tests" / file)]
    assert missing == []


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
