"""A mirror against a target that can be told what to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebus.consumers.store.mirrors import p2pstore
from moebus.consumers.store.mirrors.inbox import Inbox
from moebus.consumers.store.mirrors.ledger import Held, Ledger
from moebus.consumers.store.mirrors.mirror import Mirror
from moebus.consumers.store.mirrors.pdtensor import pdtensor
from moebus.consumers.store.mirrors.port import Layout, MirrorDown, MirrorKind, Occupied, Shelf
from moebus.consumers.store.mirrors.source import Wanted
from moebus.consumers.store.mirrors.strikes import Strikes
from moebus.consumers.store.partition import Guard, Partition
from moebus.consumers.store.progress import Progress
from moebus.observability.clock import ManualClock
from moebus.observability.metrics import Metrics
from moebus.observability.settings import MirrorSettings
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import SettingsError
from moebus.schemas.record import Delete, encode
from tests.support.routes import Attempt, attempt_id, make_attempt
from tests.support.store import SMALL

LAYERS, TOP_K, MAX = 3, 2, 16
SIZE = LAYERS * MAX * TOP_K


class FakeTarget:
    """`held` by id. `down`: fails every call. `poison`: ids that fail. `puts`, `deletes`: calls."""

    kind: MirrorKind = "p2pstore"
    where = "fake"

    def __init__(self, forgets: bool = False) -> None:
        self.forgets = forgets
        self.held: dict[str, RouteArray] = {}
        self.down = False
        self.poison: set[str] = set()
        self.occupied: set[str] = set()
        self.born = "1"
        self.puts: list[str] = []
        self.deletes: list[list[str]] = []

    def refuses(self, rollout_id: str, layout: Layout) -> str | None:
        return "bad" if rollout_id.startswith("bad") else None

    def put(self, shelf: Shelf, fused: RouteArray) -> None:
        self._answer(shelf.rollout_id)
        if shelf.rollout_id in self.occupied:
            raise Occupied("somebody else's")
        self.puts.append(shelf.rollout_id)
        self.held[shelf.rollout_id] = fused

    def delete(self, shelves: Sequence[Shelf]) -> None:
        for shelf in shelves:
            self._answer(shelf.rollout_id)
        self.deletes.append([shelf.rollout_id for shelf in shelves])
        for shelf in shelves:
            self.held.pop(shelf.rollout_id, None)

    def has(self, shelf: Shelf) -> bool:
        self._answer(shelf.rollout_id)
        return shelf.rollout_id in self.held

    def life(self) -> str:
        return self.born

    def close(self) -> None:
        return None

    def _answer(self, rollout_id: str) -> None:
        if self.down or rollout_id in self.poison:
            raise MirrorDown(f"fake: no answer for {rollout_id}")


class Bench:
    """A partition, a target and a mirror that is stepped by hand."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.partition = Partition(0, folder / "index", Guard("c", "t"), SMALL.rules, 16 << 20, sync=False)
        self.partition.watched = True
        self.clock = ManualClock()
        self.progress = Progress(self.clock)
        self.progress.follow(0, 0, 0)
        self.progress.wait_for(None)
        self.target = FakeTarget()
        self.metrics = Metrics()
        self.settings = MirrorSettings(max_model_len=MAX, run="run", queue_bytes=2048, **settings)
        self.stopping = threading.Event()
        self.stopping.set()  # nothing waits
        self.ledgers: list[Ledger] = []
        self.mirror = self.make()

    def close(self) -> None:
        self.partition.close()
        for ledger in self.ledgers:
            ledger.close()

    def make(self) -> Mirror:
        ledger = Ledger(self.folder / "ledger.sqlite", self.target.forgets)
        self.ledgers.append(ledger)
        wanted = Wanted({0: self.partition}, self.progress, "run")
        return Mirror(self.target, ledger, wanted, self.settings, self.metrics, self.stopping, self.clock)

    def feed(self, *records: bytes, tell: bool = True) -> None:
        for record in records:
            self.partition.apply(self.partition.next_offset or 0, record, 0)
        changes = self.partition.commit().changes
        if tell:
            self.mirror.changed([key.rollout_id for key in changes.keys])

    def put(self, *attempts: Attempt, tell: bool = True) -> None:
        self.feed(*(record for attempt in attempts for record in attempt.records), tell=tell)

    def drop(self, prefix: str, tell: bool = True) -> None:
        self.feed(encode(Delete("run", prefix, attempt_id(99))), tell=tell)

    def settle(self, steps: int = 60) -> list[str]:
        """Ids held after that many steps."""
        for _ in range(steps):
            self.mirror.step()
        return sorted(self.target.held)

    def count(self, operation: str, outcome: str) -> float:
        return self.metrics.value(
            "moebus_mirror_operations_total", mirror="p2pstore", operation=operation, outcome=outcome
        )


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("moebus.consumers.store.mirrors.mirror._WAIT", 0.0)
    made = Bench(tmp_path)
    yield made
    made.close()


