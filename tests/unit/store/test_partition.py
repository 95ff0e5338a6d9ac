from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import numpy as np
import pytest

from moebus.consumers.store.decide import Rules
from moebus.consumers.store.env import Env, EnvClosed
from moebus.consumers.store.partition import Guard, Partition
from moebus.consumers.store.removal import Removal
from moebus.consumers.store.state import WHOLE, dump_attempt
from moebus.consumers.store.tables import Meta
from moebus.consumers.store.view import View, rows_of
from moebus.schemas.errors import SettingsError
from moebus.schemas.record import Base, CheckLevel, Clear, Delete, encode
from moebus.schemas.route_errors import RouteCorrupt, RouteDeleted
from tests.support.routes import Attempt, attempt_id, make_attempt

GUARD = Guard("cluster", "topic")
RULES = Rules(open_ttl_ms=1_000, keep_ttl_ms=10_000, fence_ttl_ms=50_000)


@pytest.fixture
def partition(tmp_path: Path) -> Iterator[Partition]:
    made = open_at(tmp_path)
    yield made
    made.close()


def open_at(path: Path, guard: Guard = GUARD, rules: Rules = RULES) -> Partition:
    return Partition(0, path, guard, rules, 16 << 20, sync=False)


def feed(partition: Partition, *records: bytes, now_ms: int = 0) -> list[str]:
    """Verdicts; committed."""
    first = partition.next_offset or 0
    verdicts = [partition.apply(first + n, record, now_ms).verdict for n, record in enumerate(records)]
    partition.commit()
    return [str(verdict) for verdict in verdicts]


def state_of(partition: Partition, attempt: Attempt) -> str:
    found = [s for s in View(partition).find(attempt.header.key).attempts if s.header == attempt.header]
    return found[0].state if found else "unknown"


def test_a_delete_counts_for_reads_before_it_is_committed(partition: Partition) -> None:
    kept, gone = make_attempt("a:10", number=1), make_attempt("a:1:0", number=2)
    feed(partition, *kept.records, *gone.records)
    partition.apply(4, encode(Delete("run", "a:1", attempt_id(9))), 0)
    assert [state_of(partition, one) for one in (kept, gone)] == ["whole", "gone"]
    assert [s.key.rollout_id for s in View(partition).page("run", None, b"", 10)] == ["a:10"]
    assert "a:1" in (View(partition).find(gone.header.key).fence or "")
    partition.rollback()
    assert state_of(partition, gone) == "whole"
    partition.apply(4, encode(Clear("run", 0, attempt_id(9))), 0)
    assert state_of(partition, kept) == "gone"
    partition.commit()
    assert [state_of(partition, one) for one in (kept, gone)] == ["gone", "gone"]


def test_a_whole_attempt_is_known_by_its_first_bytes(partition: Partition) -> None:
    whole, half = make_attempt("whole", number=1), make_attempt("half", number=2, rows=4, chunks=2)
    feed(partition, *whole.records, half.records[0])
    states = [View(partition).find(one.header.key).attempts[0] for one in (whole, half)]
    assert [dump_attempt(state).startswith(WHOLE) for state in states] == [True, False]
    assert not dump_attempt(states[0].ended("gone", "x", 0)).startswith(WHOLE)


def test_time_takes_away(partition: Partition) -> None:
    whole, half = make_attempt("whole", number=1), make_attempt("half", number=2, rows=4, chunks=2)
    feed(partition, *whole.records, half.records[0], now_ms=100)
    partition.tidy(1_100)
    partition.commit()
    assert [state_of(partition, one) for one in (whole, half)] == ["whole", "open"]
    partition.tidy(1_101)
    partition.commit()
    assert state_of(partition, half) == "lost"
    partition.tidy(10_101)
    assert partition.commit().removed == {"age": 1}
    assert [state_of(partition, one) for one in (whole, half)] == ["gone", "lost"]
    assert partition.figures().whole == 0
    partition.tidy(70_000)
    partition.commit()
    assert [state_of(partition, one) for one in (whole, half)] == ["unknown", "unknown"]


