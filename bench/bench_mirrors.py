"""Mirrors beside what FastDeploy does with the same arrays: `paddle.save`, and p2pstore's client called directly.

Rollouts of 2,000 tokens, 27 MoE layers, top-8 of 64 experts, padded to 8,192 tokens (FastDeploy pads to its
max_model_len): 1.8 MB each, one file or key a layer, and all layers in one. `redis-server` has to be installed.

    python bench/bench_mirrors.py [--rollouts 20] [--max-model-len 8192]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moebus.consumers.store.mirrors.folder import FolderTarget
from moebus.consumers.store.mirrors.p2pstore import P2PTarget, _address, _connect
from moebus.consumers.store.mirrors.port import Layout, Shelf, Target
from moebus.engine.paddle import load_paddle
from moebus.observability.settings import MirrorSettings
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.layouts import to_fastdeploy

LAYERS, TOP_K, EXPERTS, ROWS = 27, 8, 64, 2_000
Puts = Callable[[str, RouteArray], None]


def rollouts(count: int, padded: int) -> list[RouteArray]:
    rng = np.random.default_rng(0)
    return [
        to_fastdeploy(rng.integers(0, EXPERTS, (ROWS, LAYERS, TOP_K), dtype=np.uint8), EXPERTS, padded)
        for _ in range(count)
    ]


def timed(put: Puts, arrays: list[RouteArray], name: str) -> float:
    """Median milliseconds of a rollout; the first one warms up."""
    took = []
    for number, array in enumerate(arrays):
        began = time.perf_counter()
        put(f"{name}:{number}:0:0", array)
        took.append(time.perf_counter() - began)
    return 1000 * statistics.median(took[1:])


def mirror(target: Target, layout: Layout) -> Puts:
    return lambda name, array: target.put(Shelf(name, LAYERS, layout), array)


def saved(folder: Path, layout: Layout) -> Puts:
    paddle = load_paddle()

    def put(name: str, array: RouteArray) -> None:
        if layout == "fused":
            paddle.save(array, str(folder / name / f"{name}.pdtensor"))
            return
        for layer, rows in enumerate(array):
            paddle.save(rows, str(folder / name / f"layer_{layer}.pdtensor"))

    return put


def direct(url: str, settings: MirrorSettings, layout: Layout) -> Puts:
    client, loop = _connect(url, settings), asyncio.new_event_loop()

    def put(name: str, array: RouteArray) -> None:
        if layout == "fused":
            assert loop.run_until_complete(client.put(name, array.tobytes()))
            return
        for layer, rows in enumerate(array):
            assert loop.run_until_complete(client.put(f"{name}_{layer}", rows))

    return put


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--max-model-len", type=int, default=8192)
    given = parser.parse_args()
    arrays = rollouts(given.rollouts, given.max_model_len)
    port = _address("").rpartition(":")[2]
    options = ["--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    table: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory() as text:
        top = Path(text)
        redis = subprocess.Popen(["redis-server", *options, "--dir", text], stdout=subprocess.DEVNULL)
        time.sleep(1)
        url = f"redis://127.0.0.1:{port}"
        settings = MirrorSettings(protocol="tcp", device="lo", max_bytes=1 << 40)
        try:
            layouts: tuple[Layout, ...] = ("layers", "fused")
            for layout in layouts:
                folder = FolderTarget(top / f"mirror-{layout}", "bench")
                peer = timed(saved(top / f"peer-{layout}", layout), arrays, "a")
                table.append((f"folder, {layout}; peer paddle.save", timed(mirror(folder, layout), arrays, "a"), peer))
                target = P2PTarget(url, settings)
                peer = timed(direct(url, settings, layout), arrays, f"peer-{layout}")
                table.append((f"p2pstore, {layout}; peer its client", timed(mirror(target, layout), arrays, "a"), peer))
        finally:
            redis.terminate()
            redis.wait(30)
    print(f"{arrays[0].nbytes / 1e6:.1f} MB a rollout\n| mirror | ms | peer ms | ratio |\n| --- | --- | --- | --- |")
    for name, ours, peer in table:
        print(f"| {name} | {ours:.1f} | {peer:.1f} | {ours / peer:.2f} |")


if __name__ == "__main__":
    main()
