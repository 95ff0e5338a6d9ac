"""What `submit` of 2 MB of routes costs the thread that calls it, beside a bare copy into the same journal.

`python bench/bench_publisher.py [--kafka] [--count 2000] [--rate 100]`: without `--kafka` nobody answers, so that the
publisher's own work is seen alone; with it a local Apache Kafka takes everything meanwhile, on the same cores. Each
submit is followed by a copy of the same array into a part of the same mapping that the publisher does not reach.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moebus.broker import Topics, open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.topics import ensure
from moebus.observability.settings import KafkaSettings, PublisherSettings, Settings
from moebus.producers.routing import RoutingPublisher
from moebus.producers.routing.process.sender import ProcessSender
from moebus.producers.routing.publisher import Mode
from moebus.schemas.model_card import ModelCard

CARD = ModelCard(num_experts=256, top_k=8, moe_layers=tuple(range(3, 61)))
SIZE = 2_000_000
PER_ROUND = 250
Rows = npt.NDArray[np.unsignedinteger]
Times = npt.NDArray[np.float64]


def make_rows() -> Rows:
    """2 MB of routes as a router would give them: no expert twice in a top-k."""
    rows = SIZE // (len(CARD.moe_layers) * CARD.top_k)
    first = np.random.default_rng(0).integers(0, 256, (rows, len(CARD.moe_layers), 1))
    return ((first + np.arange(8) * 31) % 256).astype(np.uint8)


def paired(calls: Sequence[Callable[[int], object]], count: int, rate: float) -> list[Times]:
    """Milliseconds of each call, all calls one after the other `rate` times a second: [wall, CPU of this thread]."""
    found: list[list[tuple[float, float]]] = [[] for _ in calls]
    for number in range(count):
        began = time.perf_counter()
        for index, call in enumerate(calls):
            start, worked = time.perf_counter(), time.thread_time()
            call(number)
            took, work = time.perf_counter() - start, time.thread_time() - worked
            found[index].append((took * 1e3, work * 1e3))
        time.sleep(max(0.0, began + 1 / rate - time.perf_counter()))
    return [np.array(times) for times in found]


def copier(made: RoutingPublisher, rows: Rows) -> Callable[[int], object]:
    """The peer: one memcpy, into the second half of the journal (a file of its own in mode thread)."""
    sender = made._sender
    if isinstance(sender, ProcessSender):
        there = sender._journal._bytes[-PER_ROUND * rows.nbytes :]
    else:
        file = tempfile.TemporaryFile(dir="/dev/shm")  # noqa: SIM115  # the map outlives it
        os.posix_fallocate(file.fileno(), 0, PER_ROUND * rows.nbytes)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        there = np.frombuffer(mmap.mmap(file.fileno(), PER_ROUND * rows.nbytes, flags=flags), np.uint8)
    flat = rows.reshape(-1)

    def copy(number: int) -> None:
        at = number % PER_ROUND * rows.nbytes
        np.copyto(there[at : at + rows.nbytes], flat)

    return copy


def one_round(mode: Mode, rows: Rows, count: int, rate: float, settings: Settings) -> list[Times]:
    """[of submit, of the copy]."""
    tokens = np.arange(len(rows))
    made = RoutingPublisher.from_settings(run="bench", card=CARD, mode=mode, settings=settings)
    try:
        deadline = time.monotonic() + 30
        while made.problem() is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        calls = [lambda number: made.submit(rows, f"r{number}", token_ids=tokens), copier(made, rows)]
        return paired(calls, count, rate)
    finally:
        made.close(60 if settings.kafka.bootstrap_servers != NOBODY else 0)


NOBODY = "127.0.0.1:1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kafka", action="store_true")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--mode", choices=("process", "thread", "both"), default="both")
    args = parser.parse_args()
    with ExitStack() as stack:
        address = NOBODY
        if args.kafka:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            address = stack.enter_context(LocalCluster.start(folder, die_with_parent=True)).bootstrap
            broker = open_broker(address)
            ensure(broker.admin(), Topics("bench"))
            broker.close()
        settings = Settings(
            kafka=KafkaSettings(bootstrap_servers=address),
            topic_prefix="bench",
            publisher=PublisherSettings(max_bytes=int(2.1 * PER_ROUND * SIZE), full="drop"),
        )
        modes: tuple[Mode, ...] = ("process", "thread") if args.mode == "both" else (args.mode,)
        report(make_rows(), modes, args.count, args.rate, settings)


def report(rows: Rows, modes: Sequence[Mode], count: int, rate: float, settings: Settings) -> None:
    """Rounds of at most PER_ROUND calls, each with a fresh publisher, so that nothing waits for room."""
    rounds = [min(PER_ROUND, count - begun) for begun in range(0, count, PER_ROUND)]
    nobody = settings.kafka.bootstrap_servers == NOBODY
    print(f"{count} x {rows.nbytes:,} bytes, {rate:g} a second, {'no broker' if nobody else 'a local Kafka'}; ms")
    print(f"{'':32}{'p50':>9}{'p99':>9}{'max':>9}{'p50 / copy':>12}{'CPU p50':>9}{'CPU p99':>9}")
    for mode in modes:
        found = [one_round(mode, rows, number, rate, settings) for number in rounds]
        submits, copies = (np.concatenate([one[index] for one in found]) for index in (0, 1))
        bare = float(np.percentile(copies[:, 0], 50))
        for name, times in ((f"submit, mode={mode}", submits), ("bare copy beside it", copies)):
            (half, work), (most, most_work) = np.percentile(times, [50, 99], axis=0)
            longest = times[:, 0].max()
            print(f"{name:32}{half:9.3f}{most:9.3f}{longest:9.3f}{half / bare:12.1f}{work:9.3f}{most_work:9.3f}")


if __name__ == "__main__":
    main()
