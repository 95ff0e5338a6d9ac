"""A request inside the Paddle engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Event
from typing import Any

import numpy as np

from moebus.engine.admission import Ticket
from moebus.engine.paddle.blocks import BlockPool, chain_key
from moebus.engine.paddle.tiers import CacheTiers
from moebus.engine.port import FinishReason, Generation, Prompt
from moebus.schemas.dtypes import RouteArray


@dataclass(eq=False)
class Sequence:
    """`tokens`: prompt and sampled ones. `computed`: positions whose keys and values are in the cache. `blocks` and
    their `generations`: enough for all positions it may reach, taken at once when it starts."""

    prompt: Prompt
    ticket: Ticket
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    done: Event = field(default_factory=Event)
    result: Generation | None = None
    error: Exception | None = None
    _keys: list[bytes] = field(default_factory=list)
    _epoch: int = -1

    @classmethod
    def of(cls, prompt: Prompt, ticket: Ticket) -> Sequence:
        return cls(prompt, ticket, prompt.token_ids.tolist())

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def sampled(self) -> int:
        return len(self.logprobs)

    @property
    def prefilled(self) -> bool:
        return self.computed >= self.prompt_tokens

    def positions_needed(self) -> int:
        """Positions that will be forwarded at most: all but the last sampled token."""
        return self.prompt_tokens + max(self.prompt.max_tokens, 1) - 1

    def start(self, tiers: CacheTiers[Any]) -> bool:
        """Takes cached blocks and new ones for all it needs; False, and nothing taken, where there are too few now."""
        taken = tiers.take(self.tokens, self.positions_needed())
        if taken is None:
            return False
        self.blocks = taken.blocks
        self.generations = [tiers.pool.generation(block) for block in self.blocks]
        self.cached = self.computed = len(taken.keys) * tiers.block_size
        self._keys, self._epoch = taken.keys, tiers.pool.epoch
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

    def add(self, token: int, logprob: float) -> FinishReason | None:
        """Takes a sampled token; returns why the sequence ends, if it does."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.prompt.stop_token_ids:
            return "stop"
        return "length" if self.sampled >= self.prompt.max_tokens else None

    def release(self, pool: BlockPool) -> None:
        blocks, self.blocks = self.blocks, []
        pool.release(blocks)

    def outcome(
        self, reason: FinishReason, routes: RouteArray | None, versions: tuple[tuple[int, str], ...]
    ) -> Generation:
        return Generation(
            request_id=self.prompt.request_id,
            prompt_tokens=self.prompt_tokens,
            token_ids=np.asarray(self.tokens[self.prompt_tokens :], dtype=np.int64),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            finish_reason=reason,
            routes=routes,
            versions=versions,
            cached_tokens=self.cached,
        )
