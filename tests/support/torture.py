"""Random traffic against real stores and readers, faster than real time, and the comparison with the model at the end.

In parts that are all real but the broker, which is in memory, so that append times can run faster than the clock:
three stores with their HTTP join, leave and begin anew; readers ask by attempt, by reference, by listing and as a group
that rebalances in the middle; the traffic holds late records, retries, bases, contradictions, deletes and clears.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from moebus.broker.errors import BrokerUnavailable
from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import LogRecord
from moebus.broker.topics import Topics, ensure
from moebus.consumers.reader import RoutingReader
from moebus.consumers.reader.stream import StreamOptions
from moebus.consumers.store import RouteStore, StoreOptions, partition, removal, store_routes
from moebus.consumers.store.decide import Rules
from moebus.consumers.store.partition import Partition
from moebus.consumers.store.view import View, rows_of
from moebus.observability.clock import ManualClock
from moebus.observability.health import Health
from moebus.observability.http import HttpServer
from moebus.observability.metrics import Metrics
from moebus.schemas.attempt import parse_attempt
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.route_errors import RouteCorrupt, RouteError
from moebus.schemas.route_ref import RouteRef
from tests.support.log_model import LogModel
from tests.support.route_traffic import Traffic
from tests.support.routes import Attempt
from tests.support.wait import wait_until

PARTITIONS = 8
STORES = 3
RULES = Rules(open_ttl_ms=120_000, keep_ttl_ms=600_000)


@dataclass(frozen=True)
class Plan:
    """`seconds` of real time for `minutes` of the broker's. `pace`: most seconds of the broker's time between two
    moments of the traffic. `quota`: bytes of the run in each partition, None for none."""

    seed: int
    seconds: float = 120.0
    minutes: float = 20.0
    pace: float = 1.0
    quota: int | None = None
    sync: bool = True

    @property
    def rules(self) -> Rules:
        return RULES if self.quota is None else replace(RULES, quotas={"run": self.quota})

    @property
    def options(self) -> StoreOptions:
        quotas = {} if self.quota is None else {"run": self.quota * PARTITIONS}
        return StoreOptions(map_bytes=256 << 20, rules=RULES, quotas=quotas, sync=self.sync)


class Slot:
    """A store that may be there or not, always at the same address."""

    def __init__(self, number: int, broker: MemoryBroker, topics: Topics, folder: Path, options: StoreOptions) -> None:
        self.number, self._broker, self._topics, self._options = number, broker, topics, options
        self._folder = folder / f"store-{number}"
        self._life = 0
        self._http: HttpServer | None = None
        self.store: RouteStore | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def join(self, *, fresh: bool, partitions: tuple[int, ...] | None) -> None:
        """`fresh`: with an empty folder; else with what it had committed."""
        self._life += fresh
        routes = store_routes(lambda: self.store)
        self._http = HttpServer(metrics=Metrics(), health=Health(), routes=routes, port=self.port).start()
        self.store = RouteStore(
            self._broker, self._topics, self._folder / str(self._life), partitions, store_id=f"s{self.number}",
            url=self.url, options=self._options,
        )  # fmt: skip
        self.store.start()

    def leave(self) -> None:
        """What is not committed is gone."""
        store, self.store = self.store, None
        if store is not None:
            store.stop()
        if self._http is not None:
            self._http.stop()
            self._http = None

    @property
    def partitions(self) -> list[Partition]:
        assert self.store is not None
        return [one for _, one in sorted(self.store._follower.partitions.items())]


@dataclass
class Report:
    """What happened, for the table."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        self.faults.append(text)


