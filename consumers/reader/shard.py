"""Which rows and layers of a batch one rank of Megatron holds. Pure.

Context parallel, zigzag: every sequence is padded at its end to a multiple of `2 * cp_size` and cut into that many
equal pieces; rank r has the pieces r and `2 * cp_size - 1 - r` (Transformer Engine's partition of packed sequences).
What a rank has of all sequences, in their order, is padded at the end to a multiple of `pad_multiple` (and of `tp_size`
with sequence parallel).

Context parallel, contiguous: the packed sequences together are padded once, at the very end, so that `cp_size` equal
spans come out, each a multiple of those; rank r has the r-th, wherever it cuts a sequence (Megatron-Core's
`cp_partition_mode` of packed sequences, and what Ulysses does).

With sequence parallel tensor rank t has the t-th of `tp_size` equal pieces of that, without it every tensor rank has
all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from moebus.schemas.errors import InvalidInput

ContextLayout = Literal["zigzag", "contiguous"]


@dataclass(frozen=True, slots=True)
class MegatronShard:
    """One rank's place. `layout`: how context parallelism deals out tokens. `pad_multiple`: the rows of a rank before
    the tensor split are a multiple of it."""

    cp_rank: int = 0
    cp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    sequence_parallel: bool = False
    layout: ContextLayout = "zigzag"
    pad_multiple: int = 1

    def __post_init__(self) -> None:
        for size in ("cp_size", "tp_size", "pad_multiple"):
            _integer(size, getattr(self, size), 1, 1 << 20)
        _integer("cp_rank", self.cp_rank, 0, self.cp_size - 1)
        _integer("tp_rank", self.tp_rank, 0, self.tp_size - 1)
        if self.layout not in get_args(ContextLayout):
            raise InvalidInput("layout", f"{self.layout!r} is unknown; known are {', '.join(get_args(ContextLayout))}")

    def local_lengths(self, lengths: Sequence[int]) -> list[int]:
        """Rows that this context rank has of each sequence, the padding of zigzag included."""
        if self._zigzag:
            return [-(-length // (2 * self.cp_size)) * 2 for length in lengths]
        first, last = self._span(sum(lengths))
        stops = np.cumsum(np.asarray(lengths, np.int64)).tolist()
        ends = zip(stops, lengths, strict=True)
        return [max(0, min(last, stop) - max(first, stop - length)) for stop, length in ends]

    def rows(self, lengths: Sequence[int]) -> npt.NDArray[np.int64]:
        """Which rows of the packed batch this rank has, in its order; -1 for padding."""
        mine = self._of_each(lengths) if self._zigzag else self._of_all(sum(lengths))
        if not self.sequence_parallel:
            return mine
        size = len(mine) // self.tp_size
        return mine[self.tp_rank * size : (self.tp_rank + 1) * size]

    @property
    def _zigzag(self) -> bool:
        # one rank alone holds all sequences, without padding between them
        return self.layout == "zigzag" and self.cp_size > 1

    @property
    def _multiple(self) -> int:
        return math.lcm(self.pad_multiple, self.tp_size if self.sequence_parallel else 1)

    def _span(self, total: int) -> tuple[int, int]:
        """First and last (exclusive) row of a contiguous rank, padding at the end of the batch included."""
        size = -(-total // (self.cp_size * self._multiple)) * self._multiple
        return self.cp_rank * size, (self.cp_rank + 1) * size

    def _of_all(self, total: int) -> npt.NDArray[np.int64]:
        rows = np.arange(*self._span(total), dtype=np.int64)
        return np.where(rows < total, rows, -1)

    def _of_each(self, lengths: Sequence[int]) -> npt.NDArray[np.int64]:
        starts = np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))])
        parts = [start + self._of_one(length) for start, length in zip(starts[:-1], lengths, strict=True)]
        mine = np.concatenate([np.where(part < stop, part, -1) for part, stop in zip(parts, starts[1:], strict=True)]
                              or [np.empty(0, np.int64)])  # fmt: skip
        return np.concatenate([mine, np.full(-len(mine) % self._multiple, -1, np.int64)])

    def _of_one(self, length: int) -> npt.NDArray[np.int64]:
        """Rows of one sequence, counted from its first; beyond `length` for its padding."""
        pieces = 2 * self.cp_size
        size = -(-length // pieces)
        mine = (self.cp_rank, pieces - 1 - self.cp_rank)
        return np.concatenate([np.arange(piece * size, (piece + 1) * size, dtype=np.int64) for piece in mine])


def stage_layers(
    moe_layers: Sequence[int], num_hidden_layers: int, pp_rank: int, pp_size: int, vp_size: int = 1
) -> list[tuple[int, ...]]:
    """Global numbers of the MoE layers of one pipeline stage, one tuple a model chunk (`vp_size` of them).

    The layers are cut into `pp_size * vp_size` equal runs, dealt out to the stages in turn, as Megatron's interleaved
    schedule does.

    Raises:
        InvalidInput: field `num_hidden_layers`, where it does not divide; `pp_rank`.
    """
    _integer("pp_size", pp_size, 1, 1 << 16)
    _integer("pp_rank", pp_rank, 0, pp_size - 1)
    _integer("vp_size", vp_size, 1, 1 << 16)
    if num_hidden_layers % (pp_size * vp_size):
        raise InvalidInput("num_hidden_layers", f"{num_hidden_layers} layers do not divide by {pp_size} * {vp_size}")
    size = num_hidden_layers // (pp_size * vp_size)
    firsts = [(chunk * pp_size + pp_rank) * size for chunk in range(vp_size)]
    return [tuple(layer for layer in moe_layers if first <= layer < first + size) for first in firsts]


def _integer(field: str, value: int, lowest: int, highest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise InvalidInput(field, f"{value!r} is not an integer from {lowest} to {highest}")
