"""What a worker knows of a server, over its own restart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moebus.engine.http import Belief
from moebus.engine.http.notes import Notes, default_home
from moebus.schemas.tags import Tag

URL = "http://10.0.0.1:30000"
FULL = replace(
    Belief(life="l", sure=False, weights="mixed", version="v", source="/s", frozen=3, paused=True, open_update=True)
    .with_tag(Tag.KV_CACHE, False)
    .with_tag(Tag.WEIGHT, False),
    level="discard",
)


@pytest.mark.parametrize("belief", [Belief(), FULL])
def test_there_and_back(tmp_path: Path, belief: Belief) -> None:
    Notes(tmp_path, URL).write(belief)
    assert Notes(tmp_path, URL).read() == belief
    assert [file.name for file in (tmp_path / "engines").iterdir()] == ["10.0.0.1_30000.json"]


def test_each_server_has_its_own(tmp_path: Path) -> None:
    Notes(tmp_path, URL).write(Belief(life="a"))
    assert Notes(tmp_path, "http://10.0.0.1:30001").read() is None
    assert Notes(tmp_path, f"{URL}/proxy/../../x").path is not None
    assert Notes(tmp_path, f"{URL}/proxy/../../x").path.parent == tmp_path / "engines"  # type: ignore[union-attr]


def test_without_a_home_nothing_is_kept() -> None:
    notes = Notes(None, URL)
    notes.write(Belief())
    assert notes.read() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("life", None),
        ("sure", 1),
        ("level", "half"),
        ("weights", "golden"),
        ("version", 3),
        ("frozen", "3"),
        ("paused", "yes"),
        ("resident", {}),
        ("resident", {"weight": True}),
        ("resident", {"weight": True, "kv_cache": "no"}),
        ("resident", {"weight": True, "kv_cache": True, "graph": True}),
        ("resident", None),
    ],
)
def test_a_bad_field_spoils_all_of_it(tmp_path: Path, name: str, value: object) -> None:
    notes = Notes(tmp_path, URL)
    notes.write(FULL)
    assert notes.path is not None
    found: dict[str, Any] = json.loads(notes.path.read_text())
    notes.path.write_text(json.dumps({**found, name: value}))
    assert notes.read() is None
    del found[name]
    notes.path.write_text(json.dumps(found))
    assert notes.read() is None


def test_the_default_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEBUS_HOME", "/h")
    assert default_home() == Path("/h")
    monkeypatch.delenv("MOEBUS_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", "/s")
    assert default_home() == Path("/s/moebus")
