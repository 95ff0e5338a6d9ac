"""The SGLang adapter keeps the rules of the port that hold for a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moebus.engine.http import EngineServer
from moebus.engine.http.notes import Notes
from moebus.engine.sglang.engine import KeepMode, SGLangEngine
from tests.contract.engine_server import ServerRig, ServerRules
from tests.support.deadlines import Left
from tests.support.stand_ins.running import Running
from tests.support.stand_ins.sglang import StandIn, application
from tests.support.stand_ins.shared import reboot, shared


class _SGLang(ServerRules):
    backup = False
    keep: KeepMode = "in_place"

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[ServerRig]:
        at = StandIn(cpu_backup=self.backup)
        with shared(application(at)) as running:
            yield from self._rig(at, running, tmp_path)

    def _rig(self, at: StandIn, running: Running, tmp_path: Path) -> Iterator[ServerRig]:
        made: list[SGLangEngine] = []

        def new() -> SGLangEngine:
            server = EngineServer(running.url)
            notes = Notes(tmp_path / "notes", server.url)
            engine = SGLangEngine(server, allowed_roots=[str(tmp_path)], notes=notes, keep=self.keep, look_s=5.0)
            made.append(engine)
            return engine

        def checkpoint(name: str) -> str:
            (tmp_path / name).mkdir(exist_ok=True)
            return str(tmp_path / name)

        def boot() -> None:
            at.restart()
            reboot(application(at))

        engine, faults = new(), running.faults
        yield ServerRig(
            engine, tmp_path, new, lambda: engine.pause("abort", Left()), lambda: faults.hold.add("/pause_generation"),
            faults.release, running.kill, boot, checkpoint,
        )  # fmt: skip
        for one in made:
            one.close()
        assert not at.dead, "it was asked for something that ends it"


class TestSGLang(_SGLang):
    """As it is started for RL."""


class TestSGLangWithAHostCopy(_SGLang):
    """Weights are kept on the host; frozen requests compute their cache again."""

    backup = True
    keep: KeepMode = "retract"
