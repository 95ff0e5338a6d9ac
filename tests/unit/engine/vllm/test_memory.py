"""Sleep and wake over vLLM's calls, and their faults."""

from __future__ import annotations

import pytest

from moebus.engine.port import EngineFailed, EngineTimeout, EngineUnknown, Level, Unsupported
from moebus.schemas.tags import ALL_TAGS, Tag
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.vllm import CACHE, WEIGHT, New
from tests.support.wait import wait_until

LEVELS: tuple[Level, ...] = ("offload", "discard")
RECENT = (True, False)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("old", RECENT)
def test_cycles(new: New, level: Level, old: bool) -> None:
    rig = new(partial_wake_serves=old)
    before = rig.engine.inspect()
    for _ in range(2):
        rig.asleep(level)
        assert rig.resident == (False, False)
        assert rig.server.core.asleep == {"weights", "kv_cache"}
        found = rig.engine.inspect()
        assert (found.version, found.weights_valid, found.tainted) == (None, False, False)
        with pytest.raises(EngineFailed, match="weight and kv_cache"):
            rig.engine.resume()
        rig.engine.wakeup(WEIGHT, "restore", Left())
        assert rig.resident == (True, False)
        with pytest.raises(EngineFailed, match="kv_cache"):
            rig.engine.resume()
        assert rig.engine.inspect().paused
        rig.engine.wakeup(CACHE, "restore", Left())
        assert rig.engine.inspect().paused
        assert rig.server.faults.count("/resume") == 0
        rig.engine.resume()
        rig.server.faults.calls.clear()
    assert rig.engine.inspect() == before
    assert rig.ask()["weights"] == "w0"


@pytest.mark.parametrize("first", ALL_TAGS)
def test_a_partial_wake_does_not_serve(new: New, first: Tag) -> None:
    """vllm#44395: the server resumes scheduling on a wake; what waits would touch memory that is not there."""
    rig = new(partial_wake_serves=True)
    rig.asleep()
    waiting = rig.request(3)
    for tag in (first, *(tag for tag in ALL_TAGS if tag is not first)):
        rig.engine.wakeup(tag, "restore", Left())
        assert rig.engine.inspect().paused
        assert not waiting.done
        assert rig.server.core.shown == (0, 0), "not a single step"
    rig.engine.resume()
    assert waiting.result()["finish_reason"] == "length"


def test_a_pause_that_was_overtaken_is_asked_for_again(new: New) -> None:
    rig = new()
    rig.asleep()
    rig.server.faults.answer["/pause"] = (500, b"{}")
    call = Background(lambda: rig.engine.wakeup(WEIGHT, "restore", Left()))
    with pytest.raises(EngineFailed):
        call.result()
    rig.server.faults.answer.clear()
    assert not rig.engine.inspect().paused, "the server lies open with the cache asleep"
    assert rig.server.core.asleep == {"kv_cache"}
    rig.engine.pause("abort", Left())
    for tag in ALL_TAGS:
        rig.engine.wakeup(tag, "restore", Left())
    assert rig.engine.inspect().paused
    assert rig.resident == (True, True)


def test_tags_wake_one_by_one(new: New) -> None:
    """vllm#31618: a wake of several tags does nothing where one of them is awake."""
    rig = new(wake_skips_mixed=True)
    rig.asleep()
    rig.engine.wakeup(CACHE, "restore", Left())
    for tag in ALL_TAGS:
        rig.engine.wakeup(tag, "restore", Left())
    assert rig.server.core.asleep == set()
    assert [call for call in rig.server.faults.calls if "wake" in call] == [
        "POST /wake_up?tags=kv_cache",
        "POST /wake_up?tags=weights",
    ]


def test_what_sleeps_already_is_left_alone(new: New) -> None:
    rig = new()
    rig.asleep()
    calls = rig.server.faults.count("/sleep")
    for tag in ALL_TAGS:
        rig.engine.sleep(tag, "offload", Left())
    assert rig.server.faults.count("/sleep") == calls == 1