def test_a_lost_attempt_can_be_sent_again_whole(partition: Partition) -> None:
    attempt = make_attempt("a", rows=4, chunks=2)
    feed(partition, attempt.records[0])
    assert feed(partition, *attempt.records[1:], now_ms=2_000) == ["stored", "stored"]
    assert state_of(partition, attempt) == "open"
    assert feed(partition, *attempt.records, now_ms=2_001) == ["completed", "duplicate", "duplicate"]
    assert state_of(partition, attempt) == "whole"


def test_fences_live_as_long_as_they_must(partition: Partition) -> None:
    late = make_attempt("a", number=1)
    feed(partition, encode(Delete("run", "a", attempt_id(9))), encode(Clear("old", 3, attempt_id(8))), now_ms=0)
    assert feed(partition, late.records[0], now_ms=49_000) == ["refused"]
    partition.tidy(200_000)
    partition.commit()
    assert feed(partition, make_attempt("a", number=2).records[0], now_ms=200_000) == ["stored"]
    assert feed(partition, make_attempt("a", run="old", number=3).records[0], now_ms=200_000) == ["refused"]


def test_a_lower_epoch_does_not_lower_a_fence(partition: Partition) -> None:
    feed(partition, encode(Delete("run", "a", attempt_id(9), 5)), encode(Delete("run", "a", attempt_id(8), 2)))
    feed(partition, encode(Clear("run", 1, attempt_id(7))))
    verdicts = [feed(partition, make_attempt("a:1", number=n, epoch=n).records[0])[0] for n in (1, 5, 6)]
    assert verdicts == ["refused", "refused", "stored"]


def test_base_rows_outlive_the_base_and_are_freed_after_the_last_user(partition: Partition) -> None:
    first = make_attempt("a:0:0:0", number=1, rows=6, chunks=3)
    second = make_attempt("a:0:1:0", number=2, rows=4, base=Base(attempt_id(1), 6, "a:0:0:0"))
    third = make_attempt("a:0:2:0", number=3, rows=2, base=Base(attempt_id(2), 10, "a:0:1:0"))
    feed(partition, *first.records, *second.records, *third.records)
    feed(partition, encode(Delete("run", "a:0:0", attempt_id(9))), encode(Delete("run", "a:0:1", attempt_id(9))))
    drain(partition)
    view = View(partition)
    (state,) = view.find(third.header.key).attempts
    rows = np.concatenate(list(rows_of(view, view.plan(state, 0, 12))))
    np.testing.assert_array_equal(rows, np.concatenate([first.routes, second.routes, third.routes]))
    feed(partition, encode(Delete("run", "a", attempt_id(9))))
    drain(partition)
    assert (blobs(partition), partition.figures().whole) == (0, 0)


def test_many_rollouts_under_one_prefix_are_gone_at_once_and_taken_away_in_slices(
    partition: Partition, tmp_path: Path
) -> None:
    for number in range(1, 1500):
        feed_quietly(partition, make_attempt(f"p:{number}", number=number, rows=1, group="g"))
        if number % 100 == 0:
            partition.commit()
    partition.commit()
    assert partition.figures().whole == 1499
    first, last = make_attempt("p:1", number=1, rows=1), make_attempt("p:1499", number=1499, rows=1, group="g")
    partition.apply(partition.next_offset or 0, encode(Delete("run", "p", attempt_id(9999))), 0)
    assert state_of(partition, last) == "gone"
    assert partition.commit().removed == {"delete": 50}
    # half way: nothing is seen of it, nothing goes on from it, what comes late is refused, new epochs are not
    assert View(partition).page("run", None, b"", 10) == []
    assert (state_of(partition, last), state_of(partition, first)) == ("gone", "unknown")
    turn = make_attempt("q", number=3000, rows=2, base=Base(attempt_id(1499), 1, "p:1499"), group="g")
    new = make_attempt("p:1499", number=3001, rows=2, epoch=1, group="g")
    assert feed(partition, *turn.records)[0] == "quarantined"
    assert feed(partition, *last.records) == ["refused"] * 2
    assert feed(partition, *new.records) == ["stored", "completed"]
    partition.close()
    again = open_at(tmp_path)  # a restart goes on with it
    assert state_of(again, last) == "gone"
    removed: Counter[str] = Counter()
    while again.tidy(0):
        removed += again.commit().removed
    removed += again.commit().removed
    assert removed == {"delete": 1449}
    assert (blobs(again), again.figures().whole) == (1, 1)
    assert [one.key.rollout_id for one in View(again).page("run", None, b"", 10)] == ["p:1499"]
    again.close()


