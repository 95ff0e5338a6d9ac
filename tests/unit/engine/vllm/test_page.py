"""The page of the adapter says what the adapter does."""

from __future__ import annotations

import re
from pathlib import Path

from moebus.engine.vllm import api
from moebus.engine.vllm.engine import CAPABILITIES
from tests.support.capability_table import declared

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/engines/vllm.md").read_text()


def test_the_table_of_capabilities() -> None:
    table = dict(re.findall(r"^\| ([a-z_ ]+) \| ([a-z_, ]+) \|$", PAGE.partition("Capabilities, as")[2], re.MULTILINE))
    del table["capability"]
    assert table == declared(CAPABILITIES)
    assert table["sleeps whole"] == "yes"
    assert "wakes whole" not in table


def test_every_call_is_on_the_page() -> None:
    sources = [file.read_text() for file in (ROOT / "engine/vllm").glob("*.py") if file.name != "routes.py"]
    calls = {call for source in sources for call in re.findall(r'"(/[a-z_0-9/]+)"', source)}
    assert len(calls) > 15
    assert {call for call in calls if call not in PAGE} == set()


def test_the_launch_line_has_every_flag() -> None:
    launch = PAGE.partition("```")[2].partition("```")[0]
    for flag in (api.DEV_MODE, api.SLEEP_MODE, api.TRANSFER):
        assert flag in launch


def test_the_example_is_short_and_compiles() -> None:
    example = PAGE.partition("```python\n")[2].partition("```")[0]
    compile(example, "example", "exec")
    assert len(example.splitlines()) < 30
