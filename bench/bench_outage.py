"""Memory of a publisher while Kafka is away and rollouts go on coming, and what arrives afterwards.

Rollouts of 2 MB at a steady rate; Kafka is killed, stays away, and comes back. Whatever the publisher took must be in
the log in the end, whole and once; what it refused is told by the receipts. Memory: what the publisher adds to this
process, and all of its child, shared pages counted once (Pss).

    python bench/bench_outage.py [--minutes 0.5] [--rate 50] [--mb 64]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.ports import TopicPartition
from moebus.broker.topics import Topics, ensure
from moebus.observability.settings import KafkaSettings, PublisherSettings, Settings
from moebus.producers.routing import RoutesDropped, RoutingPublisher, RoutingReceipt
from moebus.producers.routing.process.sender import ProcessSender
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Chunk, End, decode

CARD = ModelCard(num_experts=256, top_k=8, moe_layers=tuple(range(3, 61)))
PARTITIONS = 8
ROLLOUT_BYTES = 2_000_000
ALLOWED = 64 << 20
"""What the publisher may use beyond its bound."""


def make_rows() -> npt.NDArray[np.uint8]:
    """2 MB: no expert twice in a top-k."""
    rows = ROLLOUT_BYTES // (len(CARD.moe_layers) * CARD.top_k)
    first = np.random.default_rng(0).integers(0, 256, (rows, len(CARD.moe_layers), 1))
    return ((first + np.arange(8) * 31) % 256).astype(np.uint8)


def pss(pid: int | str) -> int:
    """Bytes that a process uses, shared pages by their share; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


@dataclass
class Outage:
    """One run. `receipts`: of all that was submitted, without those that are settled and looked at."""

    publisher: RoutingPublisher
    before: int
    rows: npt.NDArray[np.uint8]
    receipts: list[RoutingReceipt] = field(default_factory=list)
    peak: int = 0
    peak_child: int = 0
    dropped: int = 0
    submitted: int = 0
    looked: float = 0.0

    def load(self, seconds: float, rate: float) -> None:
        """Submits `rate` rollouts a second; looks at the memory five times a second."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            self.submit()
            if now - self.looked >= 0.2:
                self.looked = now
                self.look()
            time.sleep(max(0.0, now + 1 / rate - time.monotonic()))

    def submit(self) -> None:
        receipt = self.publisher.submit(self.rows, f"r{self.submitted}")
        self.submitted += 1
        if receipt.done() and isinstance(receipt.exception(), RoutesDropped):
            self.dropped += 1
        else:
            self.receipts.append(receipt)

    def look(self) -> None:
        sender = self.publisher._sender
        assert isinstance(sender, ProcessSender)
        child = pss(sender.child_pid or 0)
        self.peak_child = max(self.peak_child, child)
        self.peak = max(self.peak, pss("self") - self.before + child)


def log_of(bootstrap: str, topics: Topics) -> Counter[str]:
    """Rollouts in the log whose chunks are all there, by id; each attempt counts once."""
    broker = open_broker(bootstrap)
    admin, reader = broker.admin(), broker.reader("count")
    tps = [TopicPartition(topics.routes, number) for number in range(PARTITIONS)]
    ends = admin.end_offsets(tps)
    chunks: dict[bytes, set[int]] = {}
    counts: dict[bytes, tuple[str, int]] = {}
    reader.assign(admin.start_offsets(tps))
    while any(reader.position(tp) < ends[tp] for tp in tps):
        for record in reader.poll(1.0):
            found = decode(record.value)
            if isinstance(found, Chunk):
                chunks.setdefault(found.header.attempt, set()).add(found.index)
            elif isinstance(found, End):
                counts[found.header.attempt] = (found.header.rollout_id, found.chunks)
    for one in (reader, admin, broker):
        one.close()
    return Counter(name for attempt, (name, count) in counts.items() if len(chunks[attempt]) == count)


def run(
    bootstrap: str, topics: Topics, away: Callable[[], None], back: Callable[[], None], seconds: float, rate: float,
    bound: int,
) -> Outage:  # fmt: skip
    """`away()` and `back()`: Kafka goes, Kafka is there again."""
    rows = make_rows()
    settings = Settings(
        kafka=KafkaSettings(bootstrap_servers=bootstrap), topic_prefix=topics.prefix, run="bench",
        publisher=PublisherSettings(max_bytes=bound, full="drop"),
    )  # fmt: skip
    before = pss("self")
    with RoutingPublisher.from_settings(card=CARD, mode="process", settings=settings) as publisher:
        outage = Outage(publisher, before, rows)
        outage.load(min(3.0, seconds), min(rate, 10.0))
        away()
        outage.load(seconds, rate)
        back()
        outage.load(min(3.0, seconds), min(rate, 10.0))
        for receipt in outage.receipts:
            receipt.result(120)
        outage.look()
    return outage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.5)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--mb", type=int, default=64, help="the publisher's bound")
    given = parser.parse_args()
    topics, bound = Topics("bench"), given.mb << 20
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster.start(Path(folder), name="outage", die_with_parent=True) as cluster,
    ):
        broker = open_broker(cluster.bootstrap)
        ensure(broker.admin(), topics, routes_partitions=PARTITIONS)
        broker.close()
        done = run(
            cluster.bootstrap, topics, cluster.kill, cluster.restart, given.minutes * 60, given.rate, bound
        )  # fmt: skip
        arrived = log_of(cluster.bootstrap, topics)
    taken = Counter(receipt.ref.rollout_id for receipt in done.receipts)
    print(f"Kafka away for {given.minutes:g} minutes, {given.rate:g} rollouts of 2 MB a second, bound {given.mb} MiB")
    print(f"submitted {done.submitted}, refused by name {done.dropped}, taken {len(done.receipts)}")
    print(f"in the log afterwards, whole: {len(arrived)}; exactly those that were taken: {arrived == taken}")
    more = done.peak - bound
    print(f"memory at most: {done.peak / 2**20:.0f} MiB ({done.peak_child / 2**20:.0f} of them the child's)")
    verdict = "within" if more <= ALLOWED else "NO"
    print(f"beyond the bound: {more / 2**20:.0f} MiB of {ALLOWED >> 20} allowed: {verdict}")


if __name__ == "__main__":
    main()
