"""FastDeployEngine: sleep, and waking without serving."""

from __future__ import annotations

from pathlib import Path

import pytest

from moebus.engine.fastdeploy.engine import FastDeployEngine
from moebus.engine.port import (
    EngineFailed,
    EngineUnknown,
    EngineUnreachable,
    Unsupported,
)
from moebus.schemas.tags import ALL_TAGS, Tag
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.stand_ins.fastdeploy import StandIn, application
from tests.support.stand_ins.running import Running
from tests.support.wait import wait_until
from tests.unit.engine.fastdeploy.rig import Rig, fastdeploy


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
