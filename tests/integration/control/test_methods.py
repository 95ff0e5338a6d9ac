"""Each method end to end: log, worker, simulated engine, answer."""

from __future__ import annotations

import pytest

from moebus.engine.port import EngineFailed, EngineRefused, EngineTainted, EngineTimeout
from moebus.schemas.members import ops_key
from moebus.schemas.responses import Code, Lifecycle, Phase, Residency, Weights
from moebus.schemas.tags import Tag
from tests.support.control_lab import Lab


def test_pause_and_resume(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    paused = lab.ask("pause")
    assert (paused.code, paused.error_code, paused.phase) == (Code.OK, 200, Phase.DONE)
    assert paused.result == {"pause": {"aborted": 0, "finished": 0, "frozen": 0, "idle_confirmed": True}}
    assert paused.state is not None
    assert paused.state.lifecycle is Lifecycle.PAUSED
    assert engine.inspect().paused
    assert lab.ask("pause").code is Code.ALREADY
    assert lab.ask("resume").code is Code.OK
    assert not engine.inspect().paused
    assert lab.ask("resume").code is Code.ALREADY


def test_a_failed_pause_is_retried_truly(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    engine.fail_next("pause", EngineTimeout("2 requests still ran"))
    failed = lab.ask("pause")
    assert (failed.code, failed.error_code, failed.message) == (Code.TIMEOUT, 504, "2 requests still ran")
    assert failed.state is not None
    assert failed.state.lifecycle is Lifecycle.RUNNING
    assert lab.ask("pause").code is Code.OK
    assert engine.inspect().paused


def test_sleep_pauses_first_and_reports_each_tag(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    freed = engine.inspect().bytes_by_tag
    assert lab.ask("sleep", {"tags": "weight"}).code is Code.OK
    both = lab.ask("sleep")
    assert both.code is Code.OK
    assert both.result is not None
    assert both.result["tags"] == {
        "weight": {"outcome": "already", "freed_bytes": 0},
        "kv_cache": {"outcome": "done", "freed_bytes": freed[Tag.KV_CACHE]},
    }
    assert lab.ask("sleep").code is Code.ALREADY
    woken = lab.ask("wakeup", {"tags": ["kv_cache", "weights"]})
    assert woken.result is not None
    assert woken.result["tags"] == {
        "weight": {"outcome": "done", "allocated_bytes": freed[Tag.WEIGHT]},
        "kv_cache": {"outcome": "done", "allocated_bytes": freed[Tag.KV_CACHE]},
    }
    assert engine.inspect().paused, "waking opens no traffic"
    assert lab.ask("resume").code is Code.OK


def test_a_refused_sleep_leaves_the_engine_as_it_was(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    engine.fail_next("sleep", EngineFailed("no memory to offload to"), times=2)
    refused = lab.ask("sleep")
    assert refused.code is Code.FAILED
    assert refused.state is not None
    assert refused.state.lifecycle is Lifecycle.RUNNING
    assert not engine.inspect().paused


def test_one_tag_that_fails_is_partial(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    engine.fail_next("sleep", EngineFailed("no memory to offload to"))
    partial = lab.ask("sleep")
    assert (partial.code, partial.error_code) == (Code.PARTIAL, 207)
    assert partial.state is not None
    assert partial.state.tags == {Tag.WEIGHT: Residency.RESIDENT, Tag.KV_CACHE: Residency.ASLEEP}
    assert partial.state.lifecycle is Lifecycle.PAUSED
    assert engine.inspect().paused


def test_wakeup_with_resume_names_what_is_missing(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    lab.ask("sleep")
    partial = lab.ask("wakeup", {"tags": "weight", "resume": True})
    assert (partial.code, partial.message) == (Code.PARTIAL, "not resumed: kv_cache is asleep")
    assert engine.inspect().paused
    assert lab.ask("wakeup", {"resume": True}).code is Code.OK
    assert not engine.inspect().paused


def test_empty_weights_do_not_serve_until_filled(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    lab.ask("sleep", {"level": "discard"})
    woken = lab.ask("wakeup", {"tags": "weight", "weights": "empty"})
    assert woken.code is Code.OK
    assert woken.state is not None
    assert (woken.state.weights, woken.state.version) == (Weights.EMPTY, None)
    steps = [
        lab.ask("transfer_weights", {"step": step, "version": "v2", "info": {"rank": 0}})
        for step in ("init", "start", "update", "finish")
    ]
    assert [answer.code for answer in steps] == [Code.OK] * 4
    refused = lab.ask("resume")
    assert (refused.code, refused.message) == (Code.ILLEGAL_STATE, "kv_cache is asleep")
    done = lab.ask("wakeup", {"tags": "kv_cache", "resume": True})
    assert done.state is not None
    assert (done.code, done.state.lifecycle, done.state.version) == (Code.OK, Lifecycle.RUNNING, "v2")


def test_update_stage_and_commit(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    source = lab.file("v2")
    early = lab.ask("update_weights", {"version": "v2", "source": source})
    assert (early.code, early.message) == (Code.ILLEGAL_STATE, "the worker is RUNNING; pause it first")
    lab.ask("pause")
    staged = lab.ask("update_weights", {"version": "v2", "source": source}, id="up")
    assert (staged.phase, staged.code) == (Phase.STAGED, Code.OK)
    assert staged.result is not None
    assert (staged.result["staged"], staged.result["version"]) == ("loaded", "v2")
    assert staged.state is not None
    assert (staged.state.lifecycle, staged.state.version) == (Lifecycle.UPDATING, "initial")
    lab.decide("up")
    done = lab.answer("up")
    assert (done.phase, done.code) == (Phase.DONE, Code.OK)
    assert done.result is not None
    assert done.result["weights_digest"] == staged.result["weights_digest"] == engine.inspect().weights_digest
    assert done.state is not None
    assert (done.state.lifecycle, done.state.version) == (Lifecycle.PAUSED, "v2")
    assert lab.ask("resume", expect={"version": "v2"}).code is Code.OK


def test_update_of_a_bad_file_changes_nothing(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    lab.ask("pause")
    refused = lab.ask("update_weights", {"version": "v2", "source": "/etc/passwd"})
    assert refused.code is Code.FAILED
    assert "outside the allowed weight roots" in refused.message
    assert engine.inspect().version == "initial"
    assert lab.ask("resume").code is Code.OK


def test_a_commit_that_is_cut_off_taints(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    lab.ask("pause")
    update = lab.send("update_weights", {"version": "v2", "source": lab.file("v2")})
    lab.turn()
    engine.fail_next("commit", EngineTainted("stopped after 3 of 10 tensors"))
    lab.decide(update)
    assert lab.answer(update).code is Code.TAINTED
    assert lab.ask("resume").code is Code.TAINTED
    assert lab.ask("wakeup", {"resume": True}).code is Code.TAINTED
    assert lab.ask("pause").code is Code.ALREADY
    assert lab.ask("sleep", {"tags": "kv_cache"}).code is Code.OK
    assert lab.ask("wakeup", {"tags": "kv_cache"}).code is Code.OK
    assert lab.health.ready()["workers"] == "w1 is TAINTED: stopped after 3 of 10 tensors"
    cure = lab.send("update_weights", {"version": "v3", "source": lab.file("v3")})
    lab.turn()
    lab.decide(cure)
    assert lab.answer(cure).code is Code.OK
    assert lab.ask("resume").code is Code.OK
    assert lab.health.ready() == {}


def test_a_commit_that_fails_whole_is_behind(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    lab.ask("pause")
    update = lab.send("update_weights", {"version": "v2", "source": lab.file("v2")})
    lab.turn()
    engine.fail_next("commit", EngineFailed("device memory is full"))
    lab.decide(update)
    answer = lab.answer(update)
    assert (answer.code, answer.error_code, answer.message) == (Code.BEHIND, 503, "device memory is full")
    assert answer.state is not None
    assert (answer.state.lifecycle, answer.state.version) == (Lifecycle.BEHIND, "initial")
    assert lab.ask("resume").code is Code.BEHIND


def test_reset_cache_and_abort(lab: Lab) -> None:
    lab.host(lab.engine())
    assert lab.ask("reset_cache").result == {"cache_blocks_dropped": 0}
    aborted = lab.ask("abort_requests", {"ids": ["a", "b"]})
    assert aborted.result == {"aborted": [], "aborted_count": 0, "not_found": ["a", "b"]}
    lab.ask("sleep", {"tags": "kv_cache"})
    assert lab.ask("reset_cache").code is Code.ALREADY


def test_begin_run_wakes_and_pauses(lab: Lab) -> None:
    lab.host(lab.engine())
    lab.ask("sleep")
    begun = lab.ask("begin_run", {"run": "exp-1"})
    assert begun.code is Code.OK
    assert begun.state is not None
    assert (begun.state.run, begun.state.lifecycle) == ("exp-1", Lifecycle.PAUSED)
    assert set(begun.state.tags.values()) == {Residency.RESIDENT}
    assert lab.ask("resume", run="exp-1").code is Code.OK
    unknown = lab.ask("resume", run="exp-9")
    assert (unknown.code, unknown.message) == (Code.INVALID, "run: 'exp-9' was never begun")
    lab.ask("begin_run", {"run": "exp-2"})
    older = lab.ask("resume", run="exp-1")
    assert (older.code, older.message) == (Code.CONFLICT, "run 'exp-1' is not the current one ('exp-2')")
    assert lab.ask("begin_run", {"run": "exp-1"}).code is Code.CONFLICT


def test_status_shows_the_member(lab: Lab) -> None:
    lab.host(lab.engine(), labels={"role": "rollout"})
    answer = lab.ask("status", target="role=rollout")
    assert answer.code is Code.OK
    assert answer.result is not None
    member = answer.result["member"]
    assert isinstance(member, dict)
    assert (member["member_id"], member["ready"], member["engine_kind"]) == ("w1", True, "simulated")


@pytest.mark.parametrize("target", ["w2", ["w2", "w9"], "zone in (b,c)"])
def test_only_the_target_answers(lab: Lab, target: str | list[str]) -> None:
    lab.host(lab.engine(), ids=("w1",), labels={"zone": "a"})
    lab.host(lab.engine(), ids=("w2",), labels={"zone": "b"})
    request_id = lab.send("pause", target=target)
    lab.turn()
    assert [answer.worker_id for answer in lab.answers(request_id)] == ["w2"]


def test_an_unknown_error_of_the_engine_is_failed(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    engine.fail_next("pause", ZeroDivisionError("division by zero"))  # type: ignore[arg-type]
    failed = lab.ask("pause")
    assert (failed.code, failed.message) == (Code.FAILED, "ZeroDivisionError: division by zero")
    assert lab.ask("pause").code is Code.OK


def test_accepted_comes_first_and_operations_are_listed(lab: Lab) -> None:
    lab.host(lab.engine())
    request_id = lab.send("sleep")
    lab.turn()
    told = lab.answers(request_id, phase=None)
    assert [answer.phase for answer in told] == [Phase.ACCEPTED, *[Phase.PROGRESS] * 3, Phase.DONE]
    assert [answer.seq for answer in told] == list(range(5))
    assert [answer.message for answer in told][1:4] == ["pause", "sleep weight", "sleep kv_cache"]
    ops = [record for record in lab.records(lab.topics.members) if record.key == ops_key("w1")]
    assert len(ops) == 1
    assert lab.metrics.value("moebus_control_answers_total", method="sleep", code="ok") == 1


def test_refusals_of_the_engine_are_told(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    lab.ask("pause")
    engine.fail_next("stage", EngineRefused("layer 3 has the wrong shape"))
    refused = lab.ask("update_weights", {"version": "v2"})
    assert (refused.code, refused.message) == (Code.FAILED, "layer 3 has the wrong shape")
