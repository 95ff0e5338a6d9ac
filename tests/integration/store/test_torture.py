"""Twenty minutes of random traffic over 8 partitions in simulated time, on three stores that join, crash and leave.

Every store ends equal to a model that is too simple to be wrong; whoever read in between saw only whole, right ones.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import LogRecord
from moebus.consumers.reader.assembly import Assembler
from moebus.consumers.store.blobs.external import ExternalBlobs
from moebus.consumers.store.blobs.memory import MemoryObjects
from moebus.consumers.store.blobs.port import Blobs
from moebus.consumers.store.decide import Rules
from moebus.consumers.store.partition import Guard, Partition, StoreFull
from moebus.consumers.store.view import View, rows_of
from moebus.observability.clock import ManualClock
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import InvalidInput
from moebus.schemas.record import assemble
from tests.support.log_model import LogModel
from tests.support.route_traffic import Traffic

TOPIC = "t.routes.v1"
PARTITIONS = 8
MINUTES = 20
RULES = Rules(open_ttl_ms=120_000, keep_ttl_ms=600_000)
GUARD = Guard("cluster", "topic")


class Copy:
    """A store's partitions, fed by hand: any batches, crashes in the middle of one, a new folder after leaving."""

    def __init__(self, folder: Path, seed: int, objects: MemoryObjects | None) -> None:
        """`objects`: where blobs lie, None for LMDB."""
        self.folder = folder
        self.objects = objects
        self.random = random.Random(seed)
        self.partitions: list[Partition] = []
        self.life = 0
        self.crashes = 0
        self.failures = 0
        self.reads = 0

    def join(self, *, fresh: bool) -> None:
        """`fresh`: with nothing; else with what it had committed."""
        self.life += fresh
        base = self.folder / str(self.life)
        self.partitions = [
            Partition(number, base / str(number), GUARD, RULES, 64 << 20, sync=False, blobs=self.blobs(number))
            for number in range(PARTITIONS)
        ]

    def blobs(self, number: int) -> Blobs | None:
        if self.objects is None:
            return None
        return ExternalBlobs(self.objects, f"{self.folder.name}/{self.life}/{number}", threading.Event())

    def leave(self) -> None:
        """Like a crash: what is not committed is gone."""
        for partition in self.partitions:
            partition.close()
        self.partitions = []
        self.crashes += 1

    def follow(self, logs: list[list[LogRecord]], most: int) -> None:
        """Takes in up to `most` records of each partition, with commits and tidying in between."""
        for partition, log in zip(self.partitions, logs, strict=True):
            for record in log[partition.next_offset or 0 :][:most]:
                assert record.value is not None
                partition.apply(record.offset, record.value, record.timestamp_ms)
                if self.random.random() < 0.1 and not self.commit(partition):
                    break
                if self.random.random() < 0.02:
                    partition.blobs.sweep(partition.reading)
                if self.random.random() < 0.02:
                    partition.tidy(record.timestamp_ms)
            if self.random.random() < 0.5:
                self.commit(partition)

    def commit(self, partition: Partition) -> bool:
        """Among objects, some batches fail; they are read again."""
        if self.objects is not None and self.random.random() < 0.05:
            self.objects.down = "503"
        try:
            partition.commit()
        except StoreFull:
            self.failures += 1
            return False
        finally:
            if self.objects is not None:
                self.objects.down = None
        return True

    def look(self, truth: dict[bytes, RouteArray]) -> None:
        """A reader of anything: whole and right, whatever is going on."""
        partition = self.random.choice(self.partitions)
        view = View(partition)
        for state in view.page("run", None, b"", 5):
            assert state.end is not None
            found = [*rows_of(view, view.plan(state, 0, state.end.rows))]
            same(found, truth[state.header.attempt])
            self.reads += 1

    def finish(self, logs: list[list[LogRecord]], now_ms: int) -> None:
        """Reads to the end of the log and does what time demands."""
        while any((one.next_offset or 0) < len(log) for one, log in zip(self.partitions, logs, strict=True)):
            self.follow(logs, 500)
        for partition in self.partitions:
            partition.commit()
            for _ in range(2):  # what the first round removes is freed, among objects, by the second
                while partition.tidy(now_ms):
                    partition.commit()
                partition.commit()


def same(found: list[RouteArray], want: RouteArray) -> None:
    assert sum(len(part) for part in found) == len(want)
    if len(want):
        np.testing.assert_array_equal(np.concatenate(found), want)


def logs_of(broker: MemoryBroker) -> list[list[LogRecord]]:
    return [log.records for log in broker.cluster.topics[TOPIC].logs]


