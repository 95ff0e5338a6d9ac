"""Engines before stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deadlines import Left
from tests.support.stand_ins.fastdeploy import StandIn
from tests.unit.engine.fastdeploy.rig import Rig, fastdeploy


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Weights by snapshot: they sleep and wake."""
    with fastdeploy(tmp_path, StandIn(strategy="ipc_snapshot")) as made:
        yield made


@pytest.fixture
def rsync(tmp_path: Path) -> Iterator[Rig]:
    """Paused; weights by version."""
    with fastdeploy(tmp_path) as made:
        made.engine.pause("abort", Left())
        yield made
