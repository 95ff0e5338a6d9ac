"""SGLangEngine: updates from disk and transfers, and where they can break."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moebus.engine.port import (
    CacheMode,
    EngineFailed,
    EngineRefused,
    EngineTainted,
    EngineUnauthorized,
    Unsupported,
)
from moebus.engine.sglang.engine import SGLangEngine
from moebus.schemas.tags import Tag
from tests.support.deadlines import Left
from tests.support.stand_ins.sglang import StandIn
from tests.unit.engine.sglang.rig import Rig, sglang

DISK = "/update_weights_from_disk"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Paused."""
    with sglang(tmp_path) as made:
        made.engine.pause("abort", Left())
        yield made


def update(rig: Rig, version: str = "step-1", source: str | None = None, cache: CacheMode = "reset") -> None:
    rig.engine.commit(rig.engine.stage(version, source, None, Left()), cache, Left())


def test_an_update_from_a_folder(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    update(rig, source=folder.as_uri())
    assert rig.calls(DISK) == [
        {"model_path": str(folder), "flush_cache": False, "abort_all_requests": False, "weight_version": "step-1"}
    ]
    assert rig.at.cached == 0
    state = rig.engine.inspect()
    assert (state.version, state.weights_valid, state.tainted, state.paused) == ("step-1", True, False, True)


def test_no_source_means_the_models_own_path(rig: Rig) -> None:
    update(rig)
    assert rig.calls(DISK)[0]["model_path"] == "/models/m"


def test_keep_leaves_the_cache(rig: Rig) -> None:
    update(rig, cache="keep")
    assert rig.at.cached == 7


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"digest": "0" * 32}, Unsupported, "digest"),
        ({"options": {"verify_checksum": True}}, Unsupported, "options.verify_checksum"),
        ({"options": {"rsync_config": {}}}, Unsupported, "options.rsync_config"),
        ({"source": "/etc"}, EngineRefused, "outside the allowed weight roots"),
        ({"source": "relative"}, EngineRefused, "absolute"),
        ({"source": "s3://bucket/step"}, EngineRefused, "not a local path"),
    ],
)
def test_what_cannot_be_staged(rig: Rig, kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"version": "v", "source": None, "digest": None, "deadline": Left(), **kwargs}
    with pytest.raises(error, match=text):
        rig.engine.stage(**given)
    assert rig.calls(DISK) == []


def test_a_file_is_no_folder(rig: Rig, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"")
    with pytest.raises(EngineRefused, match="no folder"):
        rig.engine.stage("v", str(tmp_path / "w.safetensors"), None, Left())


def test_a_load_refused_before_the_first_write_keeps_the_old_weights(rig: Rig) -> None:
    rig.at.faults.load = "missing"
    with pytest.raises(EngineFailed, match="does not exist"):
        update(rig)
    state = rig.engine.inspect()
    assert (state.version, state.weights_valid, state.tainted) == ("default", True, False)


def test_a_load_that_broke_off_taints(rig: Rig) -> None:
    """sglang-omni#784: resumed on part-written weights. What SGLang says of a roll-back it does not prove."""
    rig.at.faults.load = "middle"
    with pytest.raises(EngineTainted, match="Rolling back"):
        update(rig)
    state = rig.engine.inspect()
    assert (state.version, state.weights_valid, state.tainted) == (None, False, True)
    with pytest.raises(EngineFailed, match="weight not usable"):
        rig.engine.resume()
    assert rig.again().inspect().tainted
    rig.at.faults.load = ""
    update(rig, "step-2")
    assert rig.engine.inspect().version == "step-2"
    rig.engine.resume()


def test_a_200_that_says_it_failed_taints(rig: Rig) -> None:
    rig.net.answer[DISK] = (200, b'{"success": false, "message": "no"}')
    with pytest.raises(EngineTainted, match="no"):
        update(rig)


def test_a_token_refused_changes_nothing(rig: Rig) -> None:
    rig.net.answer[DISK] = (401, b"{}")
    with pytest.raises(EngineUnauthorized):
        update(rig)
    assert rig.engine.inspect().weights_valid


