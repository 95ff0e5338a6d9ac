"""A request inside the Paddle engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Protocol

import numpy as np

from moebus.engine.admission import Ticket
from moebus.engine.paddle.blocks import BlockPool, chain_key
from moebus.engine.paddle.capture import RouteCapture, RouteMissing
from moebus.engine.paddle.tiers import CacheTiers, Taken
from moebus.engine.port import FinishReason, Generation, Prompt
from moebus.engine.prompts import route_rows, tell_token
from moebus.engine.spans import row_versions, version_spans
from moebus.schemas.dtypes import RouteArray

_log = logging.getLogger(__name__)


class Given(Protocol):
    """A prompt's keys, values and rows from another engine. `may_be_shared`: its blocks may serve other requests, while
    the prefix cache is of `epoch`."""

    epoch: int
    may_be_shared: bool

    def agrees(self, blocks: Many[int], generations: Many[int], positions: int) -> bool:
        """Whether these blocks, found in the cache, hold the same routes and versions for that many positions."""
        ...

    def write(self, blocks: Many[int], generations: Many[int], start: int) -> None:
        """Positions `start` to the prompt's end into `blocks`."""
        ...


@dataclass(eq=False)
class Sequence:
    """`tokens`: prompt and sampled ones. `computed`: positions whose keys and values are in the cache. `blocks` and
    their `generations`: enough for all of `tokens` while it runs. `leader`: a request of the same prompt that goes
    first, so that this one finds it in the cache. `proposed`: tokens by position that a draft layer expects. `given`:
    what another engine computed of it; `untold`: its first token came from there and `on_token` has not seen it.
    `at_end`: called when it ends well, while its blocks are still held."""

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
    _unrecorded: bool = False
    _lost: RouteMissing | None = None
    given: Given | None = None
    untold: bool = False
    at_end: Callable[[Sequence], None] | None = None

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
        self._take(taken, tiers)
        given = self.given
        if given is None or not self.computed or given.agrees(self.blocks, self.generations, self.computed):
            return True
        self.release(tiers.pool)  # what was handed over is what its first token was sampled by
        taken = tiers.take(self.tokens, len(self.tokens), cached=False)
        if taken is not None:
            self._take(taken, tiers)
        return taken is not None

    def _take(self, taken: Taken, tiers: CacheTiers[Any]) -> None:
        self.blocks = taken.blocks
        self.generations = tiers.pool.generations(np.asarray(self.blocks, dtype=np.int64)).tolist()
        self.computed = len(taken.keys) * tiers.block_size
        self.cached = self.computed if self.cached is None else self.cached  # the first start is what counts
        self._keys, self._epoch = taken.keys, tiers.pool.epoch

    def take_given(self, tiers: CacheTiers[Any]) -> None:
        """Once it has started: what another engine computed goes into the blocks that the cache did not have. Where it
        cannot, it is computed here."""
        given, self.given = self.given, None
        if given is None or self.computed >= self.prompt_tokens:
            return
        try:
            given.write(self.blocks, self.generations, self.computed)
        except Exception as error:  # whatever a device raises
            _log.warning("what was handed over for %r is computed again: %s", self.prompt.request_id, error)
            return
        self.computed = self.prompt_tokens
        if not given.may_be_shared or given.epoch != tiers.pool.epoch:
            self._epoch = -1
        self.register_full_blocks(tiers.pool)

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
        return self.tell_last()

    def tell_last(self) -> FinishReason | None:
        """Tells `on_token` the last token; returns why the sequence ends, if it does."""
        self.untold = False
        if not self.sampled:
            return "length"
        token = self.tokens[-1]
        tell_token(self.prompt, token, self.logprobs[-1])
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
            routes, versions = capture.gather_recorded(self.blocks, self.generations, rows, have)
            self.keep(routes, row_versions(versions, rows - have))

    def keep(self, routes: RouteArray | None, versions: Many[str]) -> None:
        """Its next rows, with the version of each; None: they were computed while capture was suspended."""
        if routes is None:
            self._unrecorded = True
        else:
            self._kept.append(routes)
        self._kept_versions += versions

    def routes(self, capture: RouteCapture, rows: int) -> RouteArray | None:
        """The first `rows` rows of those it has; None where capture was suspended for one of them."""
        return None if self._unrecorded else np.concatenate([capture.no_rows(), *self._kept])[:rows]

    def outcome(self, reason: FinishReason, capture: RouteCapture) -> Generation:
        """The result; the blocks are still held. Routes are None where capture was suspended for one of its rows.

        Raises:
            RouteMissing
        """
        if self._lost is not None:
            raise self._lost
        rows = route_rows(self.prompt_tokens, self.sampled, prefilled=self.prefilled)
        self._take_rows(capture, rows)
        return Generation(
            request_id=self.prompt.request_id,
            prompt_tokens=self.prompt_tokens,
            token_ids=np.asarray(self.tokens[self.prompt_tokens :], dtype=np.int64),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            finish_reason=reason,
            routes=self.routes(capture, rows) if self.prompt.capture_routes else None,
            versions=version_spans(self._kept_versions[:rows]),
            cached_tokens=self.cached or 0,
        )
