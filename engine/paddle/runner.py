"""Forwards on the paged cache: tokens in, logits out, routes captured on the way."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle.blocks import BlockPool
from moebus.engine.paddle.capture import PositionCapture, RouteCapture
from moebus.engine.paddle.config import ModelConfig
from moebus.engine.paddle.kvcache import KVCache, PagedAttention
from moebus.engine.paddle.model import Decoder, Tensor
from moebus.engine.paddle.residency import WeightMemory
from moebus.engine.paddle.routing import OwnRouting
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
        seen: dict[int, Tensor] = {}
        step = self._position_capture(slots, blocks, positions) if self._self_check else None
        route = OwnRouting(self._config, step or seen.__setitem__, whole=self._capture.takes_whole and step is None)
        with load_paddle().no_grad():  # thread-local
            hidden = self._decoder.hidden(tokens, positions, attend, route)
            last = load_paddle().to_tensor(np.arange(1, len(history) + 1, dtype=np.int64) * count - 1)
            logits: npt.NDArray[np.float32] = self._decoder.logits(load_paddle().gather(hidden, last)).numpy()
            self._draft(sequences, lengths, hidden, last, (tokens, positions, attend))
        if step is not None:
            step.finish()
        else:  # steps run on valid weights only
            version = self._weights.committed.version
            self._capture.add(slots, self._generations(sequences, history, blocks), version, seen, whole=route.whole)
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.computed = length
        return logits

    def _generations(self, sequences: Many[Sequence], history: Many[int], blocks: Ints) -> Many[int] | Ints:
        """Of the block of each token."""
        if len(blocks) > len(history):
            return self._pool.generations(blocks)
        size = self._config.block_size  # one each: a short list is made faster than numpy looks them up
        return [one.generations[start // size] for one, start in zip(sequences, history, strict=True)]

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

    def _position_capture(self, slots: Ints, blocks: Ints, positions: Ints) -> PositionCapture:
        version = self._weights.committed.version
        return PositionCapture(self._capture, slots, self._pool.generations(blocks), version, positions)
