"""Routes through the real Kafka, beside a bare loop in the same run: raw client -> LMDB with fsync, no checks.

Two figures: a stream (first submit -> everything committed in the store), and one rollout of 2.1 MB (submit -> read by
`RoutingReader.get`; for the bare loop send -> committed). Rounds of both alternate; the ratio is of their medians.

The bare loop uses kafka-python as it comes; with `--tuned-peer` it reads through the wide sockets of our clients too,
and its reader keeps freed memory as our store does, so that what is left of the ratio is ours alone.

    python bench/bench_routes.py [--stream-mb 200] [--singles 180] [--rounds 6] [--mode process|thread] [--checks ids]
        [--tuned-peer]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from kafka import KafkaProducer

from moebus.broker import open_broker
from moebus.broker.kafka.config import producer_options
from moebus.broker.kafka.selector import QuickSelector
from moebus.broker.kafka.sockets import DIRECT
from moebus.broker.local import LocalCluster
from moebus.broker.topics import Topics, ensure
from moebus.consumers import RoutingReader
from moebus.consumers.reader import StoreUnreachable
from moebus.observability.settings import KafkaSettings, Settings, load_settings
from moebus.producers import RoutingPublisher
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.model_card import ModelCard
from moebus.schemas.route_errors import StoreCatchingUp

CARD = ModelCard(256, 8, tuple(range(40)))
"""256 experts: evenly chosen ids do not pack, so both sides send the same bytes."""
ROWS = 6562
PARTITIONS = 8
PIECES = 3
WINDOW = 32
"""Records of the bare loop that may wait for their acknowledgement, as many as the publisher lets."""
WAIT = 120.0


@dataclass
class Figures:
    """What one side measured. Seconds; CPU seconds are of its own processes, without the broker."""

    stream: list[float] = field(default_factory=list)
    single: list[float] = field(default_factory=list)
    cpu: float = 0.0
    bytes: int = 0
    wire: int = 0


def rollout(seed: int) -> RouteArray:
    """2.1 MB: in every top-k eight of 256 ids, evenly chosen."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 256, (ROWS * 40, 8), dtype=np.uint8)
    while len(again := np.flatnonzero((np.diff(np.sort(ids, axis=1), axis=1) == 0).any(axis=1))):
        ids[again] = rng.integers(0, 256, (len(again), 8), dtype=np.uint8)
    return ids.reshape(ROWS, 40, 8)


def cpu_of(pids: set[int]) -> float:
    """User and system seconds that these processes have used."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def children() -> set[int]:
    """This process's children that are no Java."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            name, _, rest = entry.joinpath("stat").read_text().rpartition(")")
            if int(rest.split()[1]) == os.getpid() and "(java" not in name:
                found.add(int(entry.name))
    return found