def test_put_and_delete(bench: Bench) -> None:
    one = make_attempt("a", rows=4)
    bench.settle(3)  # the look at everything with which it begins
    bench.put(one, make_attempt("b", number=2), make_attempt("bad", number=3))
    assert bench.settle() == ["a", "b"]
    fused = bench.target.held["a"]
    assert fused.dtype == np.uint8
    assert fused.shape == (LAYERS, MAX, TOP_K)
    np.testing.assert_array_equal(fused[:, :4].transpose(1, 0, 2), one.routes)
    assert (fused[:, 4:] == 255).all()
    bench.drop("a")
    assert bench.settle() == ["b"]
    assert (bench.count("put", "ok"), bench.count("delete", "ok"), bench.count("put", "refused")) == (2, 1, 1)


def test_what_was_deleted_before_its_turn_is_never_put(bench: Bench) -> None:
    bench.put(make_attempt("a"))
    bench.drop("a", tell=False)  # the event of the put is all that arrives
    assert bench.settle() == []
    assert bench.target.puts == []


def test_a_delete_in_the_middle_of_an_outage(bench: Bench) -> None:
    bench.put(make_attempt("a"), make_attempt("b", number=2))
    assert bench.settle() == ["a", "b"]
    bench.target.down = True
    bench.drop("a")
    bench.put(make_attempt("c", number=3))
    assert bench.settle() == ["a", "b"]
    up = bench.metrics.value
    assert up("moebus_mirror_up", mirror="p2pstore") == 0
    bench.target.down = False
    assert bench.settle() == ["b", "c"]
    assert up("moebus_mirror_up", mirror="p2pstore") == 1
    assert bench.target.puts == ["a", "b", "c"]


def test_one_that_always_fails_holds_up_nobody(bench: Bench) -> None:
    bench.put(*(make_attempt(f"r{number}", number=number) for number in range(5)))
    assert len(bench.settle()) == 5
    bench.target.poison = {"r2", "x"}
    bench.put(make_attempt("x", number=9))
    bench.drop("r0")
    bench.drop("r2")
    bench.drop("r3")
    bench.put(make_attempt("y", number=10))
    assert bench.settle() == ["r1", "r2", "r4", "y"]
    bench.target.poison = set()
    assert bench.settle() == ["r1", "r4", "x", "y"]


def test_a_full_inbox_drops_and_looks_at_everything_instead(bench: Bench) -> None:
    bench.put(make_attempt("gone", number=100))
    assert bench.settle() == ["gone"]
    bench.put(*(make_attempt(f"r{number}", number=number) for number in range(20)))
    bench.drop("gone")
    assert bench.metrics.value("moebus_mirror_dropped_total", mirror="p2pstore") > 5
    assert bench.settle(100) == sorted(f"r{number}" for number in range(20))


