"""What `submit` of 2 MB of routes costs the thread that calls it, beside a bare copy into a mapped file.

`python bench/bench_publisher.py [--kafka] [--count 300] [--rate 50]`: without `--kafka` nobody answers, so that the
publisher's own work is seen alone; with it a local Apache Kafka takes everything meanwhile, on the same cores.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moebus.broker import Topics, open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.topics import ensure
from moebus.observability.settings import KafkaSettings, PublisherSettings, Settings
from moebus.producers.routing import RoutingPublisher
from moebus.producers.routing.publisher import Mode
from moebus.schemas.model_card import ModelCard

CARD = ModelCard(num_experts=256, top_k=8, moe_layers=tuple(range(3, 61)))
SIZE = 2_000_000
RING = 256 << 20
Rows = npt.NDArray[np.unsignedinteger]
Times = npt.NDArray[np.float64]


def make_rows() -> Rows:
    """2 MB of routes as a router would give them: no expert twice in a top-k."""
    rows = SIZE // (len(CARD.moe_layers) * CARD.top_k)
    first = np.random.default_rng(0).integers(0, 256, (rows, len(CARD.moe_layers), 1))
    return ((first + np.arange(8) * 31) % 256).astype(np.uint8)


def timed(call: Callable[[int], object], count: int, rate: float) -> Times:
    """Milliseconds of each call, at `rate` calls a second: [wall, CPU of this thread] by call."""
    found = []
    for number in range(count):
        start, worked = time.perf_counter(), time.thread_time()
        call(number)
        took, work = time.perf_counter() - start, time.thread_time() - worked
        found.append((took * 1e3, work * 1e3))
        time.sleep(max(0.0, 1 / rate - took))
    return np.array(found)


def bare_copy(rows: Rows, count: int, rate: float) -> Times:
    """The peer: one memcpy into a file on tmpfs, allocated and mapped before."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, RING)
        mapped = mmap.mmap(file.fileno(), RING, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        there = np.frombuffer(mapped, np.uint8)
        flat, slots = rows.reshape(-1), RING // rows.nbytes

        def copy(number: int) -> None:
            at = number % slots * rows.nbytes
            np.copyto(there[at : at + rows.nbytes], flat)

        return timed(copy, count, rate)


def publisher(mode: Mode, rows: Rows, count: int, rate: float, settings: Settings) -> Times:
    tokens = np.arange(len(rows))
    made = RoutingPublisher.from_settings(run="bench", card=CARD, mode=mode, settings=settings)
    try:
        deadline = time.monotonic() + 30
        while made.problem() is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        return timed(lambda number: made.submit(rows, f"r{number}", token_ids=tokens), count, rate)
    finally:
        made.close(60 if settings.kafka.bootstrap_servers != NOBODY else 0)


NOBODY = "127.0.0.1:1"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kafka", action="store_true")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--rate", type=float, default=50.0)
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
            publisher=PublisherSettings(max_bytes=max(RING, 3 * SIZE * args.count), full="drop"),
        )
        rows = make_rows()
        report(rows, args.count, args.rate, settings)


def report(rows: Rows, count: int, rate: float, settings: Settings) -> None:
    copy = bare_copy(rows, count, rate)
    found = {"bare copy into a mapped file": copy}
    for mode in ("process", "thread"):
        found[f"submit, mode={mode}"] = publisher(mode, rows, count, rate, settings)
    nobody = settings.kafka.bootstrap_servers == NOBODY
    print(f"{count} x {rows.nbytes:,} bytes, {rate:g} a second, {'no broker' if nobody else 'a local Kafka'}; ms")
    print(f"{'':32}{'p50':>9}{'p99':>9}{'max':>9}{'p50 / copy':>12}{'CPU p50':>9}{'CPU p99':>9}")
    bare = np.percentile(copy[:, 0], 50)
    for name, times in found.items():
        (half, work), (most, most_work) = np.percentile(times, [50, 99], axis=0)
        print(f"{name:32}{half:9.3f}{most:9.3f}{times[:, 0].max():9.3f}{half / bare:12.1f}{work:9.3f}{most_work:9.3f}")


if __name__ == "__main__":
    main()
