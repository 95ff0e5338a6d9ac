"""A round of generation against real workers with simulated engines, whose routes can be computed again exactly."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from moebus.consumers.reader import Rollout
from moebus.engine.simulated import SimulatedConfig, expected_routes
from moebus.schemas.route_ref import RouteRef


@dataclass(frozen=True)
class Acknowledged:
    """A request whose routes were acknowledged by Kafka: from then on nothing of it may be missing."""

    ref: RouteRef
    tokens: npt.NDArray[np.int64]
    version: str


def true_routes(version: str, tokens: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.unsignedinteger]:
    """What the engine computed for the first `rows` tokens."""
    return expected_routes(SimulatedConfig(), version, tokens[:rows])


def check_whole(rollout: Rollout, tokens: npt.NDArray[np.int64], version: str) -> None:
    """The rollout is all there and every row is right."""
    assert len(rollout.routes) == rollout.ref.rows
    np.testing.assert_array_equal(rollout.routes, true_routes(version, tokens, rollout.ref.rows))


@dataclass
class Driver:
    """Asks `urls()` for one rollout after the other until each was acknowledged; keeps going through outages."""

    urls: Callable[[], list[str]]
    total: int
    acknowledged: list[Acknowledged] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(4)
        self._futures: list[Future[None]] = []

    def start(self) -> None:
        self._futures = [self._pool.submit(self._one, n) for n in range(self.total)]

    def join(self, timeout: float) -> None:
        """Until every rollout was acknowledged; raises what a thread raised."""
        for future in self._futures:
            future.result(timeout)

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def _one(self, number: int) -> None:
        rng = np.random.default_rng(number)
        prompt = rng.integers(0, 512, size=int(rng.integers(4, 40)))
        body = {
            "token_ids": prompt.tolist(),
            "rollout_id": f"p{number % 7}:{number}:0:0",
            "max_tokens": 12,
            "seed": number,
            "timeout": 20.0,
            "wait_routes": True,
        }
        while not self._stop.is_set():
            answer = self._ask(number, body)
            if answer is not None:
                tokens = np.concatenate([prompt, np.asarray(answer["token_ids"], dtype=np.int64)])
                ref, version = RouteRef.from_dict(answer["route_ref"]), answer["versions"][-1][1]
                with self._lock:
                    self.acknowledged.append(Acknowledged(ref, tokens, version))
                return
            self._stop.wait(0.02)

    def _ask(self, number: int, body: dict[str, Any]) -> dict[str, Any] | None:
        urls = self.urls()
        if not urls:
            return None
        try:
            answer = httpx.post(f"{urls[number % len(urls)]}/v1/generate", json=body, timeout=30)
        except httpx.TransportError:
            return None
        if answer.status_code != 200:
            return None
        return dict(answer.json())
