"""Restarts, late joiners, lost engines, two processes under one id."""

from __future__ import annotations

from typing import Any

import pytest

from moebus.consumers.control import LogReplaced, Superseded
from moebus.engine.port import EngineRefused
from moebus.schemas.responses import Code, Lifecycle, Residency
from moebus.schemas.tags import Tag
from tests.support.control_lab import Crash, CrashAt, Lab


def update(lab: Lab, version: str, decision: str = "commit", **fields: Any) -> str:
    request_id = lab.send("update_weights", {"version": version, "source": lab.file(version)}, **fields)
    lab.turn()
    lab.decide(request_id, decision)
    return request_id


def test_a_late_joiner_folds_the_log(lab: Lab) -> None:
    lab.host(lab.engine(), labels={"role": "rollout"})
    lab.ask("pause")
    update(lab, "v2")
    update(lab, "v3", "void")
    lab.ask("sleep", {"tags": "kv_cache"})
    late = lab.engine()
    lab.host(late, ids=("w2",), labels={"role": "rollout"})
    found = late.inspect()
    assert (found.version, found.paused) == ("v2", True)
    assert found.resident == {Tag.WEIGHT: True, Tag.KV_CACHE: False}
    member = lab.member("w2")
    assert member is not None
    assert member.state is not None
    assert (member.state.version, member.ready, member.reason) == ("v2", True, None)
    assert lab.ask("wakeup", {"resume": True}, target="w2").code is Code.OK


def test_a_joiner_of_a_running_fleet_runs(lab: Lab) -> None:
    lab.host(lab.engine())
    lab.ask("pause")
    update(lab, "v2")
    lab.ask("resume")
    late = lab.engine()
    lab.host(late, ids=("w2",))
    assert (late.inspect().version, late.inspect().paused) == ("v2", False)


def test_a_joiner_obeys_only_what_means_it(lab: Lab) -> None:
    lab.host(lab.engine(), labels={"role": "rollout"})
    lab.ask("pause", target="role=rollout")
    other = lab.engine()
    lab.host(other, ids=("w2",), labels={"role": "eval"})
    assert not other.inspect().paused


def test_a_joiner_whose_source_is_gone_is_behind_and_closed(lab: Lab) -> None:
    lab.host(lab.engine())
    lab.ask("pause")
    update(lab, "v2")
    lab.ask("resume")
    assert lab.weights is not None
    (lab.weights / "v2").unlink()
    late = lab.engine()
    lab.host(late, ids=("w2",))
    member = lab.member("w2")
    assert member is not None
    assert member.state is not None
    assert member.state.lifecycle is Lifecycle.BEHIND
    assert member.reason is not None
    assert "does not exist" in member.reason
    assert late.inspect().paused
    lab.file("v2")
    first = lab.hosts[-1]
    lab.crash(first)
    lab.silence()
    lab.host(late, ids=("w2",))
    assert (late.inspect().version, late.inspect().paused) == ("v2", False), "back to the fleet's RUNNING"


def test_a_fleet_whose_weights_came_by_transfer_leaves_a_joiner_behind(lab: Lab) -> None:
    lab.host(lab.engine())
    lab.ask("pause")
    for step in ("start", "finish"):
        assert lab.ask("transfer_weights", {"step": step, "version": "v2"}).code is Code.OK
    late = lab.engine()
    lab.host(late, ids=("w2",))
    refused = lab.ask("resume", target="w2")
    assert (refused.code, refused.message) == (
        Code.BEHIND,
        "the worker is BEHIND: version 'v2' has no source to load it from; update the weights",
    )


def test_a_run_starts_afresh_for_joiners(lab: Lab) -> None:
    lab.host(lab.engine())
    lab.ask("sleep")
    lab.ask("begin_run", {"run": "exp"})
    late = lab.engine("base")
    lab.host(late, ids=("w2",))
    member = lab.member("w2")
    assert member is not None
    assert member.state is not None
    assert (member.state.lifecycle, member.state.version, member.state.run) == (Lifecycle.PAUSED, "base", "exp")


def test_a_voided_command_is_not_replayed(lab: Lab) -> None:
    lab.host(lab.engine())
    pause = lab.send("pause")
    lab.turn()
    lab.decide(pause, "void")
    assert lab.answer(pause).code is Code.OK, "it stands where it was answered"
    late = lab.engine()
    lab.host(late, ids=("w2",))
    assert not late.inspect().paused