def test_a_cut_after_the_load_is_resolved_by_the_label(rig: Rig) -> None:
    rig.net.cut[DISK] = "after"
    update(rig)
    assert rig.engine.inspect().version == "step-1"


def test_a_cut_before_the_load_taints(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moebus.engine.sglang.weights.SETTLE_S", 0.05)
    rig.net.cut[DISK] = "before"
    with pytest.raises(EngineTainted, match="mixture"):
        update(rig)
    assert rig.engine.inspect().tainted


def test_the_same_label_again_proves_nothing(rig: Rig) -> None:
    update(rig)
    rig.net.cut[DISK] = "before"
    with pytest.raises(EngineTainted, match="mixture"):
        update(rig)


def test_a_version_that_does_not_move_is_no_success(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """miles#2244: the version goes back."""
    monkeypatch.setattr("moebus.engine.sglang.weights.SETTLE_S", 0.05)
    rig.at.faults.forgets_version = True
    with pytest.raises(EngineTainted, match="still names version 'default'"):
        update(rig)


def test_a_version_that_went_back_is_told(rig: Rig) -> None:
    """miles#2244: after a failover the label is an old one; the worker compares it with what was asked for."""
    update(rig, "step-57")
    rig.at.weight_version = "step-1"
    assert rig.engine.inspect().version == "step-1"


def test_labels_of_several_processes(tmp_path: Path) -> None:
    """Only the process that took the update has the new label; the others answer looks too."""
    with sglang(tmp_path, StandIn(tokenizers=2)) as rig:
        rig.engine.pause("abort", Left())
        update(rig)
        rig.at.weight_version = "default"
        assert rig.engine.inspect().version == "step-1"


def test_a_flush_that_is_refused_leaves_the_old_weights(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moebus.engine.sglang.weights.FLUSH_S", 0.05)
    rig.at.faults.refused_flushes = -1
    with pytest.raises(EngineFailed, match="Flush cache failed"):
        update(rig)
    assert rig.calls(DISK) == []
    assert rig.engine.inspect().version == "default"


def test_commit_needs_a_pause_and_memory(rig: Rig) -> None:
    rig.engine.sleep(Tag.WEIGHT, "discard", Left())
    with pytest.raises(EngineFailed, match="asleep"):
        update(rig)
    rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
    rig.engine.resume()
    with pytest.raises(EngineFailed, match="pause it first"):
        update(rig)


def test_frozen_requests_go_on_under_new_weights(tmp_path: Path) -> None:
    with sglang(tmp_path) as rig:
        rig.at.running = ["a"]
        rig.engine.pause("keep", Left())
        with pytest.raises(EngineFailed, match="cache keep"):
            update(rig)
        assert "recompute" not in rig.engine.capabilities().cache_modes
        update(rig, cache="keep")
        rig.engine.resume()
        assert rig.at.running == ["a"]


@pytest.mark.parametrize("blocked", [True, False])
def test_retracted_requests_compute_their_cache_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocked: bool
) -> None:
    """sglang#33783: on servers where what waits blocks a flush, the update is refused, and nothing is broken."""
    monkeypatch.setattr("moebus.engine.sglang.weights.FLUSH_S", 0.05)
    with sglang(tmp_path, keep="retract") as rig:
        rig.at.running, rig.at.faults.retracted_block_flush = ["a"], blocked
        rig.engine.pause("keep", Left())
        if blocked:
            with pytest.raises(EngineFailed, match="Flush cache failed"):
                update(rig, cache="recompute")
        else:
            update(rig, cache="recompute")
        assert rig.at.cached == (7 if blocked else 0)
        assert not rig.at.dead
        assert rig.engine.inspect().weights_valid


# -- transfers

KINDS: dict[str, dict[str, Any]] = {
    "distributed": {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[4, 4]], "group_name": "g"},
    "tensor": {"serialized_named_tensors": ["AAAA"], "load_format": "flattened_bucket"},
    "ipc": {"zmq_handles": {"GPU-1": "ipc:///tmp/x"}},
}


def whole(engine: SGLangEngine, version: str, info: dict[str, Any]) -> None:
    engine.transfer("start", version, {}, Left())
    engine.transfer("update", version, info, Left())
    engine.transfer("finish", version, {}, Left())


@pytest.mark.parametrize("kind", KINDS)
def test_a_transfer(rig: Rig, kind: str) -> None:
    info = KINDS[kind]
    group = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 9, "group_name": "g"}
    rig.engine.transfer("init", "step-7", group if kind == "distributed" else {}, Left())
    rig.engine.transfer("start", "step-7", {}, Left())
    state = rig.engine.inspect()
    assert (state.weights_valid, state.version) == (False, None)
    rig.engine.transfer("update", "step-7", info, Left())
    rig.engine.transfer("update", "step-7", info, Left())
    rig.engine.transfer("finish", "step-7", {}, Left())
    path = f"/update_weights_from_{kind}"
    assert rig.calls(path) == [{**info, "flush_cache": False}] * 2
    assert rig.calls("/update_weight_version") == [{"new_version": "step-7", "abort_all_requests": False}]
    assert rig.engine.inspect().version == "step-7"
    rig.engine.resume()


