"""Every test that `docs/routes-requirements.md` names is there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "routes-requirements.md").read_text()
NAMED = sorted(set(re.findall(r"`([a-z_/0-9]+)::([a-z_0-9]+)`", PAGE)))


@cache
def names_in(folder: str) -> frozenset[str]:
    found: set[str] = set()
    for path in (ROOT / "tests" / folder).glob("*.py"):
        found |= set(re.findall(r"^ *(?:async )?def (test_[a-z_0-9]+)\(", path.read_text(), re.MULTILINE))
    return frozenset(found)


@pytest.mark.parametrize(("folder", "name"), NAMED)
def test_it_exists(folder: str, name: str) -> None:
    assert name in names_in(folder)


def test_every_requirement_has_a_line() -> None:
    numbers = re.findall(r"^\| (F?[0-9]+) \|", PAGE, re.MULTILINE)
    assert numbers[:25] == [str(number) for number in range(1, 26)]
    assert numbers[25:41] == [f"F{number}" for number in range(1, 17)]
    assert len(NAMED) > 60
