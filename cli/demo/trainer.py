"""The demo's trainer: resolves RouteRefs, replays the routes in Paddle, and checks them against a recompute."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from moebus.cli.demo.model import Weights
from moebus.cli.demo.rollouts import Finished
from moebus.consumers.reader import RouteBatch, RoutingReader
from moebus.engine.paddle import ModelConfig, full_recompute, replay_logprobs

ROUTER_NOISE = 0.01
"""Standard deviation added to the trainer's router logits: about what a lower precision does to them."""
_BATCH = 4


@dataclass
class Report:
    """What the trainer saw. Deltas are |log p(trainer) - log p(rollout)| over sampled tokens."""

    rollouts: int = 0
    rows: int = 0
    mismatched_rows: int = 0
    cached_tokens: int = 0
    with_replay: list[float] = field(default_factory=list)
    without_replay: list[float] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)

    def mean(self, deltas: list[float]) -> float:
        return float(np.mean(deltas)) if deltas else 0.0


class Trainer:
    """Takes finished requests from a queue until None comes; runs in a thread of its own."""

    def __init__(
        self,
        reader: RoutingReader,
        config: ModelConfig,
        weights: Mapping[str, Weights],
        source: queue.Queue[Finished | None],
        on_done: Callable[[], None],
    ) -> None:
        """`weights`: by version, those that the engines have had."""
        self._reader = reader
        self._config = config
        self._weights = weights
        self._source = source
        self._on_done = on_done
        self.report = Report()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """True once it has dealt with everything."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            ended = False
            while not ended:
                samples, ended = self._take()
                if samples:
                    self._learn(samples)
        except Exception as exc:
            self.failure = exc

    def _take(self) -> tuple[list[Finished], bool]:
        samples: list[Finished] = []
        while len(samples) < _BATCH:
            item = self._source.get()
            if item is None:
                return samples, True
            samples.append(item)
        return samples, False

    def _learn(self, samples: list[Finished]) -> None:
        refs = [sample.ref for sample in samples]
        batch = self._reader.resolve(refs, tokens=[sample.tokens for sample in samples], wait=30)
        for index, sample in enumerate(samples):
            self._compare(batch, index, sample)
            self._on_done()

    def _compare(self, batch: RouteBatch, index: int, sample: Finished) -> None:
        """One sequence: its routes against a recompute without cache, its log p with and without replay."""
        first, last = int(batch.cu_seqlens[index]), int(batch.cu_seqlens[index + 1])
        routes = batch.routes[first : last - 1]  # the last sampled token was never forwarded: it has no row
        weights, seed = self._weights[sample.versions[-1]], self.report.rollouts
        expected = full_recompute(self._config, weights, sample.tokens)[0][: len(routes)]
        deltas = [
            np.abs(
                replay_logprobs(self._config, weights, sample.tokens, given, router_noise=ROUTER_NOISE, seed=seed)[
                    sample.prompt_tokens - 1 :
                ]
                - sample.logprobs
            )
            for given in (routes, None)
        ]
        report = self.report
        report.rollouts += 1
        report.rows += len(routes)
        report.mismatched_rows += int((routes != expected).any(axis=(1, 2)).sum())
        report.cached_tokens += sample.cached_tokens
        report.with_replay += deltas[0].tolist()
        report.without_replay += deltas[1].tolist()
        report.versions[sample.versions[-1]] = report.versions.get(sample.versions[-1], 0) + 1
