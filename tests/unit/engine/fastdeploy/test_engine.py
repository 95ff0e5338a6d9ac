"""FastDeployEngine: every call, and what its server can get wrong about them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moebus.engine.fastdeploy.engine import FastDeployEngine
from moebus.engine.port import (
    EngineFailed,
    EngineRefused,
    EngineTainted,
    EngineTimeout,
    EngineUnauthorized,
    EngineUnknown,
    EngineUnreachable,
    PauseMode,
    RankFailed,
    Unsupported,
)
from moebus.schemas.tags import ALL_TAGS, Tag
from tests.support.background import Background
from tests.support.deadlines import Left, Polls
from tests.support.stand_ins.fastdeploy import StandIn, application
from tests.support.stand_ins.running import Running
from tests.support.wait import wait_until
from tests.unit.engine.fastdeploy.rig import Rig, fastdeploy

IPC = "ipc_snapshot"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Weights by snapshot: they sleep and wake."""
    with fastdeploy(tmp_path, StandIn(strategy=IPC)) as made:
        yield made


@pytest.fixture
def rsync(tmp_path: Path) -> Iterator[Rig]:
    """Paused; weights by version."""
    with fastdeploy(tmp_path) as made:
        made.engine.pause("abort", Left())
        yield made


# -- traffic


def test_abort_ends_everything_and_stays_closed(rig: Rig) -> None:
    assert rig.ask("a") == 200
    assert rig.engine.pause("abort", Left()).idle_confirmed
    assert rig.at.ended == {"a": "abort"}
    assert rig.ask("b") == 500
    assert rig.engine.inspect().paused
    assert rig.engine.pause("abort", Left()).idle_confirmed
    rig.engine.resume()
    assert not rig.engine.inspect().paused
    assert rig.ask("c") == 200


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_other_modes_are_unsupported(rig: Rig, mode: PauseMode) -> None:
    with pytest.raises(Unsupported, match=mode):
        rig.engine.pause(mode, Left())
    assert rig.engine.capabilities().pause_modes == {"abort"}
    assert rig.at.calls == []


def test_a_pause_that_fails_half_way_is_taken_back_and_done_truly(rig: Rig) -> None:
    """A failed pause leaves its flag set, and the next one would say success without a drain."""
    rig.ask("a")
    rig.at.faults.half_paused = True
    with pytest.raises(EngineFailed, match="may hanged"):
        rig.engine.pause("abort", Left())
    assert (rig.at.paused, rig.at.running) == (False, ["a"])
    rig.at.faults.half_paused = False
    assert rig.engine.pause("abort", Left()).idle_confirmed
    assert rig.at.running == []


def test_a_pause_by_others_is_not_taken_for_a_drain(rig: Rig) -> None:
    rig.ask("a")
    rig.at.paused = True
    assert not rig.engine.pause("abort", Left()).idle_confirmed
    assert rig.at.ended == {"a": "abort"}


def test_an_endless_pause_ends_at_its_deadline(rig: Rig) -> None:
    rig.engine.inspect()
    rig.net.hold.add("/v1/pause")
    with pytest.raises(EngineTimeout, match="open again"):
        rig.engine.pause("abort", Left(0.2))
    assert not rig.at.paused


def test_a_cut_pause_is_asked_for_again(rig: Rig) -> None:
    rig.net.cut["/v1/pause"] = "before"
    with pytest.raises(EngineTimeout):
        rig.engine.pause("abort", Left())
    assert rig.net.count("/v1/pause") == 2


@pytest.mark.parametrize("path", ["/v1/pause", "/v1/resume"])
def test_a_200_with_an_error_is_a_failure(rig: Rig, path: str) -> None:
    rig.net.answer[path] = (200, b'{"status": "error", "error_message": "busy", "request_id": "control-1"}')
    with pytest.raises(EngineFailed, match="in an answer with number 200"):
        rig.engine.pause("abort", Left()) if path == "/v1/pause" else rig.engine.resume()


def test_success_is_read_back(rig: Rig) -> None:
    rig.net.answer["/v1/pause"] = (200, b'{"status": "success", "result": null}')
    with pytest.raises(EngineFailed, match="not paused"):
        rig.engine.pause("abort", Left())
    rig.at.paused = True
    rig.net.answer["/v1/resume"] = (200, b'{"status": "success", "result": null}')
    with pytest.raises(EngineFailed, match="says success and that it is paused"):
        rig.engine.resume()


def test_a_passed_deadline_asks_nothing(rig: Rig) -> None:
    for late in (
        lambda: rig.engine.pause("abort", Polls(0)),
        lambda: rig.engine.sleep(Tag.WEIGHT, "discard", Polls(0)),
        lambda: rig.engine.wakeup(Tag.WEIGHT, "restore", Polls(0)),
        lambda: rig.engine.stage("v", None, None, Polls(0)),
    ):
        with pytest.raises(EngineTimeout):
            late()
    assert rig.at.calls == []