def test_a_crash_in_the_middle_of_a_put_leaves_nothing(bench: Bench) -> None:
    bench.put(make_attempt("a"))
    bench.target.poison = {"a"}
    bench.settle(3)
    bench.target.held["a"] = np.zeros((1, 1, 1), np.uint8)  # it arrived, though nobody said so
    bench.target.poison = set()
    bench.drop("a", tell=False)
    bench.mirror = bench.make()
    assert bench.settle() == []


def test_a_target_that_forgets_gets_everything_again(bench: Bench) -> None:
    bench.target.forgets = True
    bench.put(make_attempt("a"), make_attempt("b", number=2))
    assert bench.settle() == ["a", "b"]
    bench.target.held.clear()
    bench.mirror = bench.make()  # another process
    assert bench.settle() == ["a", "b"]
    bench.target.held.clear()
    bench.target.born = "2"
    bench.clock.advance(2)
    assert bench.settle() == ["a", "b"]


def test_memory_of_a_target_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moebus.consumers.store.mirrors.mirror._WAIT", 0.0)
    bench = Bench(tmp_path, max_bytes=1 << 20)
    bench.settings = bench.settings.model_copy(update={"max_bytes": 3 * SIZE})
    bench.target.forgets = True
    bench.mirror = bench.make()
    bench.settle(3)
    bench.put(*(make_attempt(f"r{number}", number=number) for number in range(5)))
    assert bench.settle() == ["r0", "r1", "r2"]
    assert bench.count("put", "full") == 2
    bench.drop("r1")
    assert len(bench.settle()) == 3
    bench.drop("r0")
    assert bench.settle() == ["r2", "r3", "r4"]
    bench.close()


def test_while_the_store_catches_up_nothing_is_deleted(bench: Bench) -> None:
    bench.put(make_attempt("a"))
    assert bench.settle() == ["a"]
    bench.partition.rebuild(bench.partition.guard)
    bench.partition.skip_to(0)
    bench.progress.follow(0, 2, 0)
    bench.mirror.inbox.look_again()
    assert bench.settle() == ["a"]
    bench.put(make_attempt("a"))
    bench.progress.advance(0, 2)
    assert bench.settle() == ["a"]
    assert bench.target.deletes == []


def test_what_is_somebody_elses_is_let_be(bench: Bench) -> None:
    bench.settle(3)
    bench.target.occupied = {"a"}
    bench.put(make_attempt("a"))
    assert bench.settle() == []
    bench.drop("a")
    bench.settle()
    assert bench.target.deletes == []
    assert bench.count("put", "refused") == 1


def test_an_inbox_is_bounded_by_bytes_and_takes_each_once() -> None:
    inbox = Inbox(1000)
    assert inbox.take_again()
    assert not inbox.take_again()
    assert inbox.add(["a", "b", "a"]) == 0
    assert len(inbox) == 2
    assert inbox.add(f"{number:050d}" for number in range(10)) == 8
    assert inbox.take_again()
    assert [inbox.take(0) for _ in range(5)] == ["a", "b", f"{0:050d}", f"{1:050d}", None]
    assert inbox.add(["c"]) == 0


def test_a_ledger_survives_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "m" / "x.sqlite"
    ledger = Ledger(path, forgets=False)
    shelves = [Shelf(f"id {number} '\"\n\0é", 3, "both") for number in range(700)]
    for number, shelf in enumerate(shelves):
        ledger.put(Held(shelf, b"x" * 16, number))
    ledger.put(Held(shelves[0], b"y" * 16, 5))
    ledger.drop(shelves[1].rollout_id)
    ledger.drop("never")
    assert (ledger.count, ledger.bytes) == (699, sum(range(700)) - 1 + 5)
    again = Ledger(path, forgets=False)
    assert (again.count, again.bytes) == (ledger.count, ledger.bytes)
    assert [held.shelf for held in again.all()] == sorted([shelves[0], *shelves[2:]], key=lambda one: one.rollout_id)
    assert again.get(shelves[0].rollout_id) == Held(shelves[0], b"y" * 16, 5)
    forgetful = Ledger(path, forgets=True)
    assert (forgetful.count, forgetful.bytes) == (699, 0)
    assert forgetful.get(shelves[5].rollout_id) == Held(shelves[5], b"", 0)
    for one in (ledger, again, forgetful):
        one.close()


