"""What looking at rows costs, by level: MB/s of one core, and what a store takes in with each level.

Beside it the checksum of the records (XXH3, always on) and one pass of `numpy.max`, which no check can beat.

    python bench/bench_checks.py [--mb 64]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from moebus.consumers.store.decide import Rules
from moebus.consumers.store.partition import Guard, Partition
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import CheckLevel, Chunk, Header, Outcome, check_content, decode, encode_attempt, unpack
from moebus.schemas.rollout import rollout_key

LEVELS: tuple[CheckLevel, ...] = ("off", "ids", "full")
CARDS = (
    ModelCard(128, 8, tuple(range(48)), name="128 experts, 48 x top-8, uint8"),
    ModelCard(384, 8, tuple(range(1, 61)), name="384 experts, 60 x top-8, uint16"),
)
ROUNDS = 3


def routes_of(card: ModelCard, size: int) -> RouteArray:
    """Distinct ids, evenly chosen."""
    rows = max(1, size // (len(card.moe_layers) * card.top_k * card.dtype.itemsize))
    rng = np.random.default_rng(1)
    first = rng.integers(0, card.num_experts, (rows, len(card.moe_layers), 1))
    step = rng.integers(1, card.num_experts // card.top_k, (rows, len(card.moe_layers), 1))
    return ((first + step * np.arange(card.top_k)) % card.num_experts).astype(card.dtype)


def best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some rounds."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def check_all(rows: list[RouteArray], num_experts: int, level: CheckLevel) -> None:
    for one in rows:
        check_content(one, num_experts, level)


def ingest(records: list[bytes], level: CheckLevel) -> float:
    """Seconds in which a partition of a store takes these in, without fsync: the CPU's part."""
    with tempfile.TemporaryDirectory() as folder:
        partition = Partition(0, Path(folder), Guard("c", "t"), Rules(checks=level), 1 << 30, sync=False)
        began = time.perf_counter()
        for offset, value in enumerate(records):
            partition.apply(offset, value, 1)
            if partition.batch_bytes > 8 << 20:
                partition.commit()
        partition.commit()
        took = time.perf_counter() - began
        partition.close()
    return took


def measure(card: ModelCard, size: int) -> None:
    routes = routes_of(card, size)
    header = Header.of(rollout_key("run", "bench:0:0:0"), bytes(16))
    records = list(encode_attempt(routes, header, card, Outcome()))
    chunks = [found for value in records if isinstance(found := decode(value), Chunk)]
    rows = [unpack(chunk) for chunk in chunks]
    mb = routes.nbytes / 1e6

    def line(name: str, seconds: float, against: float) -> None:
        print(f"  {name:34} {mb / seconds:9.0f} MB/s {1000 * seconds / mb:8.2f} CPU s/GB {seconds / against:7.2f} x")

    print(f"{card.name}: {mb:.0f} MB in {len(records)} records")
    checksum = best(lambda: [xxhash.xxh3_64_intdigest(value) for value in records])
    line("peer: XXH3 of the records", checksum, checksum)
    line("peer: numpy.max", best(lambda: [one.max() for one in rows]), checksum)
    line("unpacking (zstd)", best(lambda: [unpack(chunk) for chunk in chunks]), checksum)
    for level in LEVELS:
        line(f"check {level}", best(partial(check_all, rows, card.num_experts, level)), checksum)
    ingest(records, "off")
    base = ingest(records, "off")
    for level in LEVELS:
        line(f"store takes in, checks={level}", base if level == "off" else ingest(records, level), base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=64.0, help="megabytes of routes")
    size = int(parser.parse_args().mb * 1e6)
    for card in CARDS:
        measure(card, size)


if __name__ == "__main__":
    main()
