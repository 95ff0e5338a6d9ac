"""LMDB, memory, a folder and an S3 API (moto's server) pass the contract of blobs; the last three that of objects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moebus.consumers.store.blobs.external import PROBE
from moebus.consumers.store.blobs.metered import MeteredObjects
from moebus.consumers.store.blobs.port import BlobMissing, BlobsUnavailable
from moebus.consumers.store.partition import StoreFull
from moebus.consumers.store.view import View
from moebus.observability.clock import SystemClock
from moebus.observability.metrics import Metrics
from moebus.schemas.route_errors import RouteCorrupt, RouteDeleted, StoreCatchingUp
from tests.contract.blob_suite import BlobSuite, drop, entries, feed, freed, rows
from tests.support.blob_world import FOLDER, FolderWorld, LmdbWorld, ObjectWorld, S3Server, S3World
from tests.support.routes import make_attempt
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    patch = pytest.MonkeyPatch()
    for name in list(os.environ):
        if name.startswith("AWS_"):
            patch.delenv(name)
    patch.setenv("AWS_ACCESS_KEY_ID", "testing")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    server = S3Server()
    yield server
    server.stop()
    patch.undo()


def make(kind: type[LmdbWorld], folder: Path, request: pytest.FixtureRequest) -> LmdbWorld:
    if kind is S3World:
        S3World.server = request.getfixturevalue("s3")
    return kind(folder)


class TestBlobs(BlobSuite):
    """The whole contract."""

    @pytest.fixture(params=[LmdbWorld, ObjectWorld, FolderWorld, S3World], ids=["lmdb", "memory", "folder", "s3"])
    def world(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LmdbWorld]:
        made = make(request.param, tmp_path, request)
        yield made
        made.close()


class TestObjects:
    """What blobs among objects do besides."""

    @pytest.fixture(params=[ObjectWorld, FolderWorld, S3World], ids=["memory", "folder", "s3"])
    def world(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectWorld]:
        made = make(request.param, tmp_path, request)
        assert isinstance(made, ObjectWorld)
        yield made
        made.close()

    def test_put_get_delete_list(self, world: ObjectWorld) -> None:
        objects = world.objects
        objects.put(f"{FOLDER}/x", bytes(range(100))).result(10)
        objects.put(f"{FOLDER}/y/z", b"").result(10)
        objects.put(f"{FOLDER}0/x", b"another partition's").result(10)
        assert objects.get(f"{FOLDER}/x", 0, 100).result(10) == bytes(range(100))
        assert objects.get(f"{FOLDER}/x", 90, 100).result(10) == bytes(range(90, 100))
        assert sorted(objects.names(FOLDER)) == [f"{FOLDER}/x", f"{FOLDER}/y/z"]
        for name, stop in ((f"{FOLDER}/x", 101), (f"{FOLDER}/no", 1)):
            with pytest.raises(BlobMissing):
                objects.get(name, 0, stop).result(10)
        objects.delete([f"{FOLDER}/no", f"{FOLDER}/x", f"{FOLDER}/y/z"]).result(10)
        objects.delete([f"{FOLDER}/x"]).result(10)
        assert list(objects.names(FOLDER)) == []
        assert list(objects.names("nothing")) == []
        assert list(objects.names(f"{FOLDER}0")) == [f"{FOLDER}0/x"]

    def test_more_names_than_a_page_has(self, world: ObjectWorld, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")  # of the server
        names = [f"{FOLDER}/n{number}" for number in range(35)]
        for future in [world.objects.put(name, b"x") for name in names]:
            future.result(30)
        assert sorted(world.objects.names(FOLDER)) == sorted(names)
        world.objects.delete(names).result(30)
        assert world.names() == []

    def test_bytes_are_there_before_the_index_and_orphans_are_swept(self, world: ObjectWorld) -> None:
        partition = world.open()
        kept, orphan = make_attempt("a", number=1, rows=20, chunks=2), make_attempt("b", number=2, rows=20, chunks=2)
        feed(partition, *kept.records)
        held = world.names()
        assert len(held) == 1  # the chunks of an attempt that are committed together are one object
        feed(partition, *orphan.records, commit=False)
        partition.blobs.settle()
        assert len(world.names()) == 2
        partition.env.close()  # as kill -9 does: nothing is undone
        partition = world.open()
        assert entries(partition) == 2
        assert partition.blobs.sweep(partition.reading) == 1
        assert world.names() == held
        np.testing.assert_array_equal(rows(partition, kept), kept.routes)
        partition.close()

    def test_what_is_being_written_is_not_swept(self, world: ObjectWorld) -> None:
        partition = world.open()
        attempt = make_attempt("a")
        feed(partition, *attempt.records, commit=False)
        partition.blobs.settle()
        assert partition.blobs.sweep(partition.reading) == 0
        partition.commit()
        assert partition.blobs.sweep(partition.reading) == 0
        np.testing.assert_array_equal(rows(partition, attempt), attempt.routes)
        partition.close()

    def test_strangers_are_let_be(self, world: ObjectWorld) -> None:
        partition = world.open()
        strangers = [f"{FOLDER}/readme.txt", f"{FOLDER}/{PROBE}", f"{FOLDER}1/0/x"]
        for name in strangers:
            world.objects.put(name, b"x").result(10)
        assert partition.blobs.sweep(partition.reading) == 0
        assert world.names() == sorted(strangers[:2])
        partition.close()

    def test_objects_go_after_the_commit_of_the_delete(self, world: ObjectWorld) -> None:
        partition = world.open()
        attempt = make_attempt("a", rows=30, chunks=3)
        feed(partition, *attempt.records[:2])
        feed(partition, *attempt.records[2:])
        assert len(world.names()) == 2
        drop(partition, attempt)
        assert len(world.names()) == 2  # the index knows; the objects go behind it
        freed(partition)
        assert world.names() == []
        partition.close()

    def test_an_outage_loses_nothing(self, world: ObjectWorld) -> None:
        partition = world.open()
        before, during = make_attempt("a", number=1), make_attempt("b", number=2)
        feed(partition, *before.records)
        with world.outage():
            with pytest.raises(StoreFull) as caught:
                feed(partition, *during.records)
            assert caught.value.lost
            assert world.objects.where in str(caught.value)
            assert partition.next_offset == len(before.records)
            assert partition.blobs.trouble() is not None
            with pytest.raises(StoreCatchingUp, match="cannot be had now"):
                rows(partition, before)
            assert partition.damaged is None
            drop(partition, before)  # needs no bytes
            partition.tidy(0)
            partition.rollback()
            with pytest.raises(BlobsUnavailable):
                partition.blobs.sweep(partition.reading)
        wait_until(lambda: partition.blobs.trouble() is None, 30, "the home to be well again")
        feed(partition, *during.records)
        np.testing.assert_array_equal(rows(partition, during), during.routes)
        wait_until(lambda: entries(partition) == 1 or _tidy(partition), 30, "the trash to be freed after the outage")
        partition.close()

    def test_chunks_side_by_side_are_one_request(self, world: ObjectWorld) -> None:
        metrics = Metrics()
        world.objects = MeteredObjects(world.objects, metrics, SystemClock())
        partition = world.open()
        one = make_attempt("a", number=1, rows=40, chunks=8)
        feed(partition, *one.records[:6])
        feed(partition, *one.records[6:])
        np.testing.assert_array_equal(rows(partition, one), one.routes)
        gets = metrics.value("moebus_blobs_operations_total", operation="get", outcome="ok")
        assert gets == 3  # four, two that lie with them, two of the second object
        np.testing.assert_array_equal(rows(partition, one, 7, 33), one.routes[7:33])
        partition.close()

    def test_an_object_that_is_lost(self, world: ObjectWorld) -> None:
        partition = world.open()
        attempt = make_attempt("a")
        feed(partition, *attempt.records)
        world.lose(world.names()[0])
        with pytest.raises(RouteCorrupt):
            rows(partition, attempt)
        assert partition.damaged is not None
        partition.close()

    def test_an_object_that_is_too_short(self, world: ObjectWorld) -> None:
        partition = world.open()
        attempt = make_attempt("a")
        feed(partition, *attempt.records)
        world.objects.put(world.names()[0], b"short").result(10)
        with pytest.raises(RouteCorrupt):
            rows(partition, attempt)
        partition.close()

    def test_a_read_that_a_rebuild_overtook_is_no_damage(self, world: ObjectWorld) -> None:
        partition = world.open()
        attempt = make_attempt("a", rows=30, chunks=3)
        feed(partition, *attempt.records)
        view = View(partition)
        plan = view.plan(view.find(attempt.header.key).attempts[0], 0, 30)
        asked = view.ask(plan.pieces[:1])
        with partition.reading() as (tables, _):
            entry = tables.blob(1, 2)
        assert entry is not None
        partition.rebuild(partition.guard)
        feed(partition, *attempt.records)
        partition.blobs.sweep(partition.reading)
        view.fetch(plan.pieces[0], None, asked[0])  # it was on its way
        late = partition.blobs.ask([(1, entry)])[0]
        with pytest.raises(RouteDeleted):
            view.fetch(plan.pieces[2], None, (entry, late))
        assert partition.damaged is None
        partition.close()

    def test_another_home_means_to_read_again(self, world: ObjectWorld) -> None:
        partition = world.open()
        feed(partition, *make_attempt("a").records)
        partition.close()
        partition = LmdbWorld(world.folder).open()
        assert partition.next_offset is None
        feed(partition, *make_attempt("a").records)
        partition.close()
        partition = world.open()
        assert partition.next_offset is None
        partition.close()


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    world = FolderWorld(tmp_path)
    world.objects.put(f"{FOLDER}/1/x", b"whole").result(10)
    whole = next(tmp_path.rglob("x"))
    half = whole.with_name("y#7")
    half.write_bytes(b"half")
    (whole.parent.parent / "2").mkdir()
    world.close()
    again = FolderWorld(tmp_path)
    assert again.objects.get(f"{FOLDER}/1/x", 0, 5).result(10) == b"whole"
    assert not half.exists()
    assert [path.name for path in whole.parent.parent.iterdir()] == ["1"]
    again.close()


def _tidy(partition: object) -> bool:
    from moebus.consumers.store.partition import Partition

    assert isinstance(partition, Partition)
    partition.tidy(0)
    partition.commit()
    return False