def test_the_other_tag_wakes_before_both_sleep_again(new: New) -> None:
    """The server ignores a sleep while anything sleeps."""
    rig = new()
    rig.asleep()
    rig.engine.wakeup(CACHE, "restore", Left())
    rig.engine.sleep(CACHE, "offload", Left())
    assert rig.server.core.asleep == {"weights", "kv_cache"}
    assert rig.resident == (False, False)
    rig.engine.wakeup(WEIGHT, "restore", Left())
    assert rig.server.core.weights == "w0"


def test_is_sleeping_of_a_paused_server_is_no_sleep(new: New) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    assert rig.resident == (True, True)
    assert rig.engine.inspect().weights_valid
    rig.engine.sleep(WEIGHT, "offload", Left())
    assert rig.resident == (False, False)


def test_sleep_needs_a_pause_and_time(new: New) -> None:
    rig = new()
    with pytest.raises(EngineFailed, match="pause"):
        rig.engine.sleep(WEIGHT, "offload", Left())
    rig.engine.pause("abort", Left())
    with pytest.raises(EngineTimeout):
        rig.engine.sleep(WEIGHT, "offload", Left(-1))
    with pytest.raises(EngineTimeout):
        rig.engine.wakeup(WEIGHT, "restore", Left(-1))
    assert rig.resident == (True, True)


def test_frozen_requests_need_the_cache(new: New) -> None:
    rig = new()
    call = rig.request(100_000)
    wait_until(lambda: rig.server.core.shown[0], 30.0, "the gauges count it")
    rig.engine.pause("keep", Left())
    with pytest.raises(EngineFailed, match="frozen"):
        rig.engine.sleep(CACHE, "offload", Left())
    rig.engine.pause("abort", Left())
    call.result()


def test_without_sleep_mode(new: New) -> None:
    rig = new(no_sleep_mode=True)
    rig.engine.pause("abort", Left())
    with pytest.raises(Unsupported, match="--enable-sleep-mode"):
        rig.engine.sleep(WEIGHT, "offload", Left())
    assert rig.resident == (True, True)


def test_woken_empty_holds_nothing(new: New) -> None:
    rig = new()
    for level in LEVELS:
        rig.asleep(level)
        rig.engine.wakeup(WEIGHT, "empty", Left())
        rig.engine.wakeup(CACHE, "restore", Left())
        found = rig.engine.inspect()
        assert (found.weights_valid, found.version) == (False, None)
        assert found.resident[WEIGHT]
        with pytest.raises(EngineFailed, match="weights"):
            rig.engine.resume()
        rig.update(f"again-{level}")
        rig.engine.resume()
        assert rig.engine.inspect().version == f"again-{level}"


@pytest.mark.parametrize("level", LEVELS)
def test_restore_of_committed_weights(new: New, level: Level) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    rig.update("v5", rig.checkpoint("w5"))
    rig.asleep(level)
    for tag in ALL_TAGS:
        rig.engine.wakeup(tag, "restore", Left())
    rig.engine.resume()
    assert rig.engine.inspect().version == "v5"
    assert rig.ask()["weights"] == "w5"


@pytest.mark.parametrize(("level", "held"), [("offload", True), ("discard", False)])
def test_restore_of_transferred_weights(new: New, level: Level, held: bool) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    for step in ("init", "start", "update", "finish"):
        rig.engine.transfer(step, "v7", {"weights": "w7"}, Left())
    rig.asleep(level)
    if held:
        rig.engine.wakeup(WEIGHT, "restore", Left())
        assert rig.engine.inspect().version == "v7"
        return
    with pytest.raises(EngineFailed, match="came by a transfer"):
        rig.engine.wakeup(WEIGHT, "restore", Left())
    assert rig.resident == (False, False)


def test_a_restore_that_fails_holds_nothing(new: New) -> None:
    rig = new()
    rig.asleep("discard")
    rig.server.bugs.reload_fails = True
    with pytest.raises(EngineFailed, match="cannot be restored"):
        rig.engine.wakeup(WEIGHT, "restore", Left())
    found = rig.engine.inspect()
    assert (found.weights_valid, found.tainted, found.version) == (False, False, None)
    rig.engine.wakeup(CACHE, "restore", Left())
    with pytest.raises(EngineFailed, match="weights"):
        rig.engine.resume()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cut_sleep(new: New, when: str) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    rig.server.faults.cut["/sleep"] = when  # type: ignore[assignment]
    if when == "before":
        with pytest.raises(EngineFailed, match="was not"):
            rig.engine.sleep(WEIGHT, "offload", Left())
    else:
        rig.engine.sleep(WEIGHT, "offload", Left())
        assert rig.resident == (False, False)
    rig.server.faults.cut.clear()
    rig.engine.sleep(WEIGHT, "offload", Left())
    assert rig.server.core.asleep == {"weights", "kv_cache"}