def test_a_restarted_worker_answers_what_it_missed_in_order(lab: Lab) -> None:
    engine = lab.engine()
    first = lab.host(engine)
    lab.ask("pause")
    lab.crash(first)
    late = lab.send("resume", deadline_s=1)
    second = lab.send("sleep", {"tags": "kv_cache"}, deadline_s=3600)
    third = lab.send("status", deadline_s=3600)
    bad = lab.send("resume", run="never")
    lab.silence()
    lab.host(engine)
    done = [lab.answer(request_id) for request_id in (late, second, third, bad)]
    assert [answer.code for answer in done] == [Code.EXPIRED, Code.OK, Code.OK, Code.INVALID]
    member = lab.member()
    assert member is not None
    assert member.state is not None
    assert member.state.tags[Tag.KV_CACHE] is Residency.ASLEEP
    assert member.since is not None
    assert member.since <= done[0].request_offset


def test_what_expired_while_it_was_away_still_counts(lab: Lab) -> None:
    engine = lab.engine()
    first = lab.host(engine)
    other = lab.engine()
    lab.host(other, ids=("w2",))
    lab.crash(first)
    pause = lab.send("pause")
    lab.turn()
    done = update(lab, "v2")
    voided = update(lab, "v3", "void")
    again = update(lab, "v4")
    lab.clock.advance(3600)
    lab.host(engine)
    codes = [lab.answer(request_id, "w1").code for request_id in (pause, done, voided, again)]
    assert codes == [Code.EXPIRED] * 4
    assert (engine.inspect().version, engine.inspect().paused) == ("v4", True)
    assert other.inspect().version == "v4"
    assert lab.ask("resume", target="w1").code is Code.OK


def test_a_restart_beside_a_lost_engine_restores_version_and_lifecycle(lab: Lab) -> None:
    engine = lab.engine()
    first = lab.host(engine)
    lab.ask("pause")
    update(lab, "v2")
    lab.ask("sleep", {"tags": "kv_cache"})
    lab.crash(first)
    engine.lose()
    lab.silence()
    lab.host(engine)
    found = engine.inspect()
    assert (found.version, found.paused, found.resident[Tag.KV_CACHE]) == ("v2", True, False)


def test_requests_in_flight_survive_a_restart_of_the_worker_alone(lab: Lab) -> None:
    engine = lab.engine()
    first = lab.host(engine)
    lab.crash(first)
    lab.silence()
    calls: list[str] = []
    engine.hook = lambda point, subject, deadline: calls.append(point)
    lab.host(engine)
    assert "pause" not in calls
    assert not engine.inspect().paused


