"""The publisher's process on a real Kafka: kill -9 of the child, of its publisher, of both; a broker that is away."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from moebus.broker import open_broker
from moebus.broker.errors import AppendFailed
from moebus.broker.local import LocalCluster
from moebus.broker.ports import Broker, LogRecord
from moebus.broker.topics import Topics, ensure
from moebus.consumers.reader.assembly import Assembler
from moebus.observability.metrics import Metrics
from moebus.producers.routing import AsyncRoutingPublisher, RoutingPublisher
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import End, assemble
from tests.contract.publisher_flow import FlowSuite
from tests.contract.publisher_world import PARTITIONS, decoded, read_all
from tests.support.fork import exit_code, in_a_fork
from tests.support.poison import poison
from tests.support.publisher_program import CARD, RUN, child_pid, publisher, rows_of, settings, submit
from tests.support.routes import CARD as SMALL_CARD
from tests.support.routes import make_routes
from tests.support.wait import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster.start(tmp_path_factory.mktemp("kafka"), die_with_parent=True) as made:
        yield made


@pytest.fixture
def broker(cluster: LocalCluster) -> Iterator[Broker]:
    made = open_broker(cluster.bootstrap)
    yield made
    made.close()


@pytest.fixture
def topics(broker: Broker, topic_prefix: str) -> Topics:
    names = Topics(topic_prefix)
    admin = broker.admin()
    ensure(admin, names, routes_partitions=PARTITIONS)
    admin.close()
    return names


@contextmanager
def away(cluster: LocalCluster) -> Iterator[None]:
    """The broker answers nobody inside the block."""
    cluster.freeze()
    try:
        yield
    finally:
        cluster.thaw()


def start(mode: str, cluster: LocalCluster, topics: Topics, journal: Path | str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.publisher_program", mode]
    return subprocess.Popen(
        [*command, cluster.bootstrap, topics.prefix, str(journal), str(count)], stdout=subprocess.PIPE, text=True
    )


def child_of(program: subprocess.Popen[str]) -> int:
    assert program.stdout is not None
    return int(program.stdout.readline())


def new_child(made: RoutingPublisher, before: set[int]) -> int:
    """Its process id; 0 while there is none."""
    pid = child_pid(made)
    return 0 if pid is None or pid in before else pid


def gone(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    return True


def check_arrived_once(broker: Broker, topics: Topics, count: int) -> None:
    """Who reads the log as a trainer's stream does gets every rollout whole, right and once."""
    seen: Counter[str] = Counter()
    assemblers = {partition: Assembler(RUN, 0) for partition in range(PARTITIONS)}
    for record in read_all(broker, topics):
        one = assemblers[record.partition].feed(record)
        if one is None:
            continue
        held = [one.chunks[index] for index in range(len(one.chunks))]
        chunks = [chunk.chunk for chunk in held if chunk.chunk is not None]
        assert one.end is not None
        number = int(one.header.rollout_id[1:])
        routes = assemble(one.end, chunks, [chunk.checksum for chunk in held])
        assert np.array_equal(routes, make_routes(rows_of(number), CARD, seed=number))
        seen[one.header.rollout_id] += 1
    assert seen == Counter(f"r{n}" for n in range(count))
    assert not any(assembler.tally.spoilt for assembler in assemblers.values())


def test_a_killed_child_is_replaced_and_nothing_is_lost_or_doubled(
    cluster: LocalCluster, broker: Broker, topics: Topics
) -> None:
    metrics = Metrics()
    killed: set[int] = set()
    with publisher(settings(cluster.bootstrap, topics.prefix, None), metrics=metrics) as made:
        for round_ in range(3):
            submit(made, range(round_ * 20, round_ * 20 + 20))
            pid = wait_until(lambda: new_child(made, killed), 30, "a child")
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        assert made.flush(90), "a killed child may not fail a receipt"
        assert made.stats().stored == 60
        wait_until(lambda: made.problem() is None, 30, "a child that is well")
    assert metrics.value("moebus_routes_publisher_restarts_total") == 3
    check_arrived_once(broker, topics, 60)


def test_a_broker_that_is_away_throughout_the_submits(cluster: LocalCluster, broker: Broker, topics: Topics) -> None:
    with publisher(settings(cluster.bootstrap, topics.prefix, None)) as made:
        with away(cluster):
            submit(made, range(25))
            assert made.stats().waiting == 25
            assert not made.flush(1.0)
        assert made.flush(90)
    check_arrived_once(broker, topics, 25)