class Bare:
    """The raw client on both ends."""

    def __init__(self, bootstrap: str, topic: str, folder: Path, tuned: bool) -> None:
        folder.mkdir()
        program = [sys.executable, str(Path(__file__).with_name("bare_loop.py"))]
        arguments = [bootstrap, topic, str(PARTITIONS), str(folder), *(["tuned"] if tuned else [])]
        self.consumer = subprocess.Popen([*program, *arguments], stdout=subprocess.PIPE, text=True)
        assert self.consumer.stdout is not None
        self.lines: IO[str] = self.consumer.stdout
        self.lines.readline()
        options = {**producer_options(10.0), **({"proxy_url": DIRECT, "selector": QuickSelector} if tuned else {})}
        self.producer: Any = KafkaProducer(bootstrap_servers=[bootstrap], **options)
        self.topic = topic
        self.sent = 0
        self.window: deque[Any] = deque()
        self.figures = Figures()

    def send(self, routes: RouteArray) -> None:
        data = routes.tobytes()
        size = -(-len(data) // PIECES)
        for start in range(0, len(data), size):
            value = data[start : start + size]
            self.window.append(self.producer.send(self.topic, value=value, partition=self.sent % PARTITIONS))
            if len(self.window) > WINDOW:
                self.window.popleft().get(WAIT)
        self.sent += 1
        self.figures.bytes += routes.nbytes

    def wait(self) -> None:
        """Until everything sent is committed."""
        while int(self.lines.readline()) < self.sent * PIECES:
            pass

    def stream(self, rollouts: list[RouteArray]) -> None:
        began = time.perf_counter()
        for routes in rollouts:
            self.send(routes)
        self.wait()
        self.figures.stream.append(time.perf_counter() - began)

    def single(self, routes: RouteArray) -> None:
        began = time.perf_counter()
        self.send(routes)
        self.wait()
        self.figures.single.append(time.perf_counter() - began)

    def pids(self) -> set[int]:
        return {os.getpid(), self.consumer.pid}

    def close(self) -> None:
        self.producer.close(10)
        self.consumer.kill()
        self.consumer.wait(10)


class Ours:
    """A publisher here, `moebus store` in a process of its own, a reader here."""

    def __init__(self, settings: Settings, folder: Path, mode: str, checks: str) -> None:
        known = children()
        command = [
            sys.executable, "-m", "moebus.cli", "--bootstrap-servers", settings.kafka.bootstrap_servers,
            "--topic-prefix", settings.topic_prefix, "--log-level", "WARNING",
            "store", "--data-dir", str(folder), "--parent-pid", str(os.getpid()),
        ]  # fmt: skip
        self.store = subprocess.Popen(command, env={**os.environ, "MOEBUS_STORE__CHECKS": checks})
        self.reader = RoutingReader.from_settings(run="bench", settings=settings)
        self.publisher = RoutingPublisher.from_settings(
            run="bench", card=CARD, mode="process" if mode == "process" else "thread", settings=settings
        )
        deadline = time.monotonic() + WAIT
        while not self._ready():
            assert time.monotonic() < deadline, "the store did not become ready"
            time.sleep(0.1)
        self._pids = {os.getpid(), *(children() - known)}
        self.count = 0
        self.figures = Figures()

    def _ready(self) -> bool:
        try:
            self.reader.page(limit=1)
        except (StoreUnreachable, StoreCatchingUp):
            return False
        return True

    def _submit(self, routes: RouteArray) -> Any:
        self.count += 1
        self.figures.bytes += routes.nbytes
        return self.publisher.submit(routes, f"d{self.count}:0:0:0")

    def stream(self, rollouts: list[RouteArray]) -> None:
        began = time.perf_counter()
        receipts = [self._submit(routes) for routes in rollouts]
        stored = [receipt.result(WAIT) for receipt in receipts]
        last = {one.end.partition: one for one in stored}
        with ThreadPoolExecutor(len(last)) as pool:  # an answer that says the partition is read up to its END
            asked = [
                pool.submit(self.reader.get, one.ref.rollout_id, wait=WAIT, stop=0, min_offset=one.end.offset + 1)
                for one in last.values()
            ]
            for one in asked:
                one.result()
        self.figures.stream.append(time.perf_counter() - began)

    def single(self, routes: RouteArray) -> None:
        began = time.perf_counter()
        ref = self._submit(routes).ref
        found = self.reader.get(ref.rollout_id, group=ref.effective_group, wait=WAIT)
        self.figures.single.append(time.perf_counter() - began)
        assert np.array_equal(found.routes, routes)

    def pids(self) -> set[int]:
        return self._pids

    def close(self) -> None:
        self.figures.wire = self.publisher.stats().wire_bytes
        self.publisher.close(30)
        self.reader.close()
        self.store.terminate()
        self.store.wait(20)


def alternate(bare: Bare, ours: Ours, stream: list[RouteArray], singles: int, rounds: int) -> None:
    """Rounds of both; within a round one after the other, so that neither disturbs the other."""
    sides: tuple[Bare | Ours, ...] = (bare, ours)
    for side in sides:  # not counted: connections, caches
        side.stream(stream[:8])
        side.single(stream[0])
        side.figures.stream.clear()
        side.figures.single.clear()
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            before = cpu_of(side.pids())
            side.stream(stream)
            for index in range(singles // rounds):
                side.single(stream[index % len(stream)])
            side.figures.cpu += cpu_of(side.pids()) - before


def report(bare: Figures, ours: Figures, stream_bytes: int, counted: int) -> None:
    """`counted`: bytes of routes while the CPU was measured."""
    rate = {name: stream_bytes / 1e6 / statistics.median(f.stream) for name, f in (("bare", bare), ("ours", ours))}
    print(f"{'':34}{'bare loop':>12}{'moebus':>12}{'ratio':>9}")

    def line(name: str, left: float, right: float, unit: str) -> None:
        print(f"{name:34}{left:>12.1f}{right:>12.1f}{right / left:>9.2f}  {unit}")

    line("stream", rate["bare"], rate["ours"], "MB/s")
    for name, share in (("2.1 MB, p50", 50), ("2.1 MB, p90", 90), ("2.1 MB, p99", 99)):
        left, right = (1000 * float(np.percentile(side.single, share)) for side in (bare, ours))
        line(name, left, right, "ms")
    line("CPU without the broker", bare.cpu / (counted / 1e9), ours.cpu / (counted / 1e9), "s/GB")
    print(f"bytes on the wire, of the routes: bare 1.000, moebus {ours.wire / ours.bytes:.3f}")


@contextlib.contextmanager
def kafka(folder: Path) -> Iterator[LocalCluster]:
    with LocalCluster.start(folder / "kafka", name="bench", die_with_parent=True) as cluster:
        yield cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stream-mb", type=float, default=200.0)
    parser.add_argument("--singles", type=int, default=180)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--mode", choices=("process", "thread"), default="process")
    parser.add_argument("--checks", choices=("off", "ids", "full"), default="ids")
    parser.add_argument("--tuned-peer", action="store_true")
    given = parser.parse_args()
    some = [rollout(seed) for seed in range(8)]
    stream = [some[number % 8] for number in range(max(8, int(given.stream_mb * 1e6) // some[0].nbytes))]
    with tempfile.TemporaryDirectory() as text, kafka(Path(text)) as cluster:
        folder = Path(text)
        settings = load_settings(
            kafka=KafkaSettings(bootstrap_servers=cluster.bootstrap), topic_prefix="bench",
            publisher={"block_seconds": WAIT},
        )  # fmt: skip
        broker = open_broker(settings.kafka)
        admin = broker.admin()
        ensure(admin, Topics("bench"), routes_partitions=PARTITIONS)
        admin.create("bare", partitions=PARTITIONS, replication=1, config={})
        broker.close()
        bare = Bare(cluster.bootstrap, "bare", folder / "bare", given.tuned_peer)
        ours = Ours(settings, folder / "store", given.mode, given.checks)
        try:
            alternate(bare, ours, stream, given.singles, given.rounds)
        finally:
            bare.close()
            ours.close()
    size = sum(routes.nbytes for routes in stream)
    singles = given.singles // given.rounds * given.rounds * stream[0].nbytes
    report(bare.figures, ours.figures, size, size * given.rounds + singles)


if __name__ == "__main__":
    main()
