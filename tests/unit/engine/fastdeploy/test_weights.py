"""FastDeployEngine: updates by version, rank by rank."""

from __future__ import annotations

from typing import Any

import pytest

from moebus.engine.port import (
    EngineFailed,
    EngineRefused,
    EngineTainted,
    RankFailed,
    Unsupported,
)
from moebus.schemas.tags import ALL_TAGS, Tag
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.wait import wait_until
from tests.unit.engine.fastdeploy.rig import Rig


def update(rig: Rig, version: str = "step-1", options: dict[str, Any] | None = None) -> None:
    rig.engine.commit(rig.engine.stage(version, None, None, Left(), options), "reset", Left())


def test_an_update(rsync: Rig) -> None:
    assert rsync.engine.inspect().version is None
    update(rsync, options={"verify_checksum": True, "rsync_config": {"etcd_server": "10.0.0.1:2379"}, "timeout": 300})
    assert rsync.calls("update_weights") == [
        {
            "version": "step-1",
            "verify_checksum": True,
            "rsync_config": {"etcd_server": "10.0.0.1:2379"},
            "timeout": 300,
        }
    ]
    state = rsync.engine.inspect()
    assert (state.version, state.tainted, state.apart) == ("step-1", False, "")
    assert [rank.version for rank in state.ranks] == ["step-1", "step-1"]


def test_nothing_is_sent_that_an_older_server_does_not_know(rsync: Rig) -> None:
    update(rsync)
    assert rsync.calls("update_weights") == [{"version": "step-1"}]


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"source": "/ckpt/5"}, Unsupported, "source"),
        ({"digest": "0" * 32}, Unsupported, "digest"),
        ({"options": {"load_format": "x"}}, Unsupported, "options.load_format"),
        ({"options": {"verify_checksum": "yes"}}, EngineRefused, "options.verify_checksum"),
        ({"options": {"rsync_config": []}}, EngineRefused, "options.rsync_config"),
        ({"options": {"timeout": True}}, EngineRefused, "options.timeout"),
    ],
)
def test_what_cannot_be_staged(rsync: Rig, kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    given = {"version": "v", "source": None, "digest": None, "deadline": Left(), **kwargs}
    with pytest.raises(error, match=text):
        rsync.engine.stage(**given)


def test_ranks_that_differ(rsync: Rig) -> None:
    rsync.at.faults.lagging_rank = True
    with pytest.raises(RankFailed, match="rank 1 says 'step-0'"):
        update(rsync)
    state = rsync.engine.inspect()
    assert (state.tainted, state.weights_valid) == (True, False)
    with pytest.raises(EngineFailed, match="weight not usable"):
        rsync.engine.resume()
    rsync.at.faults.lagging_rank = False
    update(rsync, "step-2")
    rsync.engine.resume()


def test_an_update_that_failed_on_one_rank_taints(rsync: Rig) -> None:
    with pytest.raises(EngineTainted, match="shape mismatch"):
        update(rsync, "torn")
    assert rsync.engine.inspect().tainted


def test_an_update_that_wrote_nothing_keeps_the_weights(rig: Rig) -> None:
    rig.engine.pause("abort", Left())
    with pytest.raises(EngineFailed, match="Unsupported strategy: ipc_snapshot"):
        update(rig)
    assert rig.engine.inspect().weights_valid


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cut_update_taints(rsync: Rig, when: str) -> None:
    rsync.net.cut["/v1/update_weights"] = when  # type: ignore[assignment]
    with pytest.raises(EngineTainted, match="does not tell"):
        update(rsync)
    assert rsync.engine.inspect().tainted
    assert rsync.again().inspect().tainted


def test_update_needs_a_pause_and_memory(rig: Rig) -> None:
    with pytest.raises(EngineFailed, match="pause it first"):
        update(rig)
    rig.engine.pause("abort", Left())
    rig.engine.sleep(Tag.WEIGHT, "discard", Left())
    with pytest.raises(EngineFailed, match="asleep"):
        update(rig)
    assert rig.calls("update_weights") == []


def test_transfers_are_unsupported(rsync: Rig) -> None:
    assert not rsync.engine.capabilities().transfer
    with pytest.raises(Unsupported, match="update_weights"):
        rsync.engine.transfer("init", "v", {}, Left())


def test_an_inspection_during_a_long_call_is_the_last_one(rig: Rig) -> None:
    rig.engine.pause("abort", Left())
    for tag in ALL_TAGS:
        rig.engine.sleep(tag, "discard", Left())
    rig.engine.inspect()
    rig.at.faults.slow_wake = True
    rig.engine._look_s = 0.1
    waking = Background(lambda: rig.engine.wakeup(Tag.WEIGHT, "restore", Left()))
    wait_until(lambda: rig.net.calls[-1].endswith("/v1/pause"), 30, "the pause behind the wakeup")
    assert rig.engine.inspect().paused
    rig.at.go.set()
    waking.result()