def test_a_child_whose_publisher_was_killed_drains_and_ends(
    cluster: LocalCluster, broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    with away(cluster):
        program = start("hold", cluster, topics, tmp_path / "journal", 25)
        child = child_of(program)
        program.kill()
        program.communicate()
    wait_until(lambda: gone(child), 90, "the child to end")
    check_arrived_once(broker, topics, 25)
    with publisher(settings(cluster.bootstrap, topics.prefix, tmp_path / "journal")) as made:
        assert made.stats().recovered == 0, "the child marks what it has settled alone"


def test_both_killed_and_the_next_publisher_sends_what_the_journal_holds(
    cluster: LocalCluster, broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    with away(cluster):
        program = start("hold", cluster, topics, tmp_path / "journal", 25)
        child = child_of(program)
        program.kill()
        os.kill(child, signal.SIGKILL)
        program.communicate()
    with publisher(settings(cluster.bootstrap, topics.prefix, tmp_path / "journal")) as made:
        assert made.stats().recovered == 25
        submit(made, range(25, 30))
        assert made.flush(90)
    check_arrived_once(broker, topics, 30)


def test_a_new_publisher_takes_the_journal_over_from_a_child_left_alone(
    cluster: LocalCluster, broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    with away(cluster):
        program = start("hold", cluster, topics, tmp_path / "journal", 10)
        child = child_of(program)
        program.kill()
        program.communicate()
        made = publisher(settings(cluster.bootstrap, topics.prefix, tmp_path / "journal"))
        assert made.stats().recovered == 10
        wait_until(lambda: gone(child), 30, "the old child to leave")
    assert made.flush(90)
    assert made.close() == []
    check_arrived_once(broker, topics, 10)


def test_a_child_ends_at_sigterm_only_where_it_is_alone(
    cluster: LocalCluster, broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    with away(cluster):
        program = start("hold", cluster, topics, tmp_path / "journal", 5)
        child = child_of(program)
        wait_until(lambda: _catches_sigterm(child), 30, "the child to be at work")
        os.kill(child, signal.SIGTERM)  # as a service manager does to all of a group
        program.kill()
        program.communicate()
        with pytest.raises(AssertionError, match="not true"):
            wait_until(lambda: gone(child), 1.5, "no end")
        os.kill(child, signal.SIGTERM)
        wait_until(lambda: gone(child), 30, "the end")
    with publisher(settings(cluster.bootstrap, topics.prefix, tmp_path / "journal")) as made:
        assert made.stats().recovered == 5
        assert made.flush(90)
    check_arrived_once(broker, topics, 5)


def _catches_sigterm(pid: int) -> bool:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def test_a_program_that_ends_without_close_loses_nothing(cluster: LocalCluster, broker: Broker, topics: Topics) -> None:
    program = start("leave", cluster, topics, "-", 10)
    child = child_of(program)
    program.communicate(timeout=60)
    wait_until(lambda: gone(child), 90, "the child to end")
    check_arrived_once(broker, topics, 10)


def test_it_works_in_a_daemonic_process(cluster: LocalCluster, broker: Broker, topics: Topics) -> None:
    program = start("daemonic", cluster, topics, "-", 5)
    program.communicate(timeout=120)
    assert program.returncode == 0
    check_arrived_once(broker, topics, 5)


def test_it_works_in_a_thread_of_an_asyncio_program(cluster: LocalCluster, broker: Broker, topics: Topics) -> None:
    async def main() -> None:
        made = await AsyncRoutingPublisher.from_settings(
            card=CARD, settings=settings(cluster.bootstrap, topics.prefix, None), mode="process"
        )
        async with made:
            receipts = [await made.submit(make_routes(rows_of(n), CARD, seed=n), f"r{n}") for n in range(5)]
            stored = await asyncio.wait_for(asyncio.gather(*receipts), 60)
            assert [one.ref.rollout_id for one in stored] == [f"r{n}" for n in range(5)]
            fence = await made.delete("nobody")
            assert set((await asyncio.wait_for(fence, 60)).positions) == set(range(PARTITIONS))

    asyncio.run(main())
    check_arrived_once(broker, topics, 5)


def _pause() -> int:
    signal.pause()
    return 0


def test_a_fork_that_lives_on_holds_up_nothing(cluster: LocalCluster, broker: Broker, topics: Topics) -> None:
    made = publisher(settings(cluster.bootstrap, topics.prefix, None))
    submit(made, range(3))
    wait_until(lambda: made.problem() is None, 60, "a child that is well")
    fork = in_a_fork(_pause)
    try:
        child = child_pid(made)
        assert child is not None
        os.kill(child, signal.SIGKILL)  # the fork has the pipes too: neither end is seen to close
        submit(made, range(3, 6))
        assert made.flush(90)
        last = child_pid(made)
        assert last is not None
        assert made.close() == []
        assert gone(last)
    finally:
        os.kill(fork, signal.SIGKILL)
        exit_code(fork)
    check_arrived_once(broker, topics, 6)


def test_it_works_with_64_mb_of_dev_shm(cluster: LocalCluster, broker: Broker, topics: Topics) -> None:
    program = [sys.executable, "-m", "tests.support.publisher_program", "default"]
    inside = ["sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh", *program]
    command = ["unshare", "-m", *inside, cluster.bootstrap, topics.prefix, "-", "100"]
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["ProcessSender", str((32 << 20) - (64 << 10))]
    check_arrived_once(broker, topics, 100)


def test_memory_stays_within_the_bound_and_64_mb_while_the_broker_is_away(
    cluster: LocalCluster, broker: Broker, topics: Topics
) -> None:
    command = [sys.executable, "-m", "tests.support.publisher_program", "full", cluster.bootstrap, topics.prefix, "-"]
    with subprocess.Popen([*command, "50"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        try:
            assert program.stdout.readline() == "connected\n"
            with away(cluster):
                program.stdin.write("go\n")
                program.stdin.flush()
                used, bound = map(int, program.stdout.readline().split())
            assert bound < used <= bound + (64 << 20)
            submitted, stored, dropped = map(int, program.stdout.readline().split())
        finally:
            program.kill()
    assert dropped >= 50, "far more came than it may keep"
    assert stored == submitted - dropped
    ends = [record for record in decoded(ProcessWorld(cluster, broker, topics)) if isinstance(record, End)]
    assert len({end.header.attempt for end in ends}) == stored


@pytest.mark.parametrize("when", ["read", "encode"])
def test_an_entry_that_ends_the_child_each_time_is_set_aside(
    when: str, cluster: LocalCluster, broker: Broker, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, when)
    metrics, journal = Metrics(), tmp_path / "journal"
    with publisher(settings(cluster.bootstrap, topics.prefix, journal), metrics=metrics) as made:
        with away(cluster):  # so that the entry has company when it ends the child
            submit(made, range(6))
            bad = made.submit(make_routes(rows_of(4), CARD, seed=99), "poison")
            submit(made, range(6, 12))
        with pytest.raises(AppendFailed, match=r"run/poison#0 .*entry 7 of the journal ended .* 5 times") as failed:
            bad.result(120)
        assert not made.flush(90), "a failure is told"
        stats = made.stats()
        assert (stats.stored, stats.failed, stats.set_aside) == (12, 1, 1)
    assert metrics.value("moebus_routes_set_aside_total") == 1
    (kept,) = (tmp_path / "journal.aside").iterdir()
    assert str(kept) in str(failed.value)
    assert kept.stat().st_size > rows_of(4) * 12 * 8 * 2
    assert make_routes(rows_of(4), CARD, seed=99).tobytes() in kept.read_bytes()
    check_arrived_once(broker, topics, 12)


class ProcessWorld:
    """Publishers with a process of their own, on the real Kafka."""

    def __init__(self, cluster: LocalCluster, broker: Broker, topics: Topics) -> None:
        self._cluster = cluster
        self._broker = broker
        self._topics = topics

    def make(
        self,
        metrics: Metrics | None = None,
        *,
        card: ModelCard | None = SMALL_CARD,
        on_high_water: Callable[[int, int], object] | None = None,
        **options: object,
    ) -> RoutingPublisher:
        found = settings(self._cluster.bootstrap, self._topics.prefix, None, **options)
        return RoutingPublisher.from_settings(
            card=card, settings=found, mode="process", metrics=metrics, on_high_water=on_high_water
        )

    def records(self) -> list[LogRecord]:
        return read_all(self._broker, self._topics)

    def outage(self) -> AbstractContextManager[None]:
        return away(self._cluster)


class TestContract(FlowSuite):
    """Bounds, outages, order, the truth of flush and close, with all parts real."""

    @pytest.fixture
    def world(self, cluster: LocalCluster, broker: Broker, topics: Topics) -> ProcessWorld:
        return ProcessWorld(cluster, broker, topics)
