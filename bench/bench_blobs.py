"""Where the bytes of routes lie: LMDB, a folder, an S3 API; beside a bare loop of obstore with the same objects.

A partition takes in rollouts of 2.1 MB in three chunks each, in batches of eight, with fsync; then all are read. The
bare loop puts one object a rollout, eight at a time, and gets it. The S3 server is moto's, in a process of its own: a
Python server, whose speed says nothing of S3, but both sides meet the same one. Rounds alternate; the ratio is of the
medians.

    python bench/bench_blobs.py [--rollouts 24] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import obstore

from moebus.consumers.store.blobs.external import ExternalBlobs
from moebus.consumers.store.blobs.objects import ObstoreObjects
from moebus.consumers.store.blobs.place import Place
from moebus.consumers.store.blobs.port import Blobs
from moebus.consumers.store.decide import Rules
from moebus.consumers.store.partition import Guard, Partition
from moebus.consumers.store.view import View, rows_of
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Header, Outcome, encode_attempt
from moebus.schemas.rollout import rollout_key

CARD = ModelCard(256, 8, tuple(range(40)))
ROWS, CHUNKS, BATCH = 6562, 3, 8


@dataclass
class Figures:
    """MB/s of each round, written and read."""

    write: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)


def records(number: int) -> list[bytes]:
    rng = np.random.default_rng(number)
    routes = ((rng.integers(0, 256, (ROWS, 40, 1)) + np.arange(8)) % 256).astype(np.uint8)
    header = Header.of(rollout_key("run", f"r{number}"), number.to_bytes(16, "big"), group="g")
    return list(encode_attempt(routes, header, CARD, Outcome(), codec="raw", target=-(-routes.nbytes // CHUNKS)))


def ours(log: list[list[bytes]], folder: Path, blobs: Blobs | None, figures: Figures) -> None:
    partition = Partition(0, folder, Guard("c", "t"), Rules(checks="off"), 1 << 30, sync=True, blobs=blobs)
    size = sum(len(record) for rollout in log for record in rollout) / 1e6
    began = time.perf_counter()
    for number, rollout in enumerate(log, 1):
        for record in rollout:
            partition.apply(partition.next_offset or 0, record, 0)
        if number % BATCH == 0:
            partition.commit()
    partition.commit()
    figures.write.append(size / (time.perf_counter() - began))
    view = View(partition)
    began = time.perf_counter()
    for number in range(len(log)):
        state = view.find(rollout_key("run", f"r{number}")).attempts[0]
        rows = sum(len(part) for part in rows_of(view, view.plan(state, 0, ROWS)))
        assert rows == ROWS
    figures.read.append(size / (time.perf_counter() - began))
    partition.close()


def bare(log: list[list[bytes]], objects: ObstoreObjects, figures: Figures, sync: Callable[[str], None]) -> None:
    store: Any = objects._store
    bodies = [b"".join(rollout) for rollout in log]
    size = sum(map(len, bodies)) / 1e6

    async def put(names: list[tuple[str, bytes]]) -> None:
        await asyncio.gather(*(obstore.put_async(store, name, body, use_multipart=False) for name, body in names))

    began = time.perf_counter()
    for start in range(0, len(bodies), BATCH):
        part = [(f"bare/{number}", bodies[number]) for number in range(start, min(start + BATCH, len(bodies)))]
        asyncio.run(put(part))
        for name, _ in part:
            sync(name)
    figures.write.append(size / (time.perf_counter() - began))
    began = time.perf_counter()
    for number, body in enumerate(bodies):
        assert len(bytes(obstore.get(store, f"bare/{number}").bytes())) == len(body)
    figures.read.append(size / (time.perf_counter() - began))


def moto(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (folder / "moto.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{port}/bench", method="PUT")
            urllib.request.urlopen(request, timeout=5).close()
            break
        except OSError:
            time.sleep(0.1)
    return process, f"http://127.0.0.1:{port}"


def run(rollouts: int, rounds: int, top: Path) -> dict[str, Figures]:
    os.environ.update(AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench")
    server, endpoint = moto(top)
    log = [records(number) for number in range(rollouts)]
    table = {name: Figures() for name in ("lmdb", "folder", "folder, bare", "s3 (moto)", "s3 (moto), bare")}

    def persist(name: str) -> None:
        handle = os.open(top / "blobs" / name, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)

    try:
        for number in range(rounds):
            folder = ObstoreObjects(Place(path=top / "blobs"), f"f{number}", 60)
            s3 = ObstoreObjects(Place(bucket="bench"), f"s{number}", 60, endpoint)
            ours(log, top / f"lmdb{number}", None, table["lmdb"])
            for name, objects in (("folder", folder), ("s3 (moto)", s3)):
                blobs = ExternalBlobs(objects, "t/0", threading.Event())
                ours(log, top / f"{name[:2]}{number}", blobs, table[name])
                bare(log, objects, table[f"{name}, bare"], persist if name == "folder" else lambda _: None)
                objects.close()
    finally:
        server.terminate()
        server.wait(30)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = run(options.rollouts, options.rounds, Path(folder))
    print("| where | write MB/s | of bare | read MB/s | of bare |\n| --- | --- | --- | --- | --- |")
    for name, figures in table.items():
        write, read = statistics.median(figures.write), statistics.median(figures.read)
        peer = table.get(f"{name}, bare")
        of_write = f"{write / statistics.median(peer.write):.2f}" if peer else ""
        of_read = f"{read / statistics.median(peer.read):.2f}" if peer else ""
        print(f"| {name} | {write:.0f} | {of_write} | {read:.0f} | {of_read} |")


if __name__ == "__main__":
    main()
