"""What bases save: bytes on the wire and in the store, for many turns and for the samples of one prompt.

Beside it the same rollouts with everything sent, as systems do that have no bases. Deterministic: a log in memory, a
real store, counted bytes.

    python bench/bench_bases.py [--turns 50] [--turn-tokens 1000] [--samples 16] [--prompt 4000] [--answer 1000]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moebus.broker.memory import MemoryBroker
from moebus.broker.topics import Topics, ensure
from moebus.consumers.store import Question, RouteStore, StoreOptions
from moebus.producers import RoutingPublisher
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.model_card import ModelCard
from moebus.schemas.rollout import rollout_key
from moebus.schemas.route_ref import RouteRef

CARD = ModelCard(128, 8, tuple(range(48)))
TOPICS = Topics("bench")
WAIT = 120.0


@dataclass(frozen=True)
class Cost:
    """Bytes; `read_seconds`: of the last rollout, from the store."""

    wire: int
    store: int
    seconds: float
    read_seconds: float


def routes_of(rows: int) -> RouteArray:
    """Distinct ids in every top-k, evenly chosen."""
    rng = np.random.default_rng(rows)
    ids = rng.integers(0, 128, (rows * 48, 8), dtype=np.uint8)
    while len(again := np.flatnonzero((np.diff(np.sort(ids, axis=1), axis=1) == 0).any(axis=1))):
        ids[again] = rng.integers(0, 128, (len(again), 8), dtype=np.uint8)
    return ids.reshape(rows, 48, 8)


def tokens_of(rows: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 100_000, rows, dtype=np.int64)


Publish = Callable[[RoutingPublisher, bool], RouteRef]
"""(publisher, with bases) -> the last rollout published."""


def turns(count: int, size: int) -> Publish:
    """Every turn's prompt is all that was said before."""
    routes, tokens = routes_of(count * size), tokens_of(count * size + 1, 1)

    def publish(publisher: RoutingPublisher, bases: bool) -> RouteRef:
        ref: RouteRef | None = None
        for turn in range(count):
            base = ref if bases else None
            rows = routes[: (turn + 1) * size]
            ref = publisher.submit(rows, f"chat:0:{turn}:0", token_ids=tokens, base=base).ref
        assert ref is not None
        return ref

    return publish


def samples(count: int, prompt: int, answer: int) -> Publish:
    """Several answers to one prompt; with bases the first one's prompt rows are sent once."""
    shared, said = routes_of(prompt), tokens_of(prompt, 2)
    answers = [routes_of(answer + number)[:answer] for number in range(count)]

    def publish(publisher: RoutingPublisher, bases: bool) -> RouteRef:
        first: RouteRef | None = None
        for number in range(count):
            rows = np.concatenate([shared, answers[number]])
            tokens = np.concatenate([said, tokens_of(answer + 1, number + 10)])
            ref = publisher.submit(
                rows, f"prompt:{number}:0:0", token_ids=tokens, prompt_rows=prompt, base=first if bases else None
            ).ref
            first = first or ref
        return ref

    return publish


def measure(publish: Publish, bases: bool) -> Cost:
    """One run on a fresh log and a fresh store."""
    with tempfile.TemporaryDirectory() as folder:
        broker = MemoryBroker()
        ensure(broker.admin(), TOPICS, routes_partitions=1)
        options = StoreOptions(map_bytes=4 << 30, sync=False)
        store = RouteStore(broker, TOPICS, Path(folder), store_id="s", url="http://127.0.0.1:1", options=options)
        store.start()
        with RoutingPublisher(broker, TOPICS, run="bench", card=CARD) as publisher:
            began = time.perf_counter()
            ref = publish(publisher, bases)
            assert publisher.flush(WAIT)
            wire = publisher.stats().wire_bytes
        log = broker.cluster.topics[TOPICS.routes].logs[0]
        deadline = time.monotonic() + WAIT
        while store.progress.unready() is not None or store.progress.lags()[0].applied < log.end:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        took = time.perf_counter() - began
        began = time.perf_counter()
        answer = store.find(Question(rollout_key("bench", ref.rollout_id)))
        assert sum(len(piece) for piece in answer.rows()) == answer.meta.nbytes
        read = time.perf_counter() - began
        used = sum(figures.used_bytes for _, figures in store.figures().values())
        store.stop()
        broker.close()
    return Cost(wire, used, took, read)


def report(name: str, publish: Publish) -> None:
    everything, based = measure(publish, False), measure(publish, True)
    print(f"{name}\n{'':28}{'everything sent':>18}{'with bases':>14}{'ratio':>9}")
    for what, left, right, unit in (
        ("bytes on the wire", everything.wire / 1e6, based.wire / 1e6, "MB"),
        ("used in the store", everything.store / 1e6, based.store / 1e6, "MB"),
        ("submit to stored", everything.seconds, based.seconds, "s"),
        ("the last one read in", 1000 * everything.read_seconds, 1000 * based.read_seconds, "ms"),
    ):
        print(f"{what:28}{left:>18.2f}{right:>14.2f}{right / left:>9.3f}  {unit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--turn-tokens", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--answer", type=int, default=1000)
    given = parser.parse_args()
    report(f"{given.turns} turns of {given.turn_tokens} tokens", turns(given.turns, given.turn_tokens))
    report(
        f"{given.samples} samples of {given.answer} tokens after a prompt of {given.prompt}",
        samples(given.samples, given.prompt, given.answer),
    )


if __name__ == "__main__":
    main()
