"""Token position -> KV slot: slot = block * block_size + position % block_size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def step_positions(history: Sequence[int], now: Sequence[int]) -> tuple[Ints, Ints]:
    """Of every token of a step: its row in the batch, and its position. Row b has `history[b]` tokens before it and
    `now[b]` in this step."""
    rows = np.repeat(np.arange(len(now), dtype=np.int64), now)
    positions = [np.arange(start, start + count, dtype=np.int64) for start, count in zip(history, now, strict=True)]
    return rows, np.concatenate([np.zeros(0, np.int64), *positions])


def blocks_of(block_tables: Sequence[Sequence[int]], rows: Ints, positions: Ints, block_size: int) -> Ints:
    """The block of each position, through the block table of its row."""
    blocks = [
        block_tables[row][index] for row, index in zip(rows.tolist(), (positions // block_size).tolist(), strict=True)
    ]
    return np.asarray(blocks, dtype=np.int64)


def slots_of(block_tables: Sequence[Sequence[int]], rows: Ints, positions: Ints, block_size: int) -> Ints:
    """The slot of each position, through the block table of its row."""
    return blocks_of(block_tables, rows, positions, block_size) * block_size + positions % block_size


def sequence_slots(block_table: Sequence[int], count: int, block_size: int) -> Ints:
    """The slots [count] of a sequence's first `count` positions."""
    used = np.asarray(block_table[: -(-count // block_size)], dtype=np.int64)
    grid = used[:, None] * block_size + np.arange(block_size, dtype=np.int64)
    flat: Ints = grid.reshape(-1)[:count]
    return flat