def test_a_cut_sleep_of_a_server_without_gauges_is_unknown(new: New) -> None:
    rig = new(no_stats=True)
    rig.engine.pause("abort", Left())
    rig.server.faults.cut["/sleep"] = "after"
    with pytest.raises(EngineUnknown):
        rig.engine.sleep(WEIGHT, "offload", Left())
    rig.server.faults.cut.clear()
    rig.engine.resume()
    assert rig.server.core.asleep == set(), "what is not known is woken before it serves"
    assert rig.ask()["weights"] == "w0"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_cut_wake(new: New, when: str) -> None:
    rig = new()
    rig.asleep()
    rig.server.faults.cut["/wake_up"] = when  # type: ignore[assignment]
    with pytest.raises(EngineUnknown):
        rig.engine.wakeup(WEIGHT, "restore", Left())
    assert rig.engine.inspect().paused
    rig.server.faults.cut.clear()
    rig.engine.wakeup(WEIGHT, "restore", Left())
    assert rig.resident == (True, False)
    assert rig.server.core.asleep == {"kv_cache"}


@pytest.mark.parametrize("notes", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_a_worker_that_restarts_beside_a_sleeping_server(new: New, level: Level, notes: bool) -> None:
    rig = new()
    rig.asleep(level)
    identity = rig.engine.identity()
    rig.restarted(notes=notes)
    assert rig.engine.identity() == identity
    assert rig.resident == (False, False)
    if notes or level == "offload":
        for tag in ALL_TAGS:
            rig.engine.wakeup(tag, "restore", Left())
        rig.engine.resume()
        assert rig.ask()["weights"] == "w0"
    else:
        with pytest.raises(EngineFailed, match="before this worker"):
            rig.engine.wakeup(WEIGHT, "restore", Left())


@pytest.mark.parametrize("notes", [True, False])
def test_a_worker_that_restarts_between_two_wakes(new: New, notes: bool) -> None:
    """The gauge of the server says awake after the first of them."""
    rig = new()
    rig.asleep()
    rig.engine.wakeup(WEIGHT, "restore", Left())
    rig.restarted(notes=notes)
    assert rig.engine.inspect().paused
    rig.engine.resume() if not notes else rig.engine.wakeup(CACHE, "restore", Left())
    assert rig.server.core.asleep == set()
    if notes:
        rig.engine.resume()
    assert rig.ask()["weights"] == "w0"


def test_notes_that_are_out_of_date(new: New) -> None:
    """A worker with notes elsewhere has been here since they were written."""
    rig = new()
    rig.engine.pause("abort", Left())
    rig.engine.sleep(WEIGHT, "offload", Left())
    for tag in ALL_TAGS:
        rig.engine.wakeup(tag, "restore", Left())
    rig.restarted(notes=False)
    for tag in ALL_TAGS:
        rig.engine.sleep(tag, "offload", Left())
    rig.restarted(notes=True)
    assert rig.resident == (False, False)
    rig.engine.resume()
    assert rig.server.core.asleep == set()
    assert rig.ask()["weights"] == "w0"


def test_woken_by_someone_else(new: New) -> None:
    rig = new()
    rig.asleep()
    core = rig.server.core
    core.call(lambda: core.wake(None)).result(30.0)
    assert not rig.engine.inspect().paused
    assert rig.resident == (True, True)


def test_a_server_that_restarts_has_all_its_memory(new: New) -> None:
    rig = new()
    rig.asleep("discard")
    rig.server.restart()
    assert rig.resident == (True, True)
    found = rig.engine.inspect()
    assert (found.version, found.paused, found.weights_valid) == ("default", False, True)
