"""The page of the adapter says what the adapter does."""

from __future__ import annotations

import re
from pathlib import Path

from moebus.engine.vllm import api
from moebus.engine.vllm.engine import CAPABILITIES
from moebus.schemas.tags import Tag

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/engines/vllm.md").read_text()


def words(values: object) -> str:
    return ", ".join(sorted(map(str, values)))  # type: ignore[call-overload]


def test_the_table_of_capabilities() -> None:
    table = dict(re.findall(r"^\| ([a-z_ ]+) \| ([a-z_, ]+) \|$", PAGE.partition("Capabilities, as")[2], re.MULTILINE))
    del table["capability"]
    can = CAPABILITIES
    assert table == {
        "pause modes": words(can.pause_modes),
        "levels of weight": words(can.levels[Tag.WEIGHT]),
        "levels of kv_cache": words(can.levels[Tag.KV_CACHE]),
        "tags": words(can.tags),
        "stage": can.stage,
        "cache modes": words(can.cache_modes),
        "transfer": "yes" if can.transfer else "no",
        "abort": "yes" if can.abort else "no",
        "sleeps whole": "yes" if can.sleeps_whole else "no",
    }
    assert not can.wakes_whole


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
