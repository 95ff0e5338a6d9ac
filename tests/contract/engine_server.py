"""The rules of the Engine port that hold for an engine behind its own HTTP API, which takes its prompts itself.

What an engine of this process has to keep beside them is in `engine_suite`: those rules need its prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from moebus.engine.http import ServerEngine
from moebus.engine.port import (
    EngineFailed,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    Level,
    Unsupported,
)
from moebus.schemas.tags import ALL_TAGS, Tag
from tests.support.background import Background
from tests.support.deadlines import Left


@dataclass
class ServerRig:
    """An engine and hands on its server. `busy`: a context in which a call of `engine` that `start` makes stays inside;
    it ends with the context. `kill` ends the server, `boot` starts it again with its first weights. `checkpoint` makes
    a good source below `root`."""

    engine: ServerEngine
    root: Path
    new: Callable[[], ServerEngine]
    start: Callable[[], object]
    hold: Callable[[], None]
    release: Callable[[], None]
    kill: Callable[[], None]
    boot: Callable[[], None]
    checkpoint: Callable[[str], str]

    @contextmanager
    def busy(self) -> Iterator[None]:
        self.hold()
        call = Background(self.start)
        try:
            yield
        finally:
            self.release()
            call.result()

    def nap(self, level: Level) -> None:
        for tag in ALL_TAGS:
            self.engine.sleep(tag, level, Left())

    def wake(self) -> None:
        for tag in ALL_TAGS:
            self.engine.wakeup(tag, "restore", Left())

    def levels(self, tag: Tag = Tag.WEIGHT) -> list[Level]:
        return sorted(self.engine.capabilities().levels.get(tag, frozenset()))

    def update(self, version: str, source: str | None) -> None:
        self.engine.commit(self.engine.stage(version, source, None, Left()), "reset", Left())


class ServerTraffic:
    """Pause, looks, deadlines, identity. A subclass gives the fixture `rig`."""

    def test_pause_and_resume_repeat(self, rig: ServerRig) -> None:
        for mode in sorted(rig.engine.capabilities().pause_modes):
            for _ in range(2):
                result = rig.engine.pause(mode, Left())
                assert (result.aborted, result.finished, result.frozen) == (0, 0, 0)
                assert rig.engine.inspect().paused
            for _ in range(2):
                rig.engine.resume()
                assert not rig.engine.inspect().paused

    def test_a_look_is_quick_while_a_call_runs(self, rig: ServerRig) -> None:
        with rig.busy():
            for look in (rig.engine.inspect, rig.engine.identity, rig.engine.capabilities):
                begun = time.monotonic()
                look()
                assert time.monotonic() - begun < 1.0
            assert rig.engine.trouble is None

    def test_memory_is_left_alone_while_serving(self, rig: ServerRig) -> None:
        before = rig.engine.inspect()
        staged = rig.engine.stage("next", rig.checkpoint("next"), None, Left())
        for refused in (
            lambda: rig.engine.sleep(Tag.KV_CACHE, "discard", Left()),
            lambda: rig.engine.sleep(Tag.WEIGHT, "discard", Left()),
            lambda: rig.engine.commit(staged, "reset", Left()),
        ):
            with pytest.raises(EngineFailed, match="pause"):
                refused()
        assert rig.engine.inspect() == before
        rig.engine.discard(staged)

    def test_a_passed_deadline_has_no_effect(self, rig: ServerRig) -> None:
        rig.engine.pause("abort", Left())
        before = rig.engine.inspect()
        for late in (
            lambda: rig.engine.pause("abort", Left(-1)),
            lambda: rig.engine.sleep(Tag.WEIGHT, "discard", Left(-1)),
            lambda: rig.engine.wakeup(Tag.WEIGHT, "restore", Left(-1)),
            lambda: rig.engine.stage("v", None, None, Left(-1)),
            lambda: rig.engine.transfer("start", "v", {}, Left(-1)),
        ):
            with pytest.raises(EngineTimeout):
                late()
        assert rig.engine.inspect() == before

    @pytest.mark.parametrize("source", ["missing", "outside", "escaping", "relative", "https"])
    def test_refused_sources_leave_the_old_weights(self, rig: ServerRig, source: str) -> None:
        text = {
            "missing": str(rig.root / "none"),
            "outside": "/etc",
            "escaping": str(rig.root / ".." / ".." / ".." / "etc"),
            "relative": "w2",
            "https": "https://127.0.0.1/w2",
        }[source]
        before = rig.engine.inspect()
        with pytest.raises(EngineRefused, match="source"):
            rig.engine.stage("v2", text, None, Left())
        assert rig.engine.inspect() == before

    def test_what_is_not_supported_is_refused(self, rig: ServerRig) -> None:
        before = rig.engine.inspect()
        with pytest.raises(Unsupported, match="options"):
            rig.engine.stage("v2", rig.checkpoint("w2"), None, Left(), {"no_such_option": True})
        assert rig.engine.inspect() == before

    def test_a_transfer_has_an_order(self, rig: ServerRig) -> None:
        rig.engine.pause("abort", Left())
        with pytest.raises(EngineRefused, match="step"):
            rig.engine.transfer("begin", "v2", {}, Left())

    def test_identity_is_of_one_server_and_one_life(self, rig: ServerRig) -> None:
        identity = rig.engine.identity()
        assert rig.engine.identity() == identity
        assert len(identity) <= 128
        rig.kill()
        assert rig.engine.identity() == identity, "nothing is proven while it does not answer"
        with pytest.raises(EngineUnreachable):
            rig.engine.inspect()
        with pytest.raises(EngineUnreachable):
            rig.engine.pause("abort", Left())
        assert rig.engine.url in (rig.engine.trouble or "")
        with pytest.raises(EngineUnreachable):
            rig.new().identity()
        rig.boot()
        assert rig.engine.identity() != identity
        found = rig.engine.inspect()
        assert all(found.resident.values())
        assert not found.paused
        assert rig.engine.trouble is None

    def test_nothing_of_the_life_before_is_believed(self, rig: ServerRig) -> None:
        rig.engine.pause("abort", Left())
        first = rig.engine.inspect().version
        rig.update("v2", rig.checkpoint("w2"))
        rig.nap(rig.levels()[0])
        rig.kill()
        rig.boot()
        found = rig.engine.inspect()
        assert all(found.resident.values())
        assert found.version in (first, None)

    def test_no_ids_are_not_all_ids(self, rig: ServerRig) -> None:
        if not rig.engine.capabilities().abort:
            pytest.skip("it cannot abort single requests")
        assert rig.engine.abort_requests([]) == []

    def test_close_leaves_the_server_alone_and_repeats(self, rig: ServerRig) -> None:
        rig.engine.close()
        rig.engine.close()
        assert not rig.new().inspect().paused


class ServerMemory:
    """Sleep, wake, and what a commit needs. A subclass gives the fixture `rig`."""

    def test_cycles_of_sleep_and_wake(self, rig: ServerRig) -> None:
        rig.engine.pause("abort", Left())
        before = rig.engine.inspect()
        for level in rig.levels():
            rig.nap(level)
            rig.nap(level)
            asleep = rig.engine.inspect()
            assert not any(asleep.resident.values())
            assert (asleep.version, asleep.weights_valid) == (None, False)
            with pytest.raises(EngineFailed, match="weight"):
                rig.engine.resume()
            rig.wake()
            rig.wake()
            assert rig.engine.inspect() == before
        rig.engine.resume()

    def test_every_tag_has_to_be_awake(self, rig: ServerRig) -> None:
        rig.engine.pause("abort", Left())
        rig.nap(rig.levels()[0])
        rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
        assert rig.engine.inspect().paused
        with pytest.raises(EngineFailed, match="kv_cache"):
            rig.engine.resume()
        rig.engine.wakeup(Tag.KV_CACHE, "restore", Left())
        assert rig.engine.inspect().paused, "a wake never opens"
        rig.engine.resume()
        assert not rig.engine.inspect().paused

    def test_woken_empty_is_resident_and_not_valid(self, rig: ServerRig) -> None:
        rig.engine.pause("abort", Left())
        rig.nap(rig.levels()[0])
        rig.engine.wakeup(Tag.WEIGHT, "empty", Left())
        rig.engine.wakeup(Tag.KV_CACHE, "restore", Left())
        found = rig.engine.inspect()
        assert (found.resident[Tag.WEIGHT], found.weights_valid, found.version) == (True, False, None)
        with pytest.raises(EngineFailed):
            rig.engine.resume()
        rig.update("v2", rig.checkpoint("w2"))
        rig.engine.resume()
        assert rig.engine.inspect().version == "v2"

    def test_restore_comes_from_the_committed_source(self, rig: ServerRig) -> None:
        rig.engine.pause("abort", Left())
        rig.update("v2", rig.checkpoint("w2"))
        for level in rig.levels():
            rig.nap(level)
            rig.wake()
            assert rig.engine.inspect().version == "v2"

    def test_commit_needs_what_stage_gave(self, rig: ServerRig) -> None:
        before = rig.engine.inspect().version
        staged = rig.engine.stage("v2", rig.checkpoint("w2"), None, Left())
        for _ in range(2):
            rig.engine.discard(staged)
        rig.engine.pause("abort", Left())
        with pytest.raises(EngineFailed, match="stage"):
            rig.engine.commit(staged, "reset", Left())
        assert rig.engine.inspect().version == before

    def test_commit_over_sleeping_weights_fails(self, rig: ServerRig) -> None:
        staged = rig.engine.stage("v2", rig.checkpoint("w2"), None, Left())
        rig.engine.pause("abort", Left())
        rig.nap(rig.levels()[0])
        with pytest.raises(EngineFailed, match="asleep"):
            rig.engine.commit(staged, "reset", Left())


class ServerRules(ServerTraffic, ServerMemory):
    """All of them."""