def test_a_ledger_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(b"not a database at all, but long enough to be looked at" * 20)
    with pytest.raises(SettingsError, match=r"x\.sqlite cannot be used"):
        Ledger(path, forgets=False)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3), np.int32), np.zeros((2, 3), ">u2"), np.zeros((2, 3), np.uint64),
        np.zeros((4, 4), np.uint8)[:, ::2],
    ],
    ids=str,
)  # fmt: skip
def test_what_fastdeploy_never_has_is_no_file(array: Any) -> None:
    with pytest.raises(ValueError, match=r"unsigned|big-endian"):
        list(pdtensor(array))


def test_age_reaches_the_mirror(bench: Bench) -> None:
    bench.put(make_attempt("a"))
    assert bench.settle() == ["a"]
    bench.partition.tidy(SMALL.rules.keep_ttl_ms + 1)
    changes = bench.partition.commit().changes
    assert [key.rollout_id for key in changes.keys] == ["a"]
    bench.mirror.changed([key.rollout_id for key in changes.keys])
    assert bench.settle() == []


def test_deletes_do_not_queue_behind_puts_that_fail(bench: Bench) -> None:
    bench.put(make_attempt("old"))
    assert bench.settle() == ["old"]
    names = [f"r{number}" for number in range(5)]
    bench.target.poison = set(names)  # as a full disk
    bench.put(*(make_attempt(name, number=number) for number, name in enumerate(names, 2)))
    bench.mirror.step()
    bench.drop("old")
    bench.mirror.step()
    assert bench.target.held == {}


def test_one_that_fails_for_ever_is_put_aside_and_tried_again_later(bench: Bench) -> None:
    bench.settle(3)
    bench.target.poison = {"x"}
    for number in range(1, 12):
        bench.put(make_attempt("x", number=100 + number) if number == 1 else make_attempt(f"r{number}", number=number))
        bench.settle(3)
    assert len(bench.mirror.inbox) == 0
    failed = bench.count("put", "failed")
    assert bench.settle(20) == sorted(f"r{number}" for number in range(2, 12))
    assert bench.count("put", "failed") == failed
    bench.clock.advance(601)
    bench.progress.heard({})
    bench.target.poison = set()
    assert "x" in bench.settle(5)


def test_an_outage_is_nobodys_fault() -> None:
    strikes = Strikes()
    assert not any(strikes.failed("a", 0.0) for _ in range(50))
    for number in range(3):
        strikes.well("b")
        assert not strikes.failed("a", 0.0), number
    strikes.well("b")
    assert strikes.failed("a", 7.0)
    assert strikes.is_aside("a")
    assert strikes.due(606.0) == []
    assert strikes.due(607.0) == ["a"]
    assert not strikes.is_aside("a")


@pytest.mark.parametrize(("protocol", "hinted"), [("rdma", True), ("tcp", False)])
def test_a_machine_without_rdma_is_told_what_to_set(
    protocol: str, hinted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object) -> None:
        raise RuntimeError("no RDMA device")

    monkeypatch.setattr(p2pstore, "check_url", lambda _: None)
    monkeypatch.setattr(p2pstore, "_connect", connect)
    target = p2pstore.P2PTarget("redis://h:1", MirrorSettings(max_model_len=0, protocol=protocol))
    with pytest.raises(MirrorDown, match="no RDMA device") as raised:
        target.life()
    assert ("set store.mirror.protocol to tcp" in str(raised.value)) is hinted
    target.close()
