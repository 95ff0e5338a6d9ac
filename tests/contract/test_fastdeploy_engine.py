"""The FastDeploy adapter keeps the rules of the port that hold for a server, but for those that its server cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moebus.engine.fastdeploy.engine import FastDeployEngine
from moebus.engine.http import EngineServer
from moebus.engine.http.notes import Notes
from moebus.engine.port import EngineFailed, Unsupported
from moebus.schemas.tags import Tag
from tests.contract.engine_server import ServerRig, ServerRules
from tests.support.deadlines import Left
from tests.support.stand_ins.fastdeploy import StandIn, application
from tests.support.stand_ins.running import Running
from tests.support.stand_ins.shared import reboot, shared


class TestFastDeploy(ServerRules):
    """Weights by snapshot. It has no source but its own, and its memory wakes whole."""

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[ServerRig]:
        at = StandIn(strategy="ipc_snapshot")
        with shared(application(at)) as running:
            yield from self._rig(at, running, tmp_path)

    def _rig(self, at: StandIn, running: Running, tmp_path: Path) -> Iterator[ServerRig]:
        made: list[FastDeployEngine] = []

        def new() -> FastDeployEngine:
            server = EngineServer(running.url)
            made.append(FastDeployEngine(server, notes=Notes(tmp_path, server.url), look_s=5.0))
            return made[-1]

        def boot() -> None:
            at.restart()
            reboot(application(at))

        engine, faults = new(), running.faults
        yield ServerRig(
            engine, tmp_path, new, lambda: engine.pause("abort", Left()), lambda: faults.hold.add("/v1/pause"),
            faults.release, running.kill, boot, lambda name: None,  # type: ignore[arg-type, return-value]
        )  # fmt: skip
        for one in made:
            one.close()

    def test_every_tag_has_to_be_awake(self, rig: ServerRig) -> None:
        rig.engine.pause("abort", Left())
        rig.nap("discard")
        with pytest.raises(Unsupported, match="both"):
            rig.engine.wakeup(Tag.KV_CACHE, "restore", Left())
        with pytest.raises(EngineFailed, match="weight and kv_cache"):
            rig.engine.resume()
        rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
        found = rig.engine.inspect()
        assert found.paused, "a wake never opens"
        assert all(found.resident.values())
        rig.engine.resume()

    def test_woken_empty_is_resident_and_not_valid(self, rig: ServerRig) -> None:
        rig.engine.pause("abort", Left())
        rig.nap("discard")
        with pytest.raises(Unsupported, match="loads its weights as it wakes"):
            rig.engine.wakeup(Tag.WEIGHT, "empty", Left())
        assert not rig.engine.inspect().resident[Tag.WEIGHT]

    def test_restore_comes_from_the_committed_source(self, rig: ServerRig) -> None:
        """Which is the server's own: what a trainer wrote there last."""
        rig.engine.pause("abort", Left())
        rig.nap("discard")
        rig.wake()
        assert rig.engine.inspect().weights_valid

    @pytest.mark.parametrize("source", ["/ckpt/5", "s3://bucket/5", "relative"])
    def test_refused_sources_leave_the_old_weights(self, rig: ServerRig, source: str) -> None:
        before = rig.engine.inspect()
        with pytest.raises(Unsupported, match="source"):
            rig.engine.stage("v2", source, None, Left())
        assert rig.engine.inspect() == before

    def test_a_transfer_has_an_order(self, rig: ServerRig) -> None:
        rig.engine.pause("abort", Left())
        with pytest.raises(Unsupported, match="transfer"):
            rig.engine.transfer("begin", "v2", {}, Left())

    def test_nothing_of_the_life_before_is_believed(self, rig: ServerRig) -> None:
        """But what slept: nothing tells a restart from a lost connection, and waking what is awake does nothing."""
        rig.engine.pause("abort", Left())
        rig.nap("discard")
        rig.kill()
        rig.boot()
        found = rig.engine.inspect()
        assert (found.version, any(found.resident.values())) == (None, False)
        rig.engine.pause("abort", Left())
        rig.wake()
        rig.engine.resume()
