"""Forwards on the paged cache: tokens in, logits out, routes captured on the way."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle.blocks import BlockPool
from moebus.engine.paddle.capture import PositionCapture, RouteCapture
from moebus.engine.paddle.config import ModelConfig
from moebus.engine.paddle.kvcache import KVCache, PagedAttention
from moebus.engine.paddle.model import Decoder, Tensor
from moebus.engine.paddle.residency import WeightMemory
from moebus.engine.paddle.routing import OwnRouting, RouterHook
from moebus.engine.paddle.runtime import load_paddle
from moebus.engine.paddle.sequence import Sequence
from moebus.engine.paddle.slots import Ints, blocks_of, sequence_slots, step_positions


class Runner:
    """Every sequence of a call forwards the same number of tokens: a prefill runs alone, decodes run together."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightMemory,
        cache: KVCache,
        pool: BlockPool,
        capture: RouteCapture,
        *,
        self_check: bool,
    ) -> None:
        self._config = config
        self._weights = weights
        self._cache = cache
        self._pool = pool
        self._capture = capture
        self._self_check = self_check
        self._decoder = Decoder(config, weights.parameters)

    def forward(self, sequences: Many[Sequence], count: int) -> npt.NDArray[np.float32]:
        """Forwards the next `count` tokens of each sequence; logits [B, vocab] after each one's last of them.

        Only when all went well do the sequences count as computed.
        """
        history = [sequence.computed for sequence in sequences]
        lengths = [start + count for start in history]
        rows, positions = step_positions(history, [count] * len(history))
        tables = [sequence.blocks for sequence in sequences]
        blocks = blocks_of(tables, rows, positions, self._config.block_size)
        slots = blocks * self._config.block_size + positions % self._config.block_size
        tokens = np.concatenate(
            [np.asarray(s.tokens[start : start + count], np.int64) for s, start in zip(sequences, history, strict=True)]
        )
        attend = PagedAttention(self._cache, slots, self._seen_slots(tables, lengths), np.asarray(lengths, np.int64))
        hook, captured = self._hook(slots, blocks, positions)
        with load_paddle().no_grad():  # thread-local
            hidden = self._decoder.hidden(tokens, positions, attend, OwnRouting(self._config, hook))
            last = load_paddle().to_tensor(np.arange(1, len(history) + 1, dtype=np.int64) * count - 1)
            logits: npt.NDArray[np.float32] = self._decoder.logits(load_paddle().gather(hidden, last)).numpy()
            self._draft(sequences, lengths, hidden, last, (tokens, positions, attend))
        captured()
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.computed = length
        return logits

    def _draft(
        self,
        sequences: Many[Sequence],
        lengths: Many[int],
        hidden: Tensor,
        last: Tensor,
        step: tuple[Ints, Ints, PagedAttention],
    ) -> None:
        """Runs the draft layers and notes what the first one proposes. They route without the hook: they are none of
        the model's own layers, and a trainer has none of their routes to replay."""
        if not self._config.draft_layers:
            return
        states = self._decoder.drafts(hidden, *step, OwnRouting(self._config))
        proposed = self._decoder.logits(load_paddle().gather(states[0], last)).numpy().argmax(axis=-1)
        for sequence, length, token in zip(sequences, lengths, proposed.tolist(), strict=True):
            if length == len(sequence.tokens):
                sequence.proposed[length + 1] = token

    def _seen_slots(self, tables: Many[Many[int]], lengths: Many[int]) -> Ints:
        seen = np.zeros((len(tables), max(lengths)), dtype=np.int64)
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            seen[row, :length] = sequence_slots(table, length, self._config.block_size)
        return seen

    def _hook(self, slots: Ints, blocks: Ints, positions: Ints) -> tuple[RouterHook, Callable[[], None]]:
        """The router hook of a step, and what to call when the step has gone well."""
        version = self._weights.committed.version  # steps run on valid weights only
        if self._self_check:
            step = PositionCapture(self._capture, slots, self._pool.generations(blocks), version, positions)
            return step, step.finish
        seen: dict[int, Tensor] = {}
        add, generations = self._capture.add, self._pool.generations
        return seen.__setitem__, lambda: add(slots, generations(blocks), version, seen)