def test_a_group_is_destroyed_at_the_end(rig: Rig) -> None:
    rig.engine.transfer("init", "v", {"group_name": "g"}, Left())
    assert rig.at.groups == {"g"}
    rig.engine.transfer("start", "v", {}, Left())
    rig.engine.transfer("finish", "v", {"destroy_group": "g"}, Left())
    assert rig.at.groups == set()


def test_a_server_before_sessions(rig: Rig) -> None:
    rig.at.no_sessions = True
    whole(rig.engine, "v", KINDS["tensor"])
    assert rig.engine.inspect().version == "v"


def test_a_cut_transfer_taints_and_can_be_begun_again(rig: Rig) -> None:
    """A second start while the first is open would end the server."""
    rig.engine.transfer("start", "v", {}, Left())
    rig.at.faults.load = "middle"
    with pytest.raises(EngineTainted, match="partially updated"):
        rig.engine.transfer("update", "v", KINDS["tensor"], Left())
    assert rig.engine.inspect().tainted
    rig.at.faults.load = ""
    engine = rig.again()
    whole(engine, "v2", KINDS["tensor"])
    assert not rig.at.dead
    assert (engine.inspect().version, engine.inspect().tainted) == ("v2", False)


def test_transferred_weights_cannot_be_restored(rig: Rig) -> None:
    whole(rig.engine, "v", KINDS["ipc"])
    rig.engine.sleep(Tag.WEIGHT, "discard", Left())
    with pytest.raises(EngineFailed, match="cannot be restored"):
        rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
    assert rig.at.asleep == {"weights"}
    rig.engine.wakeup(Tag.WEIGHT, "empty", Left())


@pytest.mark.parametrize(
    ("step", "version", "info", "error", "text"),
    [
        ("update", "v", {}, EngineRefused, "names, serialized_named_tensors, zmq_handles"),
        ("update", "v", {"names": [], "flush_cache": True}, EngineRefused, "info.flush_cache"),
        ("update", "v", {"names": [], "weight_version": "x"}, EngineRefused, "info.weight_version"),
        ("finish", None, {}, EngineRefused, "version"),
        ("pack", "v", {}, EngineRefused, "no 'pack'"),
        ("update", "v", {"names": []}, EngineFailed, "update without start"),
        ("finish", "v", {}, EngineFailed, "finish without start"),
    ],
)
def test_what_cannot_be_transferred(
    rig: Rig, step: str, version: str | None, info: dict[str, Any], error: type[Exception], text: str
) -> None:
    before = rig.at.calls.copy()
    with pytest.raises(error, match=text):
        rig.engine.transfer(step, version, info, Left())
    assert rig.at.calls == before
    assert not rig.engine.inspect().tainted


def test_an_init_that_fails_leaves_the_weights(rig: Rig) -> None:
    rig.net.answer["/init_weights_update_group"] = (400, b'{"success": false, "message": "port in use"}')
    with pytest.raises(EngineFailed, match="port in use"):
        rig.engine.transfer("init", "v", {"master_port": 1}, Left())
    assert rig.engine.inspect().weights_valid
