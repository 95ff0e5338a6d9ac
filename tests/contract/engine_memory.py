"""Rules of the Engine port: sleep and wake."""

from __future__ import annotations

import pytest

from moebus.engine.port import (
    EngineClosed,
    EngineFailed,
    Level,
)
from moebus.schemas.tags import ALL_TAGS, Tag
from tests.contract.engine_rig import LEVELS, EngineRules, Rig, same
from tests.support.deadlines import Left


class MemoryRules(EngineRules):
    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("tag", ALL_TAGS)
    def test_five_cycles_leave_bytes_and_results_alone(self, rig: Rig, tag: Tag, level: Level) -> None:
        cold = rig.run()
        before = rig.engine.inspect()
        for _ in range(5):
            rig.engine.pause("abort", Left())
            held = rig.engine.inspect().bytes_by_tag[tag]
            assert held > 0
            assert rig.engine.sleep(tag, level, Left()) == held
            asleep = rig.engine.inspect()
            assert asleep.bytes_by_tag[tag] == 0
            assert not asleep.resident[tag]
            assert rig.engine.sleep(tag, level, Left()) == 0
            with pytest.raises(EngineFailed, match=str(tag)):
                rig.engine.resume()
            assert rig.engine.wakeup(tag, "restore", Left()) == held
            assert rig.engine.wakeup(tag, "restore", Left()) == 0
            assert rig.engine.inspect().paused
            rig.engine.resume()
        assert rig.engine.inspect() == before
        assert same(rig.run(), cold)

    def test_sleeping_weights_have_no_version(self, rig: Rig) -> None:
        rig.engine.pause("abort", Left())
        rig.engine.sleep(Tag.WEIGHT, "offload", Left())
        state = rig.engine.inspect()
        assert (state.version, state.weights_digest, state.weights_valid) == (None, None, False)
        rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
        state = rig.engine.inspect()
        assert (state.version, state.weights_valid) == ("initial", True)

    def test_a_sleeping_cache_forgets_its_prefixes(self, rig: Rig) -> None:
        rig.run()
        rig.engine.pause("abort", Left())
        rig.engine.sleep(Tag.KV_CACHE, "offload", Left())
        rig.engine.wakeup(Tag.KV_CACHE, "restore", Left())
        rig.engine.resume()
        assert rig.run().cached_tokens == 0

    def test_the_cache_of_frozen_requests_stays(self, rig: Rig) -> None:
        call = rig.frozen()
        with pytest.raises(EngineFailed, match="frozen"):
            rig.engine.sleep(Tag.KV_CACHE, "discard", Left())
        rig.engine.sleep(Tag.WEIGHT, "offload", Left())
        rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
        rig.engine.resume()
        assert call.result().finish_reason == "length"

    def test_woken_empty_is_resident_and_not_valid(self, rig: Rig) -> None:
        cold = rig.run()
        rig.engine.pause("abort", Left())
        freed = rig.engine.sleep(Tag.WEIGHT, "discard", Left())
        assert rig.engine.wakeup(Tag.WEIGHT, "empty", Left()) == freed
        state = rig.engine.inspect()
        assert state.resident[Tag.WEIGHT]
        assert (state.weights_valid, state.version) == (False, None)
        with pytest.raises(EngineFailed):
            rig.engine.resume()
        with pytest.raises(EngineClosed):
            rig.run()
        rig.update("again", None)
        rig.engine.resume()
        assert rig.engine.inspect().version == "again"
        assert rig.run().routes is not None
        assert cold.versions == ((0, "initial"),)

    def test_restore_comes_from_the_committed_source(self, rig: Rig) -> None:
        path = rig.root / "w.safetensors"
        rig.write_weights(path, 5)
        rig.engine.pause("abort", Left())
        rig.update("v5", path)
        digest = rig.engine.inspect().weights_digest
        rig.engine.sleep(Tag.WEIGHT, "discard", Left())
        rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
        state = rig.engine.inspect()
        assert (state.version, state.weights_digest) == ("v5", digest)

    @pytest.mark.parametrize("change", ["gone", "changed"])
    def test_restore_fails_without_the_committed_source(self, rig: Rig, change: str) -> None:
        path = rig.root / "w.safetensors"
        rig.write_weights(path, 5)
        rig.engine.pause("abort", Left())
        rig.update("v5", path)
        rig.engine.sleep(Tag.WEIGHT, "discard", Left())
        path.unlink()
        if change == "changed":
            rig.write_weights(path, 6)
        with pytest.raises(EngineFailed):
            rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
        state = rig.engine.inspect()
        assert not state.resident[Tag.WEIGHT]
        assert state.bytes_by_tag[Tag.WEIGHT] == 0

    @pytest.mark.parametrize("level", LEVELS)
    def test_the_colocated_loop(self, rig: Rig, level: Level) -> None:
        """Sleep all, wake the weights empty, update or transfer, wake the cache, resume; as often as wanted."""
        held = rig.engine.inspect().bytes_by_tag
        how = ["update", "transfer"] if rig.engine.capabilities().transfer else ["update"]
        for turn, fill in enumerate(how * 2):
            rig.run()
            rig.engine.pause("abort", Left())
            for tag in ALL_TAGS:
                assert rig.engine.sleep(tag, level, Left()) == held[tag]
            assert sum(rig.engine.inspect().bytes_by_tag.values()) == 0
            assert rig.engine.wakeup(Tag.WEIGHT, "empty", Left()) == held[Tag.WEIGHT]
            if fill == "update":
                path = rig.root / f"{turn}.safetensors"
                rig.write_weights(path, turn + 5)
                rig.update(f"v{turn}", path)
            else:
                for step in ("init", "start", "update", "finish"):
                    rig.engine.transfer(step, f"v{turn}", {}, Left())
            with pytest.raises(EngineFailed, match="kv_cache"):
                rig.engine.resume()
            assert rig.engine.wakeup(Tag.KV_CACHE, "restore", Left()) == held[Tag.KV_CACHE]
            assert rig.engine.inspect().paused
            rig.engine.resume()
            assert rig.engine.inspect().bytes_by_tag == held
            result = rig.run()
            assert (result.versions, result.cached_tokens) == (((0, f"v{turn}"),), 0)