class Torture:
    """`run()` raises AssertionError where anything is wrong; `report` says what was done."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.report = Report()
        self._clock = ManualClock()
        self._broker = MemoryBroker(self._clock)
        self._topics = Topics("t")
        ensure(self._broker.admin(), self._topics, routes_partitions=PARTITIONS)
        self._traffic = Traffic(
            plan.seed, self._topics.routes, PARTITIONS, self._clock, self._broker, pace=plan.pace
        )  # fmt: skip
        self._slots = [Slot(n, self._broker, self._topics, folder, plan.options) for n in range(STORES)]
        self._over = threading.Event()
        self._given: set[bytes] = set()

    def run(self) -> None:
        usual = (sys.getswitchinterval(), removal.AT_ONCE, partition.REMOVE_SLICE)
        sys.setswitchinterval(0.0005)  # stores and readers share one process here, and ask each other all the time
        removal.AT_ONCE, partition.REMOVE_SLICE = 1, 3  # so that deletes are under way most of the time
        try:
            self._run()
        finally:
            sys.setswitchinterval(usual[0])
            removal.AT_ONCE, partition.REMOVE_SLICE = usual[1:]

    def _run(self) -> None:
        for slot in self._slots:
            slot.join(fresh=True, partitions=None)
        work = [self._send, self._weather, self._by_attempt, self._by_reference, self._by_listing, self._as_group,
                self._as_group]  # fmt: skip
        threads = [threading.Thread(target=self._guarded, args=(one, n)) for n, one in enumerate(work)]
        try:
            for thread in threads:
                thread.start()
            threads[0].join()
            self._over.set()
            for thread in threads:
                thread.join()
            assert not self.report.faults, self.report.faults[:5]
            self._compare()
        finally:
            self._over.set()
            for slot in self._slots:
                slot.leave()
            self._broker.close()

    # --- what goes on at the same time ---

    def _guarded(self, work: Callable[[random.Random], None], number: int) -> None:
        try:
            work(random.Random(self.plan.seed * 100 + number))
        except Exception as error:  # a thread's error is the test's
            self.report.fault(f"{work.__name__}: {type(error).__name__}: {error}")
            self._over.set()

    def _send(self, rng: random.Random) -> None:
        began, factor = time.monotonic(), self.plan.minutes * 60 / self.plan.seconds
        while self._clock.monotonic() < self.plan.minutes * 60 and not self._over.is_set():
            self._traffic.step()
            ahead = self._clock.monotonic() / factor - (time.monotonic() - began)
            if ahead > 0:
                time.sleep(ahead)
        self._traffic.drain()

    def _weather(self, rng: random.Random) -> None:
        """Stores come and go; now and then no broker answers."""
        while not self._over.wait(rng.uniform(0.5, 3.0)):
            slot = rng.choice(self._slots)
            if slot.store is None:
                some = tuple(sorted(rng.sample(range(PARTITIONS), 5)))
                slot.join(fresh=rng.random() < 0.3, partitions=some if rng.random() < 0.2 else None)
                self.report.counts["joined"] += 1
            elif rng.random() < 0.6:
                slot.leave()
                self.report.counts["left"] += 1
            elif rng.random() < 0.3:
                with self._broker.outage():
                    self._over.wait(rng.uniform(0.05, 0.5))
                self.report.counts["outages"] += 1
        for slot in self._slots:  # all of them follow all of it at the end
            slot.leave()
            slot.join(fresh=False, partitions=None)

    @contextmanager
    def _reader(self) -> Iterator[RoutingReader]:
        urls = [slot.url for slot in self._slots]
        with RoutingReader(self._broker, self._topics, run="run", stores=urls) as reader:
            yield reader

    def _by_attempt(self, rng: random.Random) -> None:
        with self._reader() as reader:
            while not self._over.wait(0.01):
                for attempt in self._traffic.some(rng, 3):
                    self._get(reader, attempt, rng)

    def _get(self, reader: RoutingReader, attempt: Attempt, rng: random.Random) -> None:
        header, truth = attempt.header, self._traffic.truth[attempt.header.attempt]
        start = rng.randrange(len(truth) + 1) if rng.random() < 0.3 else 0
        try:
            found = reader.get(header.rollout_id, header.choice, header.attempt_text, start=start)
        except (RouteError, BrokerUnavailable) as error:
            self._refused(header.attempt, error)
            return
        self._right("get", header.attempt, found.routes, truth[start:])

    def _by_reference(self, rng: random.Random) -> None:
        with self._reader() as reader:
            while not self._over.wait(0.02):
                some = self._traffic.some(rng, 5)
                refs = [self._ref(attempt) for attempt in some]
                if not refs:
                    continue
                try:
                    batch = reader.resolve(refs, missing="mask")
                except (RouteError, BrokerUnavailable) as error:
                    self.report.counts[type(error).__name__] += 1
                    continue
                for index, ref in enumerate(refs):
                    rows = slice(batch.cu_seqlens[index], batch.cu_seqlens[index + 1])
                    if batch.valid[rows].all() and ref.rows:
                        self._right("resolve", parse_attempt(ref.attempt), batch.routes[rows], None)

    def _ref(self, attempt: Attempt) -> RouteRef:
        header = attempt.header
        rows = len(self._traffic.truth[header.attempt])
        return RouteRef("run", header.rollout_id, header.choice, header.attempt_text, rows, header.group)

    def _by_listing(self, rng: random.Random) -> None:
        with self._reader() as reader:
            while not self._over.wait(0.3):
                prefix = rng.choice([None, f"d{rng.randrange(12)}"])
                try:
                    page = reader.page(prefix, limit=200)
                except (RouteError, BrokerUnavailable) as error:
                    self.report.counts[type(error).__name__] += 1
                    continue
                for one in page.rollouts:
                    number = parse_attempt(one.ref.attempt)
                    if one.ref.rows != len(self._traffic.truth[number]):
                        self.report.fault(f"listed {one.ref} with other rows than were sent")
                self.report.counts["listed"] += len(page.rollouts)

    def _as_group(self, rng: random.Random) -> None:
        """A member of the group that leaves and joins again; acknowledges in any order, and some not at all."""
        with self._reader() as reader:
            while not self._over.is_set():
                leaves = time.monotonic() + rng.uniform(1.0, 6.0)
                self._consume(reader, rng, idle=0.5, until=leaves, share=0.9)

    def _consume(self, reader: RoutingReader, rng: random.Random, *, idle: float, until: float, share: float) -> None:
        options = StreamOptions(max_open_bytes=20_000, base_wait=0.5)
        waiting = []
        with reader.rollouts("trainer", idle_timeout=idle, options=options) as stream:
            while time.monotonic() < until:
                try:
                    item = next(stream)
                except StopIteration:
                    break
                except (RouteError, BrokerUnavailable) as error:
                    self.report.counts[f"stream {type(error).__name__}"] += 1
                    continue
                number = parse_attempt(item.ref.attempt)
                self._right("streamed", number, item.rollout.routes, self._traffic.truth[number])
                self._given.add(number)
                waiting.append(item)
                if len(waiting) > 20 or share == 1.0:
                    rng.shuffle(waiting)
                    while waiting:
                        one = waiting.pop()
                        self.report.counts["acks"] += rng.random() < share and one.ack()

    def _right(self, kind: str, number: bytes, found: RouteArray, want: RouteArray | None) -> None:
        want = self._traffic.truth[number] if want is None else want
        if found.shape[0] != len(want) or (len(want) and not np.array_equal(found, want)):
            self.report.fault(f"{kind}: attempt {number.hex()} came with other rows than were sent")
        self.report.counts[kind] += 1

    def _refused(self, number: bytes, error: Exception) -> None:
        self.report.counts[type(error).__name__] += 1
        if isinstance(error, RouteCorrupt) and number not in self._traffic.contradicted:
            self.report.fault(f"attempt {number.hex()} is called corrupt: {error}")

    # --- the end ---

    def _compare(self) -> None:
        now_ms = self._clock.now_ms()
        logs = self._logs()
        models = [LogModel(self.plan.rules) for _ in logs]
        for model, log in zip(models, logs, strict=True):
            for record in log:
                assert record.value is not None
                model.feed(record.value, record.timestamp_ms)
        whole = [model.whole(now_ms) for model in models]
        for slot in self._slots:
            self._equal(slot, models, whole, now_ms)
        self._stream_gave(models, whole)
        counts = self.report.counts
        counts["records"] = sum(map(len, logs))
        counts["whole at the end"] = sum(map(len, whole))
        counts["ended by quota"] = sum(model.quota_ended for model in models)
        self._nothing_leaks()

    def _logs(self) -> list[list[LogRecord]]:
        return [log.records for log in self._broker.cluster.topics[self._topics.routes].logs]

    def _equal(self, slot: Slot, models: list[LogModel], whole: list[dict[bytes, RouteArray]], now_ms: int) -> None:
        wanted = [set(held) for held in whole]

        def ids() -> list[set[bytes]]:
            assert slot.store is not None
            if slot.store.progress.unready() is not None or len(slot.partitions) < PARTITIONS:
                return []
            pages = [View(one).page("run", None, b"", 1_000_000) for one in slot.partitions]
            return [{state.header.attempt for state in page} for page in pages]

        def differs() -> str:
            found = ids()
            return "not ready" if not found else str([len(a ^ b) for a, b in zip(found, wanted, strict=True)])

        try:
            wait_until(lambda: ids() == wanted, 300, step=0.1)
        except AssertionError:
            raise AssertionError(f"store {slot.number} differs from the model by partition: {differs()}") from None
        for one, model, held in zip(slot.partitions, models, whole, strict=True):
            view = View(one)
            for state in view.page("run", None, b"", 1_000_000):
                assert state.end is not None
                found = [*rows_of(view, view.plan(state, 0, state.end.rows))]
                want = held[state.header.attempt]
                assert sum(map(len, found)) == len(want)
                assert not len(want) or np.array_equal(np.concatenate(found), want)
            count, usage = len(held), model.usage("run", now_ms)
            wait_until(lambda: _held(one) == (count, usage), 60, f"{(count, usage)} in store {slot.number}")  # noqa: B023

    def _stream_gave(self, models: list[LogModel], whole: list[dict[bytes, RouteArray]]) -> None:
        with self._reader() as reader:
            self._consume(reader, random.Random(0), idle=1.0, until=time.monotonic() + 600, share=1.0)
        assert not self.report.faults, self.report.faults[:5]
        completed = {one for model in models for one in model.completed if model.attempts[one].header.base is None}
        there = {one for held in whole for one in held} - self._traffic.contradicted  # what goes on from others too
        missing = (completed | there) - self._given
        assert not missing, f"{len(missing)} rollouts never came out of the stream"

    def _nothing_leaks(self) -> None:
        self._traffic.clear_all()
        for slot in self._slots:
            wait_until(lambda: not any(map(_blobs, slot.partitions)), 60, what="the space to come back")  # noqa: B023
            assert all(one.runs() == [] for one in slot.partitions)


def _held(one: Partition) -> tuple[int, tuple[int, int]]:
    """Whole attempts, and the bytes that the run uses: of whole and of open ones."""
    used = {run.run: (run.used_bytes, run.open_bytes) for run in one.runs()}
    return one.figures().whole, used.get("run", (0, 0))


def _blobs(held: Partition) -> bool:
    with held.reading() as (tables, _):
        return next(iter(tables._keys("blobs")), None) is not None
