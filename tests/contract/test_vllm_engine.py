"""The vLLM adapter keeps the rules of the port that hold for a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.contract.engine_server import ServerMemory, ServerRig, ServerRules
from tests.support.deadlines import Left
from tests.support.vllm import Rig, rigs


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServerRig]:
    with rigs(tmp_path) as new:
        yield server_rig(new(**request.instance.bugs))


class TestVllm(ServerRules):
    """A recent one."""

    bugs: ClassVar = {"partial_wake_serves": False}


class TestOldVllm(ServerMemory):
    """It serves after a partial wake, has no labels of weights and no start time."""

    bugs: ClassVar = {"no_labels": True, "several_api_servers": True}


def server_rig(rig: Rig) -> ServerRig:
    faults = rig.server.faults
    return ServerRig(
        rig.engine,
        rig.root,
        new=rig.connect,
        start=lambda: rig.engine.pause("abort", Left()),
        hold=lambda: faults.hold.add("/pause"),
        release=faults.release,
        kill=rig.server.kill,
        boot=rig.server.boot,
        checkpoint=rig.checkpoint,
    )