@pytest.mark.parametrize("external", [False, True], ids=["lmdb", "objects"])
def test_every_store_equals_the_model(tmp_path: Path, external: bool) -> None:
    if external:  # one is enough to see what the place of the blobs changes
        torture(tmp_path, seed=4, objects=MemoryObjects(), stores=1)
    else:
        torture(tmp_path, seed=4)


def torture(tmp_path: Path, seed: int, objects: MemoryObjects | None = None, stores: int = 3) -> None:
    """Any seed must pass; the test takes one."""
    clock = ManualClock()
    broker = MemoryBroker(clock)
    broker.create(TOPIC, PARTITIONS)
    traffic = Traffic(seed, TOPIC, PARTITIONS, clock, broker)
    copies = [Copy(tmp_path / f"s{number}", seed * 10 + number, objects) for number in range(stores)]
    for copy in copies:
        copy.join(fresh=True)
    rng = random.Random(seed)
    while clock.monotonic() < MINUTES * 60:
        traffic.step()
        for copy in copies:
            happening(copy, rng, logs_of(broker), traffic.truth)
    traffic.drain()
    clock.advance(rng.random())
    compare(copies, logs_of(broker), traffic, clock.now_ms())
    assert min(traffic.counts.values()) >= 3  # everything happened
    assert all(copy.crashes > 3 and copy.reads > 100 for copy in copies)

    traffic.clear_all()
    for copy in copies:
        copy.finish(logs_of(broker), clock.now_ms())
        for partition in copy.partitions:
            with partition.reading() as (tables, _):
                assert list(tables._keys("blobs")) == []  # nothing leaks
            partition.blobs.sweep(partition.reading)
        copy.leave()
        assert objects is None or copy.failures > 3
    if objects is not None:
        lives = {f"{copy.folder.name}/{copy.life}" for copy in copies}
        assert [name for name in objects.held if name.rsplit("/", 3)[0] in lives] == []
    broker.close()


def happening(copy: Copy, rng: random.Random, logs: list[list[LogRecord]], truth: dict[bytes, RouteArray]) -> None:
    if not copy.partitions:
        if rng.random() < 0.1:
            copy.join(fresh=rng.random() < 0.3)
        return
    chance = rng.random()
    if chance < 0.01:
        copy.leave()
    elif chance < 0.4:
        copy.follow(logs, rng.choice([1, 5, 50]))
    elif chance < 0.6:
        copy.look(truth)


def compare(copies: list[Copy], logs: list[list[LogRecord]], traffic: Traffic, now_ms: int) -> None:
    models = [LogModel(RULES) for _ in logs]
    for model, log in zip(models, logs, strict=True):
        for record in log:
            assert record.value is not None
            model.feed(record.value, record.timestamp_ms)
    readable = [model.whole(now_ms) for model in models]
    for held in readable:
        for attempt, rows in held.items():
            same([rows] if len(rows) else [], traffic.truth[attempt])
    assert sum(map(len, readable)) > 20
    for copy in copies:
        if not copy.partitions:
            copy.join(fresh=False)
        copy.finish(logs, now_ms)
        for partition, held, model in zip(copy.partitions, readable, models, strict=True):
            view = View(partition)
            found = view.page("run", None, b"", 10_000)
            assert {state.header.attempt for state in found} == set(held)
            for state in found:
                assert state.end is not None
                same([*rows_of(view, view.plan(state, 0, state.end.rows))], held[state.header.attempt])
            assert partition.figures().whole == len(held)
            used = {one.run: (one.used_bytes, one.open_bytes) for one in partition.runs()}
            assert used.get("run", (0, 0)) == model.usage("run", now_ms)
    for model, log in zip(models, logs, strict=True):
        check_stream(model, log, traffic)


def check_stream(model: LogModel, log: list[LogRecord], traffic: Traffic) -> None:
    """What a trainer's stream gives of the same log: every attempt without a base once, in the order of completion."""
    assembler = Assembler("run", 0, open_ttl_ms=RULES.open_ttl_ms)
    given: list[bytes] = []
    for record in log:
        whole = assembler.feed(record)
        if whole is None or whole.end is None:
            continue
        held = [whole.chunks[index] for index in sorted(whole.chunks)]
        if whole.header.base is None:
            try:
                own = assemble(whole.end, [one.chunk for one in held if one.chunk], [one.checksum for one in held])
            except InvalidInput:  # other content came first; the stream sets it aside
                continue
            given.append(whole.header.attempt)
            same([own] if len(own) else [], traffic.truth[whole.header.attempt])
    assert given == [one for one in model.completed if model.attempts[one].header.base is None]
