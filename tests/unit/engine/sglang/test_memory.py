"""SGLangEngine: sleep and wake, and what is left of them when an answer or a worker is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moebus.engine.port import EngineFailed, EngineUnknown, Unsupported
from moebus.schemas.tags import ALL_TAGS, Tag
from tests.support.deadlines import Always, Left
from tests.support.stand_ins.sglang import StandIn
from tests.unit.engine.sglang.rig import Rig, sglang

GIB = 1 << 30


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Paused."""
    with sglang(tmp_path) as made:
        made.engine.pause("abort", Left())
        yield made


@pytest.mark.parametrize(("tag", "theirs", "size"), [(Tag.WEIGHT, "weights", 15), (Tag.KV_CACHE, "kv_cache", 40)])
def test_one_tag_sleeps_and_wakes(rig: Rig, tag: Tag, theirs: str, size: int) -> None:
    assert rig.engine.sleep(tag, "discard", Left()) == size * GIB
    assert rig.at.asleep == {theirs}
    state = rig.engine.inspect()
    assert (state.resident[tag], state.bytes_by_tag[tag]) == (False, 0)
    with pytest.raises(EngineFailed, match=str(tag)):
        rig.engine.resume()
    assert rig.engine.wakeup(tag, "restore", Left()) == size * GIB
    assert rig.at.asleep == set()
    assert rig.engine.inspect().resident[tag]
    rig.engine.resume()


def test_neither_is_asked_of_the_server_twice(rig: Rig) -> None:
    """It ends itself over memory that is released twice, or taken back while it is there."""
    for tag in ALL_TAGS:
        assert rig.engine.wakeup(tag, "restore", Left()) == 0
        rig.engine.sleep(tag, "discard", Left())
        assert rig.engine.sleep(tag, "discard", Left()) == 0
    assert len(rig.calls("/release_memory_occupation")) == 2
    assert not rig.at.dead


def test_a_half_awake_server_does_not_serve(rig: Rig) -> None:
    """vllm#44395, dynamo#13823: a partial wake, then traffic."""
    for tag in ALL_TAGS:
        rig.engine.sleep(tag, "discard", Left())
    rig.engine.wakeup(Tag.WEIGHT, "empty", Left())
    with pytest.raises(EngineFailed, match="kv_cache"):
        rig.engine.resume()
    rig.engine.wakeup(Tag.KV_CACHE, "restore", Left())
    with pytest.raises(EngineFailed, match="weight"):
        rig.engine.resume()
    assert rig.calls("/continue_generation") == []


def test_discarded_weights_are_loaded_again_from_where_they_came(rig: Rig, tmp_path: Path) -> None:
    rig.engine.sleep(Tag.WEIGHT, "discard", Left())
    rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
    assert rig.at.weights == "/models/m"
    assert rig.engine.inspect().version == "default"
    step = tmp_path / "step-5"
    step.mkdir()
    rig.engine.commit(rig.engine.stage("step-5", str(step), None, Left()), "reset", Left())
    rig.engine.sleep(Tag.WEIGHT, "discard", Left())
    assert rig.engine.inspect().version is None
    rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
    assert (rig.at.weights, rig.engine.inspect().version) == (str(step), "step-5")


def test_weights_kept_on_the_host_come_back_by_themselves(tmp_path: Path) -> None:
    with sglang(tmp_path, StandIn(cpu_backup=True)) as rig:
        rig.engine.pause("abort", Left())
        rig.engine.sleep(Tag.WEIGHT, "offload", Left())
        rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
        assert (rig.at.weights, rig.calls("/update_weights_from_disk")) == ("initial", [])
        assert rig.engine.inspect().weights_valid


def test_a_source_that_is_gone_leaves_the_weights_asleep(rig: Rig) -> None:
    rig.engine.sleep(Tag.WEIGHT, "discard", Left())
    rig.at.faults.load = "missing"
    with pytest.raises(EngineFailed, match="cannot be restored"):
        rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
    assert rig.at.asleep == {"weights"}
    assert not rig.engine.inspect().resident[Tag.WEIGHT]
    rig.at.faults.load = ""
    rig.engine.wakeup(Tag.WEIGHT, "restore", Left())
    assert rig.engine.inspect().weights_valid


def test_woken_empty_can_be_filled_by_a_second_wake(rig: Rig) -> None:
    rig.engine.sleep(Tag.WEIGHT, "discard", Left())
    rig.engine.wakeup(Tag.WEIGHT, "empty", Left())
    state = rig.engine.inspect()
    assert (state.resident[Tag.WEIGHT], state.weights_valid, state.version) == (True, False, None)
    assert rig.engine.wakeup(Tag.WEIGHT, "restore", Left()) == 0
    assert rig.engine.inspect().weights_valid


def test_what_a_server_was_not_started_for(tmp_path: Path) -> None:
    with sglang(tmp_path, StandIn(memory_saver=False)) as rig:
        assert rig.engine.capabilities().tags == frozenset()
        rig.engine.pause("abort", Left())
        with pytest.raises(Unsupported, match="--enable-memory-saver"):
            rig.engine.sleep(Tag.KV_CACHE, "discard", Left())
        assert rig.calls("/release_memory_occupation") == []


