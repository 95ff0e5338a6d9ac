"""Every test that `docs/routes-requirements.md` names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "routes-requirements.md").read_text()
NAMED = sorted(set(re.findall(r"`([a-z_/0-9]+\.py)::([a-z_0-9]+)`", PAGE)))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_it_exists(path: str, name: str) -> None:
    assert re.search(rf"^ *(async )?def {name}\(", (ROOT / "tests" / path).read_text(), re.MULTILINE)


def test_every_requirement_has_a_line() -> None:
    numbers = re.findall(r"^\| (F?[0-9]+) \|", PAGE, re.MULTILINE)
    assert numbers[:25] == [str(number) for number in range(1, 26)]
    assert numbers[25:41] == [f"F{number}" for number in range(1, 17)]
