"""Deleting by prefix in a store of 1,000,000 rollouts: when readers notice, and what other reads feel meanwhile.

A real store (LMDB with fsync) behind its HTTP; a second process reads other rollouts all the time. Prefixes of 1,000
and one of 100,000 ids are deleted through the log. Peers in the same run, over the same keys: a list of keys that is
filtered (as p2pstore does), and a scan of an LMDB table that deletes what matches.

    python bench/bench_delete.py [--rollouts 1000000] [--large 100000]
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import lmdb
import numpy as np

from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import LogRecord, OutRecord
from moebus.broker.topics import Topics, ensure
from moebus.cli._store import SWITCH_SECONDS
from moebus.consumers.reader.ask import Query
from moebus.consumers.reader.store_client import StoreClient
from moebus.consumers.store import Question, RouteStore, StoreOptions, store_routes
from moebus.consumers.store.decide import Rules
from moebus.consumers.store.ingest import Ingest
from moebus.consumers.store.ingest import Outcome as Taken
from moebus.consumers.store.partition import Guard, Partition
from moebus.consumers.store.state import AttemptState, ChunkInfo, Owner, Part, Shape
from moebus.consumers.store.tables import Tables, Usage
from moebus.observability.health import Health
from moebus.observability.http import HttpServer
from moebus.observability.metrics import Metrics
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import (
    Chunk,
    Delete,
    End,
    Header,
    Outcome,
    decode,
    encode,
    encode_attempt,
    record_key,
    stored_checksum,
    whole_checksum,
)
from moebus.schemas.rollout import rollout_key
from moebus.schemas.route_errors import RouteDeleted

CARD = ModelCard(64, 2, (1, 2, 3))
TOPICS = Topics("bench")
GROUP = 1000
MAP = 16 << 30
ROWS = 4
DELETED = 20
ASK_EVERY = 0.0002
READER = "import sys; sys.path.insert(0, sys.argv[1]); import bench_delete; bench_delete.read_on(*sys.argv[2:])"


def names(rollouts: int, large: int) -> Iterator[str]:
    """`large` ids under `big`, the others in groups of 1,000 under `d0`, `d1`, ..."""
    for index in range(large):
        yield f"big:{index}:0:0"
    for index in range(rollouts - large):
        yield f"d{index // GROUP}:{index % GROUP}:0:0"


def fill(partition: Partition, rollouts: int, large: int, now_ms: int) -> None:
    """Writes what taking in these rollouts would have written, without reading a million records."""
    shape = Shape(CARD.moe_layers, CARD.top_k, CARD.num_experts)
    rows = (np.arange(ROWS * 6).reshape(ROWS, 3, 2) % CARD.num_experts).astype(CARD.dtype)
    first = Header.of(rollout_key("run", "x"), bytes(16), group="g")
    like, last = (decode(one) for one in encode_attempt(rows, first, CARD, Outcome(), codec="raw"))
    assert isinstance(like, Chunk)
    assert isinstance(last, End)
    txn = partition.env.begin_write()
    for number, name in enumerate(names(rollouts, large), 1):
        header = Header.of(rollout_key("run", name), number.to_bytes(16, "big"), group="g")
        chunk = encode(replace(like, header=header))
        end = replace(last, header=header, checksum=whole_checksum([stored_checksum(chunk)]))
        tables = Tables(partition.env, txn)
        info = ChunkInfo(0, 0, ROWS, stored_checksum(chunk))
        tables.put_owner(Owner(number, 1, header.attempt, shape, (info,), "run", len(chunk), True))
        tables.put_blob(number, 0, chunk)
        parts = (Part(number, 0, ROWS),)
        tables.put_attempt(AttemptState(header, "whole", number, now_ms, parts, shape, end), None)
        if number % 20_000 == 0 or number == rollouts:
            if number == rollouts:
                tables.add_usage("run", Usage(rollouts * len(chunk), 0))
                fresh = partition._fresh(partition.guard)
                tables.put_meta(replace(fresh, next_offset=0, owners=number, whole=number))
            txn.commit()
            txn = partition.env.begin_write()
    txn.abort()


def read_on(url: str, rollouts: str, large: str) -> None:
    """The other process: reads rollouts that stay until its input ends; prints (time, seconds) of each."""
    client, rng = StoreClient(), np.random.default_rng(1)
    groups = (int(rollouts) - int(large)) // GROUP
    first = max(DELETED + 1, groups // 2)
    done = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        done.set()

    threading.Thread(target=listen, daemon=True).start()
    took: list[tuple[float, float]] = []
    while not done.is_set():
        name = f"d{rng.integers(first, groups)}:{rng.integers(GROUP)}:0:0"
        began = time.time()
        client.get(url, Query("run", name), 5.0)
        took.append((began, time.time() - began))
        time.sleep(0.001)
    print(json.dumps(took))


@dataclass
class Watch:
    """When each DELETE was read by the store, and how long it took until it counted for whoever asks from then on."""

    read_at: dict[bytes, float] = field(default_factory=dict)
    counted: list[float] = field(default_factory=list)

    def on(self, store: RouteStore) -> None:
        take = store._follower._take

        def timed(record: LogRecord) -> None:
            self.read_at[record.value or b""] = time.perf_counter()
            take(record)

        store._follower._take = timed  # type: ignore[method-assign]
        apply = Ingest.apply

        def counts(ingest: Ingest, value: bytes | None, now_ms: int) -> Taken:
            self.counted.append(
                time.perf_counter() - self.read_at[value or b""]
            )  # readers know it; it is taken away now
            return apply(ingest, value, now_ms)

        setattr(Ingest, "apply", counts)  # noqa: B010


def delete(store: RouteStore, broker: MemoryBroker, watch: Watch, prefix: str, probe: str, number: int) -> float:
    """Seconds from the record being read until a reader is told that the rollout is deleted."""
    record = Delete("run", prefix, number.to_bytes(16, "big"))
    question, value = Question(rollout_key("run", probe)), encode(record)
    store.find(question)
    broker.writer("bench").append(OutRecord(TOPICS.routes, value, record_key(record), (), 0)).result(10)
    while True:
        try:
            store.find(question)
        except RouteDeleted:
            return max(0.0, time.perf_counter() - watch.read_at[value])
        time.sleep(ASK_EVERY)  # without it this thread takes the processor from all others


def reclaimed(store: RouteStore) -> bool:
    partition = store._follower.partitions[0]
    with partition.reading() as (tables, pending):
        return not pending and not tables.trash(1)


def filter_list(keys: list[str], prefix: str) -> float:
    began = time.perf_counter()
    gone = [key for key in keys if key.startswith(prefix + ":")]
    assert gone
    return time.perf_counter() - began


def scan_lmdb(folder: Path, keys: list[str], prefix: str) -> float:
    """Seconds to delete what matches by looking at every key."""
    with lmdb.open(str(folder), map_size=MAP, sync=False) as env:
        with env.begin(write=True) as txn:
            for key in keys:
                txn.put(key.encode(), b"x" * 200)
        began = time.perf_counter()
        wanted = prefix.encode() + b":"
        with env.begin(write=True) as txn, txn.cursor() as cursor:
            found = cursor.first()
            while found:
                found = cursor.delete() if cursor.key().startswith(wanted) else cursor.next()
        return time.perf_counter() - began


def quantiles(took: list[tuple[float, float]], since: float, until: float) -> str:
    part = sorted(seconds for at, seconds in took if since <= at < until)
    if not part:
        return "none"
    at = [part[min(len(part) - 1, int(len(part) * q))] * 1000 for q in (0.5, 0.99)]
    return f"p50 {at[0]:6.2f} ms  p99 {at[1]:6.2f} ms  of {len(part):,} reads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1_000_000)
    parser.add_argument("--large", type=int, default=100_000)
    parser.add_argument("--dir", type=Path, help="where the store lies (default: a temporary folder)")
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    sys.setswitchinterval(SWITCH_SECONDS)  # as `moebus store` does
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        measure(Path(name), args.rollouts, args.large)


def measure(folder: Path, rollouts: int, large: int) -> None:
    broker = MemoryBroker()
    ensure(broker.admin(), TOPICS, routes_partitions=1)
    guard = Guard(broker.admin().cluster_id(), broker.admin().describe([TOPICS.routes])[TOPICS.routes].topic_id)
    path = folder / "store" / TOPICS.routes / "00000"
    began = time.perf_counter()
    filled = Partition(0, path, guard, Rules(), MAP, sync=False)
    fill(filled, rollouts, large, time.time_ns() // 1_000_000)
    filled.close()
    print(f"{rollouts:,} rollouts laid down in {time.perf_counter() - began:.0f} s", flush=True)
    server = HttpServer(metrics=Metrics(), health=Health(), routes=store_routes(lambda: store)).start()
    store = RouteStore(broker, TOPICS, folder / "store", options=StoreOptions(map_bytes=MAP))
    watch = Watch()
    watch.on(store)
    store.start()
    while store.progress.unready() is not None:
        time.sleep(0.01)
    figures = store.figures()[0][1]
    print(f"the store holds {figures.whole:,} rollouts in {figures.used_bytes / 1e9:.2f} GB")
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(Path(__file__).parent), server.url, str(rollouts), str(large)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(6)
    start = time.time()
    small = []
    for number in range(1, DELETED + 1):
        small.append(delete(store, broker, watch, f"d{number}", f"d{number}:500:0:0", number))
        time.sleep(0.1)
    _until(store)
    after_small = time.time()
    time.sleep(4)
    begin_large = time.time()
    big = delete(store, broker, watch, "big", f"big:{large - 1}:0:0", 99)
    _until(store)
    end_large = time.time()
    time.sleep(4)
    out, _ = reader.communicate("")
    took = [(at, seconds) for at, seconds in json.loads(out)]
    small.sort()
    counted = sorted(watch.counted)
    print(f"a delete counts after p50 {counted[10] * 1000:.3f} ms, at most {counted[-1] * 1000:.3f} ms, of being read")
    print(f"1,000 ids, 20 times: invisible after p50 {small[10] * 1000:.2f} ms, at most {small[-1] * 1000:.2f} ms")
    gone = end_large - begin_large
    print(f"{large:,} ids: invisible after {big * 1000:.2f} ms; their space was back after {gone:.1f} s")
    print(f"other reads, before:                {quantiles(took, start - 4, start)}")
    print(f"other reads, 20 x 1,000 going:      {quantiles(took, start, after_small)}")
    print(f"other reads, between:               {quantiles(took, after_small, begin_large)}")
    print(f"other reads, {large:,} going:        {quantiles(took, begin_large, end_large)}")
    print(f"other reads, after:                 {quantiles(took, end_large, end_large + 4)}")
    store.stop()
    server.stop()
    keys = list(names(rollouts, large))
    listed, scanned = filter_list(keys, "d10"), scan_lmdb(folder / "peer", keys, "d10")
    ours = small[10]
    print(f"peer, filter of a list of keys: {listed * 1000:.0f} ms for 1,000 ids ({listed / ours:.0f} times)")
    print(f"peer, scan of an LMDB table:    {scanned * 1000:.0f} ms for 1,000 ids ({scanned / ours:.0f} times)")


def _until(store: RouteStore) -> None:
    while not reclaimed(store):
        time.sleep(0.01)


if __name__ == "__main__":
    main()