def test_the_token_is_refused(rig: Rig) -> None:
    rig.net.token = "right"
    with pytest.raises(EngineUnauthorized):
        rig.engine.pause("abort", Left())


def test_aborts(rig: Rig) -> None:
    for name in "abc":
        rig.ask(name)
    assert rig.engine.abort_requests([]) == []
    assert rig.at.running == ["a", "b", "c"]
    with pytest.raises(EngineRefused, match="empty id"):
        rig.engine.abort_requests([""])
    assert rig.engine.abort_requests(["a", "z"]) == ["a"]
    assert rig.engine.abort_requests(None) == ["b", "c"]
    assert rig.calls("abort_requests") == [{"req_ids": ["a", "z"]}, {"abort_all": True}]


def test_aborts_of_a_server_that_does_not_tell(rig: Rig) -> None:
    """FastDeploy#7615: it answers before it has aborted."""
    rig.net.answer["/v1/abort_requests"] = (200, b'{"status": "success", "result": null}')
    assert rig.engine.abort_requests(["a"]) == ["a"]
    assert rig.engine.abort_requests(None) == []


def test_reset_cache(rig: Rig) -> None:
    with pytest.raises(Unsupported, match="pause it"):
        rig.engine.reset_cache()
    rig.engine.pause("abort", Left())
    assert rig.engine.reset_cache() == 0


# -- memory


def test_both_sleep_and_wake_and_nothing_is_served(rig: Rig) -> None:
    rig.engine.pause("abort", Left())
    for tag in ALL_TAGS:
        rig.engine.sleep(tag, "discard", Left())
        assert rig.engine.sleep(tag, "discard", Left()) == 0
    assert rig.calls("sleep") == [{"tags": "weight"}, {"tags": "kv_cache"}]
    with pytest.raises(EngineFailed, match="weight and kv_cache"):
        rig.engine.resume()
    rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
    rig.engine.wakeup(Tag.KV_CACHE, "restore", Left())
    assert rig.calls("wakeup") == [{"tags": "weight,kv_cache"}]
    state = rig.engine.inspect()
    assert (state.paused, rig.at.paused, rig.at.asleep) == (True, True, set())
    assert state.resident == dict.fromkeys(ALL_TAGS, True)
    assert state.weights_valid
    rig.engine.resume()


def test_a_cache_alone_wakes_only_over_weights(rig: Rig) -> None:
    rig.engine.pause("abort", Left())
    rig.engine.sleep(Tag.KV_CACHE, "offload", Left())
    rig.engine.wakeup(Tag.KV_CACHE, "restore", Left())
    assert rig.calls("wakeup") == [{"tags": "kv_cache"}]
    for tag in ALL_TAGS:
        rig.engine.sleep(tag, "discard", Left())
    with pytest.raises(Unsupported, match="wake weight, which wakes both"):
        rig.engine.wakeup(Tag.KV_CACHE, "restore", Left())
    assert len(rig.calls("wakeup")) == 1


def test_what_comes_in_while_it_wakes_is_not_served(rig: Rig) -> None:
    """The server opens admission as it wakes: the pause stands in line before what came in meanwhile."""
    rig.engine.pause("abort", Left())
    for tag in ALL_TAGS:
        rig.engine.sleep(tag, "discard", Left())
    rig.at.faults.slow_wake = True
    pauses = len(rig.calls("pause"))
    waking = Background(lambda: rig.engine.wakeup(Tag.WEIGHT, "restore", Left()))
    wait_until(lambda: rig.net.calls[-1].endswith("/v1/pause"), 30, "the pause behind the wakeup")
    asked = Background(lambda: rig.ask("early"))
    wait_until(lambda: rig.net.calls[-1].endswith("/v1/chat/completions"), 30, "a request during the wakeup")
    rig.at.go.set()
    waking.result()
    assert asked.result() == 500
    assert rig.at.admitted == []
    assert len(rig.calls("pause")) == pauses + 2
    assert rig.at.paused


def test_a_pause_that_overtook_the_wakeup_is_repeated(rig: Rig) -> None:
    """Nothing proves the order in which a server takes two connections in."""
    rig.engine.pause("abort", Left())
    for tag in ALL_TAGS:
        rig.engine.sleep(tag, "discard", Left())
    rig.at.overtaken = True
    rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
    assert rig.at.paused


def test_a_server_that_cannot_be_closed_again_is_unknown(rig: Rig) -> None:
    rig.engine.pause("abort", Left())
    for tag in ALL_TAGS:
        rig.engine.sleep(tag, "discard", Left())
    rig.at.faults.fails["pause"] = "pause only supported in local scheduler"
    with pytest.raises(EngineUnknown, match="may serve"):
        rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
    assert not rig.engine.inspect().resident[Tag.WEIGHT]