def test_readers_know_of_a_delete_before_anything_is_taken_away(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = [make_attempt(f"p:{number}", number=number, group="g") for number in range(1, 4)]
    feed(partition, *(record for one in attempts for record in one.records))
    seen: list[list[str]] = []
    remove = Removal.remove

    def watched(self: Removal, *given: Any) -> None:
        seen.append([state_of(partition, one) for one in attempts])
        remove(self, *given)

    monkeypatch.setattr(Removal, "remove", watched)
    feed(partition, encode(Delete("run", "p", attempt_id(99))))
    assert seen == [["gone"] * 3] * 3


def test_age_takes_away_in_slices_and_gives_way_between(partition: Partition) -> None:
    for number in range(1, 121):
        feed_quietly(partition, make_attempt(f"p:{number}", number=number, rows=1, group="g"))
    partition.commit()
    gave: list[int] = []

    def give_way() -> None:
        gave.append(partition.figures().whole)

    slices = []
    more = True
    while more:
        more = partition.tidy(RULES.keep_ttl_ms + 1, give_way)
        slices.append(partition.commit().removed["age"])
    assert [size for size in slices if size] == [50, 50, 20]
    assert len(gave) >= 120
    assert (blobs(partition), partition.figures().whole) == (0, 0)


def test_fences_that_are_due_go_without_a_pause(partition: Partition) -> None:
    feed(partition, *(encode(Delete("run", f"none:{number}", attempt_id(number))) for number in range(1, 121)))
    turns = 0
    while partition.tidy(RULES.fence_ttl_ms + 1):
        partition.commit()
        turns += 1
    partition.commit()
    with partition.reading() as (tables, _):
        assert tables.fence("run", "none:1") is None
        assert tables.due(b"f", RULES.fence_ttl_ms + 1, 1) == []
    assert turns == 2


def test_what_is_taken_in_while_a_batch_is_open_gives_way_to_nobody(partition: Partition) -> None:
    feed(partition, *(r for n in range(1, 81) for r in make_attempt(f"p:{n}", number=n, rows=1, group="g").records))
    gave: list[int] = []
    feed(partition, encode(Delete("run", "p", attempt_id(9997))))
    feed_quietly(partition, make_attempt("q", number=500, rows=1, group="g"))
    partition.tidy(0, lambda: gave.append(1))
    before = len(gave)
    assert before >= 30  # what the delete had left over
    partition.apply(partition.next_offset or 0, encode(Delete("run", "q", attempt_id(9998))), 0)
    assert (len(gave), partition.commit().removed) == (before, {"delete": 31})


def test_what_is_removed_is_freed_to_the_last_byte_without_a_pause(partition: Partition) -> None:
    """One blob each: of the last rollout of a slice nothing is left but its name."""
    for number in range(1, 101):
        feed_quietly(partition, make_attempt(f"p:{number}", number=number, rows=1, group="g"))
    feed(partition, encode(Delete("run", "p", attempt_id(9999))))
    turns = 0
    while partition.tidy(0):
        partition.commit()
        turns += 1
    partition.commit()
    with partition.reading() as (tables, _):
        assert not tables.trash(1)
    assert (blobs(partition), turns <= 4) == (0, True)


def test_a_clear_of_many_is_the_same(partition: Partition) -> None:
    for number in range(1, 300):
        feed_quietly(partition, make_attempt(f"p:{number}", number=number, rows=1, group="g"))
    kept = make_attempt("p:5", number=900, epoch=1)
    feed(partition, *kept.records)
    feed(partition, encode(Delete("run", "p", attempt_id(9998))), encode(Clear("run", 0, attempt_id(9999))))
    assert [one.header.attempt for one in View(partition).page("run", None, b"", 10)] == [kept.header.attempt]
    drain(partition)
    assert (blobs(partition), partition.figures().whole) == (1, 1)


def feed_quietly(partition: Partition, attempt: Attempt) -> None:
    for record in attempt.records:
        partition.apply((partition.next_offset or 0), record, 0)


def drain(partition: Partition) -> None:
    while partition.tidy(0):
        partition.commit()
    partition.commit()


def blobs(partition: Partition) -> int:
    with partition.reading() as (tables, _):
        return len(list(tables._keys("blobs")))


def test_damage_on_the_disk_is_found(partition: Partition) -> None:
    attempt = make_attempt("a", rows=6)
    feed(partition, *attempt.records)
    view = View(partition)
    (state,) = view.find(attempt.header.key).attempts
    plan = view.plan(state, 0, 6)
    txn = partition.env.begin_write()
    damaged = bytearray(attempt.records[0])
    damaged[-1] ^= 1
    txn.put(b"\0" * 7 + b"\1" + b"\0" * 4, bytes(damaged), db=partition.env.tables["blobs"])
    txn.commit()
    with pytest.raises(RouteCorrupt, match="checksum"):
        list(rows_of(view, plan))
    partition.rebuild(GUARD)
    with pytest.raises(RouteDeleted):
        list(rows_of(view, plan))


def test_data_of_another_log_is_thrown_away(tmp_path: Path) -> None:
    attempt = make_attempt("a")
    one = open_at(tmp_path)
    feed(one, *attempt.records)
    one.close()
    with pytest.raises(EnvClosed), one.reading():
        pass
    again = open_at(tmp_path)
    assert (again.next_offset, state_of(again, attempt)) == (2, "whole")
    again.close()
    (tmp_path / "mine.txt").write_text("not ours")
    other = open_at(tmp_path, replace(GUARD, topic_id="another"))
    assert (other.next_offset, state_of(other, attempt)) == (None, "unknown")
    other.close()
    assert (tmp_path / "mine.txt").exists()


def test_what_was_found_before_a_rebuild_is_not_read_by_its_old_numbers(partition: Partition) -> None:
    old, new = make_attempt("a:1", number=1), make_attempt("b:1", number=2)
    feed(partition, *old.records)
    partition.commit()
    view = View(partition)
    (state,) = view.find(old.header.key).attempts
    partition.rebuild(GUARD)
    feed(partition, *new.records)
    partition.commit()
    with pytest.raises(EnvClosed):
        view.plan(state, 0, 10)


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="data_dir"):
        open_at(tmp_path / "file")