def test_an_engine_lost_while_the_worker_lives(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    lab.ask("pause")
    update(lab, "v2")
    lab.ask("resume")
    engine.lose()
    lab.clock.advance(2.0)
    lab.turn()
    assert (engine.inspect().version, engine.inspect().paused) == ("v2", False)
    assert lab.health.ready() == {}
    assert (lab.member() or pytest.fail("gone")).engine_id == engine.identity()


def test_an_engine_lost_with_its_source_gone_never_serves(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    lab.ask("pause")
    update(lab, "v2")
    lab.ask("resume")
    engine.fail_next("stage", EngineRefused("gone"), times=5)
    engine.lose()
    lab.clock.advance(2.0)
    lab.turn()
    assert engine.inspect().paused
    assert lab.health.ready() == {"workers": "w1 is BEHIND: gone"}
    assert lab.ask("resume").code is Code.BEHIND


def test_a_staged_update_is_staged_again_by_a_new_process(lab: Lab) -> None:
    engine = lab.engine()
    first = lab.host(engine)
    lab.ask("pause")
    request_id = lab.send("update_weights", {"version": "v2", "source": lab.file("v2")})
    lab.turn()
    before = lab.answer(request_id)
    lab.crash(first)
    engine.lose()
    lab.silence()
    lab.host(engine)
    after = lab.answer(request_id)
    assert (before.boot_id != after.boot_id, after.result) == (True, before.result)
    lab.decide(request_id)
    assert [answer.code for answer in lab.answers(request_id)] == [Code.OK]


def test_a_crash_while_staging_again(lab: Lab) -> None:
    engine = lab.engine()
    first = lab.host(engine)
    lab.ask("pause")
    request_id = lab.send("update_weights", {"version": "v2", "source": lab.file("v2")})
    lab.turn()
    lab.crash(first)
    engine.lose()
    lab.silence()
    fault = CrashAt("after_state")
    fault.armed = True
    second = lab.host(engine, fault=fault, ready=False)
    with pytest.raises(Crash):
        lab.turn()
    lab.crash(second)
    lab.silence()
    lab.host(engine)
    lab.decide(request_id)
    assert [answer.code for answer in lab.answers(request_id)] == [Code.OK]
    assert engine.inspect().version == "v2"


@pytest.mark.parametrize("point", ["", "after_response", "after_second_state"])
@pytest.mark.parametrize("decision", ["commit", "void"])
def test_a_vote_binds_also_where_staging_again_fails(lab: Lab, decision: str, point: str) -> None:
    """Its first process voted; the second cannot stage and says so. It opens nothing before the decision, follows it,
    and gives no second answer."""
    engine = lab.engine()
    first = lab.host(engine)
    lab.ask("pause")
    request_id = lab.send("update_weights", {"version": "v2", "source": lab.file("v2")}, deadline_s=3600)
    lab.turn()
    lab.crash(first)
    lab.silence()
    engine.fail_next("stage", EngineRefused("disk read error"))
    fault = CrashAt(point)
    fault.armed = True
    if point:
        second = lab.host(engine, fault=fault, ready=False)
        with pytest.raises(Crash):
            lab.turn()
        lab.crash(second)
        lab.silence()
    lab.host(engine)
    assert lab.ask("resume").code is Code.CONFLICT
    assert engine.inspect().paused
    lab.decide(request_id, decision)
    assert [(answer.code, answer.message) for answer in lab.answers(request_id)] == [(Code.FAILED, "disk read error")]
    assert engine.inspect().version == ("v2" if decision == "commit" else "initial")
    assert lab.ask("resume").code is Code.OK


def test_a_graceful_leave_is_a_tombstone_and_a_fresh_start(lab: Lab) -> None:
    engine = lab.engine()
    host = lab.host(engine)
    lab.ask("pause")
    host.close()
    lab.hosts.remove(host)
    assert lab.member() is None
    missed = lab.send("sleep")
    lab.host(engine)
    assert lab.answers(missed) == [], "it was not a member then"
    assert engine.inspect().paused
    assert not any(engine.inspect().resident.values()), "the fold counts it"


def test_the_older_of_two_processes_stops(lab: Lab) -> None:
    engine = lab.engine()
    old = lab.host(engine)
    lab.ask("pause")
    missed = lab.send("sleep", deadline_s=3600)
    new = lab.host(lab.engine(), ready=False)
    with pytest.raises(Superseded, match="worker w1 was started again elsewhere") as caught:
        old.step()
    assert caught.value.exit_code == 6
    new.step()
    assert lab.health.ready()["workers"] == "w1: another process of this worker still lives"
    old.close()
    lab.hosts.remove(old)
    lab.turn()
    assert lab.health.ready() == {}
    assert [(one.boot_id, one.code) for one in lab.answers(missed)] == [(new.boot_id, Code.OK)], "handed over"
    assert lab.ask("wakeup", {"resume": True}).code is Code.OK


def test_a_successor_waits_for_ten_seconds_of_silence(lab: Lab) -> None:
    engine = lab.engine()
    lab.crash(lab.host(engine))
    lab.host(engine)
    lab.clock.advance(9.9)
    lab.turn()
    assert lab.member() is not None
    assert lab.health.ready()["workers"] == "w1: another process of this worker still lives"
    lab.clock.advance(0.2)
    lab.turn()
    assert lab.health.ready() == {}


def test_a_crash_in_the_recovery_is_recovered(lab: Lab) -> None:
    engine = lab.engine()
    fault = CrashAt("after_state")
    first = lab.host(engine, fault=fault)
    fault.armed = True
    request_id = lab.send("sleep", deadline_s=3600)
    with pytest.raises(Crash):
        lab.turn()
    lab.crash(first)
    lab.silence()
    again = CrashAt("after_second_state")
    again.armed = True
    second = lab.host(engine, fault=again, ready=False)
    with pytest.raises(Crash):
        lab.turn()
    lab.crash(second)
    lab.silence()
    lab.host(engine)
    assert [answer.code for answer in lab.answers(request_id)] == [Code.OK]
    assert not any(engine.inspect().resident.values())


def test_another_log_under_the_same_name_stops_the_process(lab: Lab) -> None:
    host = lab.host(lab.engine())
    lab.broker.cluster.cluster_id = "another"
    lab.clock.advance(31)
    with pytest.raises(LogReplaced, match="another topic than at the start"):
        host.step()
    lab.hosts.remove(host)