def test_weights_are_discarded_only(rig: Rig) -> None:
    can = rig.engine.capabilities()
    assert can.levels == {Tag.WEIGHT: {"discard"}, Tag.KV_CACHE: {"offload", "discard"}}
    rig.engine.pause("abort", Left())
    with pytest.raises(Unsupported, match="level discard"):
        rig.engine.sleep(Tag.WEIGHT, "offload", Left())
    rig.engine.sleep(Tag.WEIGHT, "discard", Left())
    with pytest.raises(Unsupported, match="weights restore"):
        rig.engine.wakeup(Tag.WEIGHT, "empty", Left())


def test_sleep_needs_a_pause(rig: Rig) -> None:
    rig.ask("a")
    with pytest.raises(EngineFailed, match="pause it first"):
        rig.engine.sleep(Tag.KV_CACHE, "discard", Left())
    assert rig.at.running == ["a"]


@pytest.mark.parametrize("method", ["sleep", "wakeup"])
def test_success_without_a_rank_is_none(rig: Rig, method: str) -> None:
    rig.engine.pause("abort", Left())
    if method == "wakeup":
        rig.engine.sleep(Tag.KV_CACHE, "discard", Left())
    rig.at.faults.no_evidence = True
    sleep, wake = rig.engine.sleep, rig.engine.wakeup
    with pytest.raises(EngineUnknown, match="names no rank"):
        sleep(Tag.KV_CACHE, "discard", Left()) if method == "sleep" else wake(Tag.KV_CACHE, "restore", Left())
    assert not rig.engine.inspect().resident[Tag.KV_CACHE]
    assert rig.at.paused


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cut_sleep_counts_as_asleep(rig: Rig, when: str) -> None:
    """It can be woken either way, and is not served until it was."""
    rig.engine.pause("abort", Left())
    rig.net.cut["/v1/sleep"] = when  # type: ignore[assignment]
    with pytest.raises(EngineUnknown):
        rig.engine.sleep(Tag.KV_CACHE, "discard", Left())
    rig.net.cut.clear()
    assert not rig.engine.inspect().resident[Tag.KV_CACHE]
    with pytest.raises(EngineFailed, match="kv_cache"):
        rig.engine.resume()
    rig.engine.wakeup(Tag.KV_CACHE, "restore", Left())
    rig.engine.resume()
    assert rig.at.asleep == set()


def test_a_wakeup_that_fails_stays_closed(rig: Rig) -> None:
    rig.engine.pause("abort", Left())
    rig.engine.sleep(Tag.KV_CACHE, "discard", Left())
    rig.at.faults.fails["wakeup"] = "Control request timed out after 300s"
    with pytest.raises(EngineFailed, match="300s"):
        rig.engine.wakeup(Tag.KV_CACHE, "restore", Left())
    assert rig.at.paused
    assert not rig.engine.inspect().resident[Tag.KV_CACHE]


def test_a_server_by_version_cannot_wake_its_weights(rsync: Rig) -> None:
    assert rsync.engine.capabilities().tags == {Tag.KV_CACHE}


def test_a_server_without_dynamic_weights(tmp_path: Path) -> None:
    with fastdeploy(tmp_path, StandIn(dynamic=False)) as rig:
        assert rig.engine.capabilities().tags == frozenset()


def test_a_server_that_hides_its_configuration(rig: Rig) -> None:
    rig.net.answer["/config-info"] = (404, b"{}")
    assert rig.engine.capabilities().tags == frozenset(ALL_TAGS)


def test_the_next_process_of_the_worker_knows_what_sleeps(rig: Rig) -> None:
    rig.engine.pause("abort", Left())
    rig.engine.sleep(Tag.KV_CACHE, "discard", Left())
    engine = rig.again()
    state = engine.inspect()
    assert (state.resident[Tag.KV_CACHE], state.version) == (False, None)
    assert engine.identity() != rig.engine.identity()  # nothing proves that it is the same server


def test_a_restart_is_another_identity(tmp_path: Path) -> None:
    running = Running(application(StandIn()))
    engine = FastDeployEngine.connect(running.url, home=tmp_path)
    known = engine.identity()
    assert engine.identity() == known
    running.kill()
    running.boot(application(StandIn()))  # between two looks: nothing was asked in vain
    after = engine.identity()
    assert after != known
    assert engine.identity() == after
    running.kill()
    gone = engine.identity()  # nothing answers, nothing serves
    with pytest.raises(EngineUnreachable):
        engine.inspect()
    assert engine.identity() == gone
    running.boot(application(StandIn()))
    assert engine.identity() not in (known, after)
    engine.close()
    running.kill()


# -- weights


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