def test_weights_without_a_backup_cannot_be_offloaded(rig: Rig) -> None:
    can = rig.engine.capabilities()
    assert can.levels == {Tag.WEIGHT: {"discard"}, Tag.KV_CACHE: {"offload", "discard"}}
    with pytest.raises(Unsupported, match="--enable-weights-cpu-backup"):
        rig.engine.sleep(Tag.WEIGHT, "offload", Left())
    assert rig.at.asleep == set()


def test_memory_is_not_released_under_requests(rig: Rig) -> None:
    rig.at.waiting = ["a"]
    with pytest.raises(EngineFailed, match="1 requests"):
        rig.engine.sleep(Tag.WEIGHT, "discard", Left())
    rig.at.waiting = []
    rig.engine.resume()
    with pytest.raises(EngineFailed, match="pause it first"):
        rig.engine.sleep(Tag.WEIGHT, "discard", Left())
    assert not rig.at.dead


def test_a_release_that_answers_early_is_waited_for(rig: Rig) -> None:
    """slime#579."""
    rig.at.faults.lazy_release = 0.15
    rig.engine.sleep(Tag.KV_CACHE, "discard", Left())
    assert rig.at.asleep == {"kv_cache"}
    assert rig.at.releasing == set()


def test_a_late_release_is_proven_by_the_schedulers(rig: Rig) -> None:
    rig.engine.identity()
    rig.net.hold.add("/release_memory_occupation")
    assert rig.engine.sleep(Tag.KV_CACHE, "discard", Always(0.2)) == 40 * GIB
    rig.net.release()
    assert not rig.engine.inspect().resident[Tag.KV_CACHE]
    rig.engine.wakeup(Tag.KV_CACHE, "restore", Left())
    assert not rig.at.dead


Step = Callable[[Rig], int]
CUTS: list[tuple[str, Step, Step]] = [
    (
        "/release_memory_occupation",
        lambda rig: 0,
        lambda rig: rig.engine.sleep(Tag.WEIGHT, "discard", Left()),
    ),
    (
        "/resume_memory_occupation",
        lambda rig: rig.engine.sleep(Tag.WEIGHT, "discard", Left()),
        lambda rig: rig.engine.wakeup(Tag.WEIGHT, "empty", Left()),
    ),
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("path", "prepare", "step"), CUTS, ids=["sleep", "wakeup"])
def test_a_cut_connection_leaves_memory_unknown(rig: Rig, path: str, prepare: Step, step: Step, when: str) -> None:
    prepare(rig)
    rig.net.cut[path] = when  # type: ignore[assignment]
    with pytest.raises(EngineUnknown):
        step(rig)
    rig.net.cut.clear()
    state = rig.engine.inspect()
    assert (state.resident[Tag.WEIGHT], state.weights_valid, state.version) == (False, False, None)
    for engine in (rig.engine, rig.again()):  # also for the worker's next process
        for refused in (
            engine.resume,
            lambda engine=engine: engine.wakeup(Tag.WEIGHT, "restore", Left()),
            lambda engine=engine: engine.sleep(Tag.KV_CACHE, "discard", Left()),
        ):
            with pytest.raises(EngineFailed, match="restart it"):
                refused()
    assert not rig.at.dead
    rig.at.restart()
    assert rig.engine.inspect().weights_valid
    rig.engine.pause("abort", Left())
    rig.engine.resume()


def test_the_next_process_of_the_worker_knows_what_sleeps(rig: Rig) -> None:
    rig.engine.sleep(Tag.KV_CACHE, "discard", Left())
    engine = rig.again()
    state = engine.inspect()
    assert (state.paused, state.resident) == (True, {Tag.WEIGHT: True, Tag.KV_CACHE: False})
    assert engine.sleep(Tag.KV_CACHE, "discard", Left()) == 0
    engine.wakeup(Tag.KV_CACHE, "restore", Left())
    assert not rig.at.dead


def test_notes_of_another_life_count_for_nothing(rig: Rig) -> None:
    rig.engine.sleep(Tag.KV_CACHE, "discard", Left())
    rig.at.restart()
    engine = rig.again()
    assert engine.inspect().resident[Tag.KV_CACHE]
    assert not engine.inspect().paused


@pytest.mark.parametrize("content", [b"", b"[]", b'{"life": 3}', b"\xff", b'{"life": "x", "resident": {"w": 1}}'])
def test_notes_that_cannot_be_read(rig: Rig, content: bytes) -> None:
    (path,) = (rig.home / "engines").iterdir()
    path.write_bytes(content)
    assert rig.again().inspect().version == "default"


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "engines").write_text("a file")
    with sglang(tmp_path) as rig:
        rig.engine.pause("abort", Left())
        rig.engine.sleep(Tag.KV_CACHE, "discard", Left())
        assert not rig.engine.inspect().resident[Tag.KV_CACHE]
