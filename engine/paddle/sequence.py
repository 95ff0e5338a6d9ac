"""A request inside the Paddle engine."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import numpy as np

from moebus.engine.admission import Ticket
from moebus.engine.paddle.blocks import BlockPool, chain_key
from moebus.engine.paddle.capture import RouteCapture, RouteMissing
from moebus.engine.paddle.tiers import CacheTiers
from moebus.engine.port import FinishReason, Generation, Prompt
from moebus.engine.prompts import route_rows, tell_token
from moebus.engine.spans import row_versions, version_spans
from moebus.schemas.dtypes import RouteArray


@dataclass(eq=False)
class Sequence:
    """`tokens`: prompt and sampled ones. `computed`: positions whose keys and values are in the cache. `blocks` and
    their `generations`: enough for all of `tokens` while it runs. `leader`: a request of the same prompt that goes
    first, so that this one finds it in the cache. `proposed`: tokens by position that a draft layer expects."""

    prompt: Prompt
    ticket: Ticket
    tokens: list[int]
    stops: frozenset[int] = frozenset()
    leader: Sequence | None = None
    blocks: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int | None = None
    logprobs: list[float] = field(default_factory=list)
    proposed: dict[int, int] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    done: Event = field(default_factory=Event)
    result: Generation | None = None
    error: Exception | None = None
    _keys: list[bytes] = field(default_factory=list)
    _epoch: int = -1
    _kept: list[RouteArray] = field(default_factory=list)
    _kept_versions: list[str] = field(default_factory=list)
    _lost: RouteMissing | None = None

    @classmethod
    def of(cls, prompt: Prompt, ticket: Ticket, eos: Many[int] = ()) -> Sequence:
        """`eos`: tokens that end every request which does not ignore them."""
        stops = frozenset(prompt.stop_token_ids) | frozenset(() if prompt.ignore_eos else eos)
        return cls(prompt, ticket, prompt.token_ids.tolist(), stops)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def sampled(self) -> int:
        return len(self.logprobs)

    @property
    def pending(self) -> int:
        """Tokens to forward before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def prefilled(self) -> bool:
        return max(self.computed, len(self._kept_versions)) >= self.prompt_tokens

    @property
    def may_start(self) -> bool:
        return self.leader is None or self.leader.prefilled or self.leader.done.is_set()

    # -- blocks

    def start(self, tiers: CacheTiers[Any]) -> bool:
        """Takes cached blocks and new ones for its tokens; False, and nothing taken, where there are too few now."""
        taken = tiers.take(self.tokens, len(self.tokens))
        if taken is None:
            return False
        self.blocks = taken.blocks
        self.generations = [tiers.pool.generation(block) for block in self.blocks]
        self.computed = len(taken.keys) * tiers.block_size
        self.cached = self.computed if self.cached is None else self.cached  # the first start is what counts
        self._keys, self._epoch = taken.keys, tiers.pool.epoch
        return True

    def grow(self, pool: BlockPool) -> bool:
        """Takes a block where the last token needs one; False where there is none."""
        missing = -(-len(self.tokens) // pool.block_size) - len(self.blocks)
        if missing <= 0:
            return True
        fresh = pool.allocate(missing)
        if fresh is None:
            return False
        self.blocks += fresh
        self.generations += [pool.generation(block) for block in fresh]
        return True

    def register_full_blocks(self, pool: BlockPool) -> None:
        """Offers newly filled blocks to the prefix cache, unless it was reset since this sequence started."""
        if self._epoch != pool.epoch:
            return
        size = pool.block_size
        for index in range(len(self._keys), self.computed // size):
            parent = self._keys[-1] if self._keys else pool.root
            self._keys.append(chain_key(parent, self.tokens[index * size : (index + 1) * size]))
            pool.register(self.blocks[index], self._keys[-1])

    def release(self, pool: BlockPool) -> None:
        """Gives the blocks back: nothing is computed any more."""
        blocks, self.blocks, self.generations, self.computed = self.blocks, [], [], 0
        pool.release(blocks)

    # -- tokens and rows

    def add(self, token: int, logprob: float) -> FinishReason | None:
        """Takes a sampled token; returns why the sequence ends, if it does. Raises EngineFailed where the request's
        `on_token` fails."""
        expected = self.proposed.pop(len(self.tokens), None)
        self.drafted += expected is not None
        self.accepted += expected == token
        self.tokens.append(token)
        self.logprobs.append(logprob)
        tell_token(self.prompt, token, logprob)
        if token in self.stops:
            return "stop"
        return "length" if self.sampled >= self.prompt.max_tokens else None

    def keep_rows(self, capture: RouteCapture) -> None:
        """Copies what was captured before the blocks go. The first capture of a row wins over what a later one, for
        the same position, may find: it is the one that its next token was sampled by."""
        try:
            self._take_rows(capture, self.computed)
        except RouteMissing as error:
            self._lost = error

    def _take_rows(self, capture: RouteCapture, rows: int) -> None:
        have = len(self._kept_versions)
        if rows > have:
            routes, versions = capture.gather(self.blocks, self.generations, rows)
            self._kept.append(routes[have:])
            self._kept_versions += row_versions(versions, rows)[have:]

    def outcome(self, reason: FinishReason, capture: RouteCapture) -> Generation:
        """The result; the blocks are still held.

        Raises:
            RouteMissing
        """
        if self._lost is not None:
            raise self._lost
        rows = route_rows(self.prompt_tokens, self.sampled, prefilled=self.prefilled)
        self._take_rows(capture, rows)
        routes = np.concatenate([capture.no_rows(), *self._kept])[:rows]
        return Generation(
            request_id=self.prompt.request_id,
            prompt_tokens=self.prompt_tokens,
            token_ids=np.asarray(self.tokens[self.prompt_tokens :], dtype=np.int64),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            finish_reason=reason,
            routes=routes if self.prompt.capture_routes else None,
            versions=version_spans(self._kept_versions[:rows]),
            cached_tokens=self.cached or 0,
        )
