"""The vLLM adapter keeps the rules of the port that hold for a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.engine_server import ServerRig, ServerRules
from tests.support.deadlines import Left
from tests.support.vllm import Rig, rigs


class _Vllm(ServerRules):
    bugs: dict[str, bool] = {}  # noqa: RUF012

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[ServerRig]:
        with rigs(tmp_path) as new:
            yield server_rig(new(**self.bugs))


class TestVllm(_Vllm):
    """A recent one."""

    bugs = {"partial_wake_serves": False}  # noqa: RUF012


class TestOldVllm(_Vllm):
    """It serves after a partial wake, has no labels of weights and no start time."""

    bugs = {"no_labels": True, "several_api_servers": True}  # noqa: RUF012


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