@pytest.mark.parametrize(
    ("error", "free", "full"),
    [
        (lmdb.MapFullError("mdb_put: MDB_MAP_FULL"), 1 << 40, True),
        (lmdb.DiskError("mdb_txn_commit: No space left on device"), 0, True),
        (lmdb.Error("mdb_txn_commit: Input/output error"), 0, True),
        (lmdb.Error("mdb_txn_commit: Input/output error"), 1 << 40, False),
        (lmdb.Error("mdb_txn_commit: Disk quota exceeded"), 1 << 40, True),
        (lmdb.CorruptedError("mdb_get: MDB_CORRUPTED"), 0, False),
    ],
)
def test_a_write_cut_at_the_end_of_the_disk_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: lmdb.Error, free: int, full: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    env = Env(tmp_path, 1 << 20)
    assert env.is_full(error) is full
    env.close()


def test_what_was_once_taken_in_unseen_is_never_vouched_for(tmp_path: Path) -> None:
    def level(checks: CheckLevel) -> CheckLevel:
        partition = open_at(tmp_path, rules=replace(RULES, checks=checks))
        feed(partition, *make_attempt(number=partition.next_offset or 1, rows=2).records)
        partition.close()
        return partition.checked

    assert [level("full"), level("ids"), level("full")] == ["full", "ids", "ids"]
    assert [level("off"), level("full")] == ["off", "off"]
    again = open_at(tmp_path, Guard("cluster", "another topic"), replace(RULES, checks="full"))
    assert again.checked == "full", "it is empty"
    again.close()


def test_data_of_a_version_that_did_not_say_is_not_vouched_for() -> None:
    assert Meta("cluster", "topic").checks == "off"


def test_what_a_later_version_notes_of_a_partition_is_passed_over(tmp_path: Path) -> None:
    partition = open_at(tmp_path)
    feed(partition, *make_attempt().records)
    with partition.reading() as (tables, _):
        noted = asdict(tables.meta() or Meta("", ""))
    txn = partition.env.begin_write()
    txn.put(b"meta", json.dumps({**noted, "later": [1]}).encode(), db=partition.env.tables["meta"])
    txn.commit()
    partition.close()
    again = open_at(tmp_path)
    assert again.next_offset == 2
    again.close()
