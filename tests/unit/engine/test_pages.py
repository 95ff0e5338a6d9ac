"""The pages of SGLang and FastDeploy say what the adapters declare, and name every path that they call."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.capability_table import declared
from tests.support.stand_ins.fastdeploy import StandIn as FastDeploy
from tests.support.stand_ins.sglang import StandIn as SGLang
from tests.unit.engine.fastdeploy.rig import fastdeploy
from tests.unit.engine.sglang.rig import sglang

ROOT = Path(__file__).parents[3]


def page(kind: str) -> str:
    return (ROOT / "docs" / "engines" / f"{kind}.md").read_text()


def told(kind: str) -> dict[str, str]:
    """The table of capabilities."""
    table = page(kind).partition("Capabilities, as the adapter declares them:")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|", table, re.MULTILINE)
    return {name: value for name, value in rows if name not in ("capability", "---")}


def test_sglang(tmp_path: Path) -> None:
    with sglang(tmp_path, SGLang(cpu_backup=True)) as rig:
        assert told("sglang") == declared(rig.engine.capabilities())


def test_fastdeploy(tmp_path: Path) -> None:
    with fastdeploy(tmp_path, FastDeploy(strategy="ipc_snapshot")) as rig:
        assert told("fastdeploy") == declared(rig.engine.capabilities())


@pytest.mark.parametrize("kind", ["sglang", "fastdeploy"])
def test_every_path_is_on_the_page(kind: str) -> None:
    source = "".join(file.read_text() for file in (ROOT / "engine" / kind).glob("*.py") if file.name != "routes.py")
    paths = set(re.findall(r'"(/[a-z][a-z0-9_/-]+)"', source))
    assert len(paths) > 4
    missing = sorted(path for path in paths - {"/health"} if path not in page(kind))
    assert missing == []
