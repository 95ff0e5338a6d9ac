"""Rules of the Engine port: stage, commit and what the caches do."""

from __future__ import annotations

import numpy as np
import pytest

from moebus.engine.port import (
    EngineFailed,
    EngineRefused,
)
from moebus.schemas.tags import Tag
from tests.contract.engine_rig import EngineRules, Rig, same
from tests.support.deadlines import Left
from tests.support.remote import needs_fsspec, remove, upload


class WeightRules(EngineRules):
    def test_commit_changes_version_digest_and_results(self, rig: Rig) -> None:
        cold = rig.run()
        old = rig.engine.inspect()
        path = rig.root / "w.safetensors"
        rig.write_weights(path, 9)
        staged = rig.engine.stage("v9", path.as_uri(), None, Left())
        assert rig.engine.inspect() == old  # staged while serving; nothing changes yet
        assert same(rig.run(rig.prompt()), cold)
        rig.engine.pause("abort", Left())
        rig.engine.commit(staged, "reset", Left())
        rig.engine.resume()
        state = rig.engine.inspect()
        assert state.version == "v9"
        assert state.weights_digest == staged.weights_digest
        assert state.weights_digest not in (None, old.weights_digest)
        new = rig.run()
        assert new.cached_tokens == 0
        assert new.versions == ((0, "v9"),)
        assert not same(new, cold)

    def test_commit_needs_what_stage_gave(self, rig: Rig) -> None:
        staged = rig.engine.stage("v1", None, None, Left())
        rig.engine.discard(staged)
        rig.engine.discard(staged)
        rig.engine.pause("abort", Left())
        with pytest.raises(EngineFailed, match="stage"):
            rig.engine.commit(staged, "reset", Left())
        assert rig.engine.inspect().version == "initial"

    def test_commit_over_sleeping_weights_fails(self, rig: Rig) -> None:
        staged = rig.engine.stage("v1", None, None, Left())
        rig.engine.pause("abort", Left())
        rig.engine.sleep(Tag.WEIGHT, "offload", Left())
        with pytest.raises(EngineFailed, match="asleep"):
            rig.engine.commit(staged, "reset", Left())

    @pytest.mark.parametrize("source", ["missing", "outside", "escaping", "relative", "https"])
    def test_refused_sources_leave_the_old_weights(self, rig: Rig, source: str) -> None:
        text = {
            "missing": str(rig.root / "none.safetensors"),
            "outside": "/etc/hostname",
            "escaping": str(rig.root / ".." / ".." / ".." / "etc" / "hostname"),
            "relative": "w.safetensors",
            "https": "https://127.0.0.1/w.safetensors",
        }[source]
        before = rig.engine.inspect()
        with pytest.raises(EngineRefused, match="source"):
            rig.engine.stage("v1", text, None, Left())
        assert rig.engine.inspect() == before
        assert rig.run().versions == ((0, "initial"),)

    def test_a_link_out_of_the_roots_is_refused(self, rig: Rig) -> None:
        link = rig.root / "link.safetensors"
        link.symlink_to("/etc/hostname")
        with pytest.raises(EngineRefused, match="outside"):
            rig.engine.stage("v1", str(link), None, Left())

    def test_the_digest_is_checked(self, rig: Rig) -> None:
        path = rig.root / "w.safetensors"
        rig.write_weights(path, 3)
        found = rig.engine.stage("v3", str(path), None, Left()).weights_digest
        assert found is not None
        assert rig.engine.stage("v3", str(path), found.upper(), Left()).weights_digest == found
        with pytest.raises(EngineRefused, match="digest"):
            rig.engine.stage("v3", str(path), "0" * 32, Left())

    def test_the_same_weights_have_the_same_digest(self, rig: Rig) -> None:
        for name in ("a.safetensors", "b.safetensors"):
            folder = rig.root / name.removesuffix(".safetensors")
            folder.mkdir()
            rig.write_weights(folder / "w.safetensors", 3)
        digests = {rig.engine.stage("v", str(rig.root / name), None, Left()).weights_digest for name in ("a", "b")}
        assert len(digests) == 1

    @needs_fsspec
    @pytest.mark.parametrize("shape", ["file", "directory"])
    def test_weights_behind_a_url(self, rig: Rig, shape: str) -> None:
        folder = rig.root / "step"
        folder.mkdir()
        rig.write_weights(folder / "w.safetensors", 9)
        local = folder if shape == "directory" else folder / "w.safetensors"
        url = upload(local)
        staged = rig.engine.stage("v9", url, None, Left())
        assert staged.weights_digest == rig.engine.stage("v9", str(local), None, Left()).weights_digest
        rig.engine.pause("abort", Left())
        rig.engine.commit(staged, "reset", Left())
        rig.engine.sleep(Tag.WEIGHT, "discard", Left())
        assert rig.engine.wakeup(Tag.WEIGHT, "restore", Left()) > 0
        assert rig.engine.inspect().weights_digest == staged.weights_digest
        remove(url)
        rig.engine.sleep(Tag.WEIGHT, "discard", Left())
        with pytest.raises(EngineFailed, match="restored"):
            rig.engine.wakeup(Tag.WEIGHT, "restore", Left())

    def test_frozen_requests_go_on_under_new_weights(self, rig: Rig) -> None:
        whole = rig.run(rig.prompt(max_tokens=12))
        rig.engine.reset_cache()
        call = rig.frozen()
        path = rig.root / "w.safetensors"
        rig.write_weights(path, 9)
        rig.update("v9", path)
        rig.engine.resume()
        result = call.result()
        (first, old), (start, new) = result.versions
        assert (first, old, new) == (0, "initial", "v9")
        assert 22 <= start <= 23  # 3 or 4 steps were done
        assert result.routes is not None
        assert whole.routes is not None
        assert len(result.routes) == 31
        assert result.version_ranges == ((0, start, "initial"), (start, 31, "v9"))
        assert np.array_equal(result.routes[:start], whole.routes[:start])
        after = rig.run(rig.prompt(max_tokens=12))
        assert after.version_ranges == ((0, 31, "v9"),)
        assert after.cached_tokens == 0

    def test_a_kept_cache_tells_its_version(self, rig: Rig) -> None:
        old = rig.run()
        rig.engine.pause("abort", Left())
        path = rig.root / "w.safetensors"
        rig.write_weights(path, 9)
        rig.update("v9", path, cache="keep")
        rig.engine.resume()
        new = rig.run()
        assert new.cached_tokens > 0
        assert new.versions == ((0, "initial"), (new.cached_tokens, "v9"))
        assert new.routes is not None
        assert old.routes is not None
        assert np.array_equal(new.routes[: new.cached_tokens], old.routes[: new.cached_tokens])
