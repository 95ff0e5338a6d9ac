"""A store on real LMDB and an in-memory log: following, restarts, deletes, quarantine, rebuilds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moebus.broker.ports import OutRecord, TopicPartition
from moebus.consumers.store import follower
from moebus.consumers.store.decide import Rules
from moebus.consumers.store.partition import Partition
from moebus.schemas.errors import SettingsError
from moebus.schemas.members import decode_member
from moebus.schemas.record import Base, Clear, Delete, Outcome
from moebus.schemas.route_errors import StoreCatchingUp
from tests.support.routes import attempt_id, make_attempt
from tests.support.store import PARTITIONS, SMALL, Rig, error_of, held, read
from tests.support.wait import wait_until


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "data")


def test_rows_come_back_bit_for_bit(rig: Rig) -> None:
    one, two = make_attempt("a:0:0:0", number=1, rows=20, chunks=3), make_attempt("b", number=2, rows=5, choice=4)
    with rig.running() as store:
        rig.put(one, two)
        rig.caught_up(store)
        np.testing.assert_array_equal(read(store, "a:0:0:0"), one.routes)
        np.testing.assert_array_equal(read(store, "b", 4), two.routes)
        np.testing.assert_array_equal(read(store, "a:0:0:0", start=3, stop=15), one.routes[3:15])
        np.testing.assert_array_equal(read(store, "a:0:0:0", layers=(5, 1)), one.routes[:, [2, 0]])
        assert error_of(store, "b") == "RouteNotYet"


def test_half_a_rollout_is_never_seen(rig: Rig) -> None:
    attempt = make_attempt(rows=9, chunks=3)
    with rig.running() as store:
        for record in (attempt.end, *attempt.chunks[1:]):
            rig.put_raw(record)
            rig.caught_up(store)
            assert error_of(store, "a:0:0:0") == "RouteNotYet"
        rig.put_raw(attempt.chunks[0])
        rig.caught_up(store)
        np.testing.assert_array_equal(read(store, "a:0:0:0"), attempt.routes)


def test_restart_goes_on_at_the_stored_offset(rig: Rig) -> None:
    first, second = make_attempt("a", number=1, rows=8, chunks=2), make_attempt("b", number=2)
    rig.put(first)
    rig.put_raw(second.chunks[0])
    with rig.running():
        pass
    rig.put_raw(second.end)
    with rig.running() as store:
        np.testing.assert_array_equal(read(store, "a"), first.routes)
        np.testing.assert_array_equal(read(store, "b"), second.routes)
        assert rig.metrics.value("moebus_store_records_total", kind="end", outcome="completed") == 1
        assert rig.metrics.value("moebus_store_records_total", kind="chunk", outcome="stored") == 0
        wait_until(lambda: rig.metrics.value("moebus_store_rollouts") == 2, what="the gauge, set after the commit")


def test_what_was_not_committed_is_read_again_once(rig: Rig) -> None:
    attempt = make_attempt("a", rows=8, chunks=2)
    lazy = replace(SMALL, commit_interval=10.0)
    with rig.running(options=lazy) as store:
        for record in attempt.chunks:
            rig.put_raw(record)
        applied = rig.metrics
        wait_until(
            lambda: applied.value("moebus_store_records_total", kind="chunk", outcome="stored") == 2, what="both"
        )
        assert store.progress.lags()[rig.partition("a")].applied == 0  # applied, not committed
    rig.put_raw(attempt.end)
    with rig.running() as store:
        assert rig.metrics.value("moebus_store_records_total", kind="chunk", outcome="stored") == 2
        np.testing.assert_array_equal(read(store, "a"), attempt.routes)
        assert rig.metrics.value("moebus_store_rollouts") == 1


def test_delete_is_boundary_safe_and_final(rig: Rig) -> None:
    ids = ["a:1", "a:1:0:0", "a:10:0:0", "a:10"]
    rig.put(*(make_attempt(rollout_id, number=n, group="g") for n, rollout_id in enumerate(ids, 1)))
    with rig.running() as store:
        rig.fence(Delete("run", "a:1", attempt_id(50)))
        rig.fence(Delete("run", "a:1", attempt_id(50)))
        late = make_attempt("a:1:0:0", number=9, group="g")
        rig.put(late)
        rig.caught_up(store)
        assert held(store) == ["a:10", "a:10:0:0"]
        assert [error_of(store, rollout_id) for rollout_id in ids] == ["RouteDeleted", "RouteDeleted", "none", "none"]
        assert rig.metrics.value("moebus_store_deleted_rollouts_total", cause="delete") == 2
        assert rig.metrics.value("moebus_store_records_total", kind="end", outcome="refused") == 1
        again = make_attempt("a:1:0:0", number=10, group="g", epoch=1)
        rig.put(again)
        rig.caught_up(store)
        np.testing.assert_array_equal(read(store, "a:1:0:0"), again.routes)
    with rig.running() as store:  # the fence is durable
        rig.put(make_attempt("a:1", number=11, group="g"))
        rig.caught_up(store)
        assert held(store, "a:1") == ["a:1:0:0"]


def test_clear_removes_epochs_of_a_run(rig: Rig) -> None:
    rig.put(make_attempt("a", number=1, epoch=3), make_attempt("b", number=2, epoch=4), make_attempt("c", run="other"))
    rig.fence(Clear("run", 3, attempt_id(60)))
    rig.put(make_attempt("d", number=3, epoch=3))
    with rig.running() as store:
        assert held(store) == ["b"]
        assert [state.key.run for _, state in store.page("other", None, b"", 10)] == ["other"]
        assert rig.metrics.value("moebus_store_deleted_rollouts_total", cause="clear") == 1


def test_a_turn_on_a_base(rig: Rig) -> None:
    first = make_attempt("a:0:0:0", number=1, rows=6, outcome=Outcome(prompt_rows=4))
    whole = make_attempt("a:0:1:0", number=2, rows=3, chunks=2, base=Base(attempt_id(1), 6, "a:0:0:0"))
    prompt = make_attempt("a:0:0:0", number=3, rows=2, choice=1, base=Base(attempt_id(1), 4, "a:0:0:0"))
    orphan = make_attempt("a:0:2:0", number=4, rows=2, base=Base(attempt_id(77), 4, "a:0:0:0"))
    rig.put(first, whole)
    rig.put(prompt, orphan)
    rig.fence(Delete("run", "a:0:0", attempt_id(50)))
    with rig.running() as store:
        rows = np.concatenate([first.routes, whole.routes])
        np.testing.assert_array_equal(read(store, "a:0:1:0"), rows)
        np.testing.assert_array_equal(read(store, "a:0:1:0", start=4, stop=8), rows[4:8])
        assert error_of(store, "a:0:0:0", 1) == "RouteDeleted"
        assert error_of(store, "a:0:2:0") == "RouteNeverComing"
    reasons = [dict(record.headers)["reason"] for record in rig.broker.cluster.topics[rig.topics.dlt].logs[0].records]
    assert reasons == [b"base_not_held", b"base_not_held"]


def test_bad_records_go_to_the_dead_letters_and_the_next_is_served(rig: Rig) -> None:
    attempt, good = make_attempt("a", number=1, rows=4), make_attempt("b", number=2)
    broken = bytearray(attempt.records[0])
    broken[-1] ^= 1
    with rig.running() as store:
        where = rig.put_raw(bytes(broken), 0, b"k")
        rig.put_raw(b"nonsense", 0)
        rig.put_raw(b"", 0)
        rig.put_raw(None, 0)
        rig.put_raw(attempt.records[0][:60], 0)
        newer = bytearray(attempt.records[0])
        newer[4] = 2
        rig.put_raw(bytes(newer), 0)
        rig.put(good)
        rig.caught_up(store)
        assert error_of(store, "b") == "none"
    letters = rig.broker.cluster.topics[rig.topics.dlt].logs[0].records
    assert [dict(r.headers)["reason"] for r in letters] == [
        b"checksum", b"magic", b"empty", b"truncated", b"version",
    ]  # fmt: skip
    assert letters[0].key == f"{rig.topics.routes}/0/{where.offset}".encode()
    assert letters[0].value == bytes(broken)
    assert dict(letters[0].headers)["original-key"] == b"k"


def test_other_content_spoils_an_open_attempt(rig: Rig) -> None:
    attempt, other = make_attempt("a", rows=4, chunks=2), make_attempt("a", rows=4, chunks=2, seed=8)
    with rig.running() as store:
        rig.put_raw(attempt.chunks[0])
        rig.put_raw(attempt.chunks[0])
        rig.put_raw(other.chunks[0])
        rig.put(attempt)
        rig.caught_up(store)
        assert error_of(store, "a") == "RouteCorrupt"
        again = make_attempt("a", number=2)
        rig.put(again)
        rig.put_raw(make_attempt("a", number=2, seed=9).chunks[0])  # after completion it is only counted
        rig.caught_up(store)
        np.testing.assert_array_equal(read(store, "a"), again.routes)
        assert rig.metrics.value("moebus_store_records_total", kind="chunk", outcome="late") >= 1
    (letter,) = rig.broker.cluster.topics[rig.topics.dlt].logs[0].records
    assert (dict(letter.headers)["reason"], letter.value) == (b"other_content", other.chunks[0])


def test_several_attempts(rig: Rig) -> None:
    part = make_attempt("a", number=1, rows=3, outcome=Outcome("partial"))
    one, two = make_attempt("a", number=2), make_attempt("a", number=3)
    with rig.running() as store:
        rig.put(part)
        rig.caught_up(store)
        np.testing.assert_array_equal(read(store, "a"), part.routes)
        rig.put(one)
        rig.caught_up(store)
        np.testing.assert_array_equal(read(store, "a"), one.routes)
        rig.put(two)
        rig.caught_up(store)
        assert error_of(store, "a") == "AmbiguousAttempt"
        np.testing.assert_array_equal(read(store, "a", attempt=attempt_id(1)), part.routes)
        np.testing.assert_array_equal(read(store, "a", attempt=attempt_id(3)), two.routes)
        assert error_of(store, "a", attempt=attempt_id(4)) == "RouteNotYet"
        assert rig.metrics.value("moebus_store_repeated_rollouts_total") == 1, "the second complete one"


@pytest.mark.parametrize("interval", [0.001, 10.0], ids=["committed between", "in one batch"])
def test_only_a_second_complete_attempt_of_one_identity_is_counted(rig: Rig, interval: float) -> None:
    part = make_attempt("a", number=1, rows=3, outcome=Outcome("partial"))
    rig.put(part, make_attempt("a", number=2), make_attempt("a", number=2), make_attempt("a", number=3, choice=1))
    rig.put(make_attempt("b", number=4))
    rig.fence(Delete("run", "b", attempt_id(50)))
    rig.put(make_attempt("b", number=5, epoch=1))
    with rig.running(options=replace(SMALL, commit_interval=interval)) as store:
        assert held(store) == ["a", "a", "a", "b"]
        assert rig.metrics.value("moebus_store_repeated_rollouts_total") == 0
        rig.put(make_attempt("a", number=6), make_attempt("b", number=7, epoch=1))
        rig.caught_up(store)
        assert rig.metrics.value("moebus_store_repeated_rollouts_total") == 2


def test_what_never_becomes_whole_is_declared_lost_though_nothing_more_comes(rig: Rig) -> None:
    """Also in a partition whose log stands still: a trainer hears that it need not wait."""
    half, whole = make_attempt("half", rows=6, chunks=2), make_attempt("whole", number=2)
    rig.put_raw(half.chunks[0])
    rig.put(whole)
    with rig.running(options=replace(SMALL, rules=Rules(open_ttl_ms=300))) as store:
        wait_until(lambda: error_of(store, "half") == "RouteNeverComing", 30, "the verdict")
        assert error_of(store, "whole") == "none"


def test_one_identity_in_two_groups_is_ambiguous(rig: Rig) -> None:
    groups = [f"g{n}" for n in range(20)]
    other = next(group for group in groups if rig.partition(group) != rig.partition("g0"))
    rig.put(make_attempt("a", number=1, group="g0"), make_attempt("a", number=2, group=other))
    with rig.running() as store:
        assert error_of(store, "a") == "AmbiguousAttempt"
        np.testing.assert_array_equal(read(store, "a", group="g0"), make_attempt("a", number=1).routes)


def test_keep_last_turn(rig: Rig) -> None:
    options = replace(SMALL, rules=Rules(last_turn=True))
    ids = ["t:0:0:0", "t:0:1:0", "t:0:1:1", "t:0:2:1", "t:1:0:0"]
    with rig.running(options=options) as store:
        rig.put(*(make_attempt(rollout_id, number=n) for n, rollout_id in enumerate(ids, 1)))
        rig.put(make_attempt("t:0:1:1", number=9))
        rig.caught_up(store)
        assert held(store) == ["t:0:1:0", "t:0:2:1", "t:1:0:0"]
        assert error_of(store, "t:0:1:1") == "RouteDeleted"
        assert rig.metrics.value("moebus_store_records_total", kind="end", outcome="refused") == 1


def test_retention_that_passed_the_store_makes_it_rebuild(rig: Rig) -> None:
    old, new = make_attempt("a", number=1), make_attempt("a:2", number=2, group="a")
    rig.put(old)
    with rig.running() as store:
        assert held(store) == ["a"]
    rig.fence(Delete("run", "a", attempt_id(50)))  # nobody will read this one
    rig.put(new)
    tp = TopicPartition(rig.topics.routes, rig.partition("a"))
    rig.broker.truncate(tp, 3)
    with rig.running() as store:
        assert held(store) == ["a:2"]
        assert error_of(store, "a", group="a") == "RouteNotYet"


def test_another_topic_under_the_name_makes_it_rebuild(rig: Rig) -> None:
    rig.put(make_attempt("a", number=1))
    with rig.running() as store:
        assert held(store) == ["a"]
    rig.broker.delete_topic(rig.topics.routes)
    rig.broker.create(rig.topics.routes, PARTITIONS)
    rig.put(make_attempt("b", number=2))
    with rig.running() as store:
        assert held(store) == ["b"]


def test_outage_is_waited_out(rig: Rig) -> None:
    with rig.broker.outage():
        store = rig.store()
        store.start()
        with pytest.raises(StoreCatchingUp):
            read(store, "a")
        assert store.waiting() is not None
    rig.put(make_attempt("a"))
    rig.caught_up(store)
    assert error_of(store, "a") == "none"
    store.stop()
    store.stop()


def test_lost_acks_of_dead_letters_hold_the_offset_back(rig: Rig) -> None:
    with rig.running() as store:
        before = store.progress.lags()[0].applied
        with rig.broker.lost_acks():
            writer = rig.broker.writer("other")
            writer.append(OutRecord(rig.topics.routes, b"bad", None, (), 0))
            wait_until(lambda: rig.metrics.value("moebus_dead_letters_total", reason="magic"), what="the dead letter")
            assert store.progress.lags()[0].applied == before
            assert store.failure() is None


def test_members(rig: Rig) -> None:
    log = rig.broker.cluster.topics[rig.topics.members].logs[0]
    rig.put(make_attempt("a", number=1))
    with rig.running(partitions=(0, 2)):
        wait_until(lambda: log.records, what="the announcement")
        state = decode_member(log.records[0].value or b"")
        assert (state.kind, state.member_id, state.url) == ("store", "s1", "http://127.0.0.1:1")
        assert state.partitions == [0, 2]
    assert (log.records[-1].key, log.records[-1].value) == (b"s1", None)


def test_wrong_set_ups_are_named(rig: Rig) -> None:
    with rig.running():
        other = rig.store()
        with pytest.raises(SettingsError, match="in use by another store"):
            other.start()
        other.stop()
    store = rig.store(partitions=(7,))
    store.start()
    wait_until(store.failure, what="the failure")
    assert store.failure() == (2, f"partitions 7: {rig.topics.routes} has the partitions 0 to 2")
    store.stop()
    store = rig.store(partitions=tuple(range(100)))
    store.start()
    wait_until(store.failure, what="the failure")
    assert store.failure() == (
        2,
        f"partitions 3, 4, 5, 6, 7 and 92 more: {rig.topics.routes} has the partitions 0 to 2",
    )
    store.stop()


def test_a_whole_rollout_is_committed_as_soon_as_the_log_is_quiet(rig: Rig) -> None:
    patient = replace(SMALL, commit_interval=3600.0)
    with rig.running(options=patient) as store:
        attempt = make_attempt("a:0:0:0", rows=6, chunks=2)
        rig.put(attempt)
        wait_until(lambda: error_of(store, "a:0:0:0") == "none", 30, "the rollout, long before the interval")
        np.testing.assert_array_equal(read(store, "a:0:0:0"), attempt.routes)


def test_patience_with_readers_is_that_of_a_turn_however_many_partitions_there_are(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two turns records are read and committed: they must not wait for each partition's patience."""
    store = rig.store()
    said: list[str] = []
    tidy, begin = store._follower._tidy, store.courtesy.begin

    def tidied(number: int, partition: Partition) -> bool:
        said.append("tidy")
        return tidy(number, partition)

    def begun() -> None:
        said.append("begin")
        begin()

    monkeypatch.setattr(store._follower, "_tidy", tidied)
    monkeypatch.setattr(store.courtesy, "begin", begun)
    monkeypatch.setattr(follower, "_TEND", 0.01)
    store.start()
    try:
        wait_until(lambda: len(said) >= 2 * (1 + PARTITIONS), 30, what="two turns")
    finally:
        store.stop()
    turn = ["begin", *["tidy"] * PARTITIONS]
    assert said[: 2 * len(turn)] == turn * 2
