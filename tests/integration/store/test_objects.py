"""A store whose blobs lie among objects: outages stop ingest and lose nothing, lost objects come again from the log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moebus.consumers.store import RouteStore, StoreOptions
from moebus.consumers.store.blobs.memory import MemoryObjects
from moebus.consumers.store.blobs.place import Place
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Delete
from moebus.schemas.route_errors import StoreCatchingUp
from tests.integration.store.test_full import disk
from tests.support.routes import attempt_id, make_attempt
from tests.support.store import SMALL, Rig, error_of, held, read
from tests.support.wait import wait_until


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "data")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """4 MiB."""
    with disk(tmp_path / "disk", "4m") as folder:
        yield folder


@contextmanager
def running(rig: Rig, objects: MemoryObjects | None, options: StoreOptions = SMALL) -> Iterator[RouteStore]:
    store = RouteStore(
        rig.broker, rig.topics, rig.folder, store_id="s1", options=options, metrics=rig.metrics, objects=objects
    )
    store.start()
    try:
        yield store
    finally:
        store.stop()


def stopped(store: RouteStore, number: int) -> str | None:
    lag = store.progress.lags().get(number)
    return lag.full if lag is not None else None


def test_an_outage_stops_ingest_and_loses_nothing(rig: Rig, objects: MemoryObjects) -> None:
    before = make_attempt("a", number=1)
    later = [make_attempt(f"r{number}", number=number, rows=20, chunks=2, group="a") for number in range(2, 12)]
    rig.put(before)
    number = rig.partition("a")
    with running(rig, objects) as store:
        rig.caught_up(store)
        objects.down = "503 Slow Down"
        rig.put(*later)
        wait_until(lambda: stopped(store, number), 30, "ingest to stop")
        assert "503 Slow Down" in (store.waiting() or "")
        assert rig.metrics.value("moebus_store_ingest_stopped", partition=str(number)) == 1
        with pytest.raises(StoreCatchingUp, match="cannot be had now"):
            read(store, "a")
        assert error_of(store, "r2") == "RouteNotYet", "what was shown before its commit is gone with the batch"
        assert store.failure() is None
        objects.down = None
        rig.caught_up(store)
        wait_until(lambda: store.waiting() is None, 30, "the store to be well")
        assert held(store) == sorted(["a", *(attempt.header.rollout_id for attempt in later)])
        for attempt in (before, *later):
            np.testing.assert_array_equal(read(store, attempt.header.rollout_id), attempt.routes)
        assert rig.metrics.value("moebus_blobs_operations_total", operation="put", outcome="failed") > 0
        assert rig.metrics.value("moebus_blobs_bytes_total", operation="get") > 0


def test_deletes_are_taken_in_while_nothing_can_be_written(rig: Rig, objects: MemoryObjects) -> None:
    old, new = make_attempt("a", number=1), make_attempt("b", number=2, group="a")
    rig.put(old)
    number = rig.partition("a")
    with running(rig, objects) as store:
        rig.caught_up(store)
        objects.down = "503"
        rig.put(new)
        wait_until(lambda: stopped(store, number), 30, "ingest to stop")
        rig.fence(Delete("run", "a", attempt_id(50)))
        wait_until(lambda: error_of(store, "a") == "RouteDeleted", 30, "the delete to be read ahead")
        objects.down = None
        rig.caught_up(store)
        assert held(store) == ["b"]
        wait_until(lambda: len(objects.held) == 2, 30, "only the object of b, and the probe")


def test_a_slow_answer_holds_the_commit_but_no_reader_and_no_stop(rig: Rig, objects: MemoryObjects) -> None:
    attempt = make_attempt("a")
    with running(rig, objects) as store:
        rig.caught_up(store)
        objects.slow = True
        rig.put(attempt)
        stored = rig.metrics
        wait_until(lambda: stored.value("moebus_store_records_total", kind="end", outcome="completed") == 1, 30, "END")
        np.testing.assert_array_equal(read(store, "a"), attempt.routes)
        assert held(store) == [], "a listing shows what is committed"
    objects.slow = False
    with running(rig, objects) as store:
        rig.caught_up(store)
        np.testing.assert_array_equal(read(store, "a"), attempt.routes)
        wait_until(lambda: len(objects.held) == 1, 30, "the orphan of the first try to be swept")


def test_a_lost_object_is_an_error_and_comes_again_from_the_log(rig: Rig, objects: MemoryObjects) -> None:
    attempts = [make_attempt(f"r{number}", number=number, rows=20, chunks=2, group="a") for number in range(1, 6)]
    rig.put(*attempts)
    with running(rig, objects) as store:
        rig.caught_up(store)
        name = next(name for name in objects.held if attempt_id(3).hex() in name)
        del objects.held[name]
        assert error_of(store, "r3") == "RouteCorrupt"
        wait_until(lambda: error_of(store, "r3") == "none", 30, "the partition to be read again")
        for attempt in attempts:
            np.testing.assert_array_equal(read(store, attempt.header.rollout_id), attempt.routes)
        wait_until(lambda: len(objects.held) == len(attempts), 30, "the objects of the life before to be swept")
        assert rig.metrics.value("moebus_blobs_swept_total") >= len(attempts) - 1
        assert rig.metrics.value("moebus_blobs_operations_total", operation="get", outcome="missing") >= 1


def test_a_disk_that_goes_on_losing_is_not_read_again_all_the_time(rig: Rig, objects: MemoryObjects) -> None:
    rig.put(make_attempt("a"))
    with running(rig, objects) as store:
        rig.caught_up(store)
        objects.held.clear()
        assert error_of(store, "a") == "RouteCorrupt"
        wait_until(lambda: error_of(store, "a") == "none", 30, "the partition to be read again")
        objects.held.clear()
        wait_until(lambda: rig.metrics.value("moebus_store_records_total", kind="end", outcome="completed") == 2)
        assert error_of(store, "a") == "RouteCorrupt"
        rig.put(make_attempt("b", number=2, group="a"))
        rig.caught_up(store)  # it goes on
        assert error_of(store, "a") == "RouteCorrupt"
        assert rig.metrics.value("moebus_store_records_total", kind="end", outcome="completed") == 3


def test_from_lmdb_to_a_folder_and_back(rig: Rig, tmp_path: Path) -> None:
    attempt = make_attempt("a", rows=50, chunks=3)
    rig.put(attempt)
    place = StoreOptions(map_bytes=16 << 20, commit_interval=0.005, sync=True, blobs=Place(path=tmp_path / "blobs"))
    for options in (SMALL, place, SMALL, place):
        with running(rig, None, options) as store:
            rig.caught_up(store)
            np.testing.assert_array_equal(read(store, "a"), attempt.routes)
            assert store.waiting() is None
    files = [path for path in (tmp_path / "blobs").rglob("*-*") if path.is_file()]
    assert {path.relative_to(tmp_path / "blobs").parts[0] for path in files} == {"s1"}


def test_two_data_folders_of_one_name_share_nothing(rig: Rig, tmp_path: Path) -> None:
    options = StoreOptions(map_bytes=16 << 20, commit_interval=0.005, sync=False, blobs=Place(path=tmp_path / "blobs"))
    attempt = make_attempt("a")
    rig.put(attempt)
    other = Rig(tmp_path / "other", rig.broker)
    with running(rig, None, options) as one, running(other, None, options) as two:
        for store in (one, two):
            rig.caught_up(store)
        rig.fence(Delete("run", "b", attempt_id(9)))
        for store in (one, two):
            rig.caught_up(store)
            np.testing.assert_array_equal(read(store, "a"), attempt.routes)
    assert len(list((tmp_path / "blobs" / "s1").iterdir())) == 2


def test_a_full_disk_under_the_objects(rig: Rig, small_disk: Path) -> None:
    card = ModelCard(256, 8, tuple(range(10)))
    attempts = [
        make_attempt(f"r{number}", number=number, rows=1250, group="g", card=card, codec="raw")
        for number in range(1, 61)
    ]
    rig.put(*attempts)
    number = rig.partition("g")
    with running(rig, None, replace(SMALL, map_bytes=16 << 20, blobs=Place(path=small_disk / "blobs"))) as store:
        wait_until(lambda: stopped(store, number), 30, "ingest to stop")
        assert "No space left" in (stopped(store, number) or "")
        assert store.failure() is None
        for attempt in attempts[:45]:
            rig.fence(Delete("run", attempt.header.rollout_id, attempt_id(200)))
        rig.caught_up(store)
        assert held(store) == sorted(attempt.header.rollout_id for attempt in attempts[45:])
        for attempt in attempts[45:]:
            np.testing.assert_array_equal(read(store, attempt.header.rollout_id), attempt.routes)
    assert not list((small_disk / "blobs").rglob("*#*"))  # nothing half written is left
