"""Prefill in one engine, decode in another: what is handed over, taken from the one and put into the other."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moebus.engine.admission import Admission
from moebus.engine.paddle.calls import enter_all, wait_all
from moebus.engine.paddle.capture import RouteCapture, RouteMissing
from moebus.engine.paddle.config import ModelConfig
from moebus.engine.paddle.device import HostCopy
from moebus.engine.paddle.handover import Handover
from moebus.engine.paddle.handover_head import HandoverRefused, Head
from moebus.engine.paddle.kvcache import KVCache
from moebus.engine.paddle.residency import WeightMemory
from moebus.engine.paddle.scheduler import Scheduler
from moebus.engine.paddle.sequence import Sequence
from moebus.engine.paddle.slots import sequence_slots
from moebus.engine.paddle.swap import halves
from moebus.engine.paddle.tiers import CacheTiers
from moebus.engine.port import Generation, Prompt
from moebus.engine.spans import row_versions
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import RetriableError


class PrefillAborted(RetriableError):
    """The request was aborted before its first token; there is nothing to hand over."""


@dataclass
class Split:
    """Both ends, over the parts of one engine."""

    config: ModelConfig
    weights: WeightMemory
    cache: KVCache
    capture: RouteCapture
    tiers: CacheTiers[Any]
    admission: Admission
    scheduler: Scheduler

    def prefill(self, prompt: Prompt, timeout: float) -> Handover:
        """As `PaddleEngine.prefill`; the prompt has been checked."""
        taken: list[_Taken] = []
        asked = replace(prompt, max_tokens=min(prompt.max_tokens, 1))
        with self.admission.changed:
            (sequence,) = enter_all(self.admission, [asked], self.config.eos_token_ids)
            sequence.at_end = lambda ended: taken.append(self._taken(ended))
            self.scheduler.submit(sequence)
        (result,) = wait_all(self.admission, [sequence], timeout)
        if not taken:
            raise PrefillAborted(f"prefill: {prompt.request_id!r} was aborted before its first token; send it again")
        keys, values = halves(taken[0].content)
        made = Handover(self._head(prompt, result, taken[0]), prompt.token_ids, keys, values, taken[0].routes)
        made.check()
        return made

    def _taken(self, sequence: Sequence) -> _Taken:
        """Begins the copy; on the engine's thread, the blocks are held."""
        slots = sequence_slots(sequence.blocks, sequence.prompt_tokens, self.config.block_size)
        routes, weights = sequence.routes(self.capture, sequence.prompt_tokens), self.weights.committed
        return _Taken(self.cache.copy_out(slots), routes, weights.version, weights.digest)

    def _head(self, prompt: Prompt, result: Generation, taken: _Taken) -> Head:
        sampled = len(result.token_ids) > 0
        return Head(
            request_id=prompt.request_id,
            config=self.config,
            weights_version=taken.version,
            weights_digest=taken.digest,
            prompt_tokens=result.prompt_tokens,
            temperature=float(prompt.temperature),
            top_p=float(prompt.top_p),
            seed=prompt.seed,
            first=(int(result.token_ids[0]), float(result.logprobs[0])) if sampled else None,
            routes=taken.routes is not None,
            versions=result.versions,
            cached_tokens=result.cached_tokens,
        )

    def decode(self, handover: Handover, prompt: Prompt, timeout: float) -> Generation:
        """As `PaddleEngine.decode`; the prompt has been checked."""
        head = handover.head
        head.check_prompt(prompt)
        if not np.array_equal(handover.token_ids, prompt.token_ids):
            raise HandoverRefused(f"handover: {prompt.request_id!r} was prefilled from other tokens")
        handover.check()
        with self.admission.changed:  # the weights cannot change while requests may enter
            if not self.admission.closed:
                head.check_engine(self.config, self.weights.version, self.weights.digest)
            (sequence,) = enter_all(self.admission, [prompt], self.config.eos_token_ids)
            self._give(sequence, handover)
            self.scheduler.submit(sequence)
        return wait_all(self.admission, [sequence], timeout)[0]

    def _give(self, sequence: Sequence, handover: Handover) -> None:
        head = handover.head
        if head.first is not None:
            sequence.tokens.append(head.first[0])
            sequence.logprobs.append(head.first[1])
        sequence.untold = True
        sequence.cached = head.cached_tokens
        sequence.keep(handover.routes, row_versions(head.versions, head.prompt_tokens))
        shared = head.of_one_version() and handover.routes is not None
        sequence.given = _Given(
            handover, self.cache, self.capture, self.config.block_size, self.tiers.pool.epoch, shared
        )


@dataclass(frozen=True)
class _Taken:
    """Keys and values on their way, and the weights that computed the last of them."""

    content: HostCopy
    routes: RouteArray | None
    version: str
    digest: str


@dataclass
class _Given:
    """What `Sequence` asks of a handover."""

    handover: Handover
    cache: KVCache
    capture: RouteCapture
    block_size: int
    epoch: int
    may_be_shared: bool

    def agrees(self, blocks: Many[int], generations: Many[int], positions: int) -> bool:
        handed = self.handover
        try:
            routes, versions = self.capture.gather_recorded(blocks, generations, positions)
        except RouteMissing:
            return False
        if row_versions(versions, positions) != row_versions(handed.head.versions, len(handed.token_ids))[:positions]:
            return False
        return routes is None or handed.routes is None or np.array_equal(routes, handed.routes[:positions])

    def write(self, blocks: Many[int], generations: Many[int], start: int) -> None:
        handed, stop = self.handover, len(self.handover.token_ids)
        slots = sequence_slots(blocks, stop, self.block_size)[start:]
        self.cache.copy_in(slots, handed.keys[:, start:], handed.values[:, start:])
        versions = row_versions(handed.head.versions, stop)[start:]
        rows = self.capture.rows_of(None if handed.routes is None else handed.routes[start:], versions)
        self.capture.restore_rows(slots, np.repeat(generations, self.block_size)[start:stop], rows)
