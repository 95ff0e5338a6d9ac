"""Routes on the host, one row per KV slot: they live and die with the block that holds the token's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle.model import Tensor
from moebus.engine.paddle.runtime import load_paddle
from moebus.engine.paddle.slots import Ints, sequence_slots
from moebus.engine.port import EngineFailed
from moebus.engine.spans import version_spans
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.model_card import ModelCard

FLUSH_STEPS = 16


class RouteMissing(EngineFailed):
    """A row that a request needs was never captured, or belongs to what the slot held before."""


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """Rows of a block apart from their slots: `ids` [n, moe_layers, top_k], `valid` and `version` [n]."""

    ids: RouteArray
    valid: npt.NDArray[np.bool_]
    version: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Pending:
    """What one step captured: `slots` and `generations` [T], `layers` ids [T, top_k] each, on the device."""

    slots: Ints
    generations: Ints
    version: str
    layers: list[Tensor]


class RouteCapture:
    """`buffer` [slots, moe_layers, top_k], of the smallest type that holds the ids. A row is valid for a block's
    generation only, so what an evicted block left behind can not be taken for new rows.

    What steps captured goes to the buffer a few steps at a time, always before anybody reads it: a copy for each step
    would cost more than all else that capture does.
    """

    def __init__(self, card: ModelCard, num_slots: int, block_size: int) -> None:
        self.card = card
        self._block_size = block_size
        self._buffer = np.zeros((num_slots, len(card.moe_layers), card.top_k), dtype=card.dtype)
        self._generation = np.zeros(num_slots, dtype=np.int64)  # 0: never written
        self._version = np.zeros(num_slots, dtype=np.int32)
        self._versions: list[str] = []
        self._pending: list[_Pending] = []

    def step(self, slots: Ints, generations: Ints, version: str) -> StepCapture:
        """What the router hook of one forward writes to. `slots` [T], `generations` [T] of their blocks."""
        return StepCapture(self, slots, generations, version)

    def defer(self, slots: Ints, generations: Ints, version: str, layers: list[Tensor]) -> None:
        """As `write`, sooner or later; `layers`: ids [T, top_k] of each MoE layer, which nobody changes any more."""
        self._pending.append(_Pending(slots, generations, version, layers))
        if len(self._pending) >= FLUSH_STEPS:
            self.flush()

    def flush(self) -> None:
        """Writes what was deferred, in order."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        for one in pending:
            if one.version not in self._versions:
                self._versions.append(one.version)
        slots = np.concatenate([one.slots for one in pending])
        self._buffer[slots] = self._on_host(pending)  # of a slot that occurs twice the last row stays
        self._generation[slots] = np.concatenate([one.generations for one in pending])
        indexes = [self._versions.index(one.version) for one in pending]
        self._version[slots] = np.repeat(indexes, [len(one.slots) for one in pending])

    def _on_host(self, pending: Sequence[_Pending]) -> RouteArray:
        """[T, moe_layers, top_k] of all steps. One copy from a device; on the CPU there is nothing to copy from."""
        if pending[0].layers[0].place.is_cpu_place():
            rows: RouteArray = np.empty(
                (sum(len(one.slots) for one in pending), *self._buffer.shape[1:]), dtype=self.card.dtype
            )
            start = 0
            for one in pending:
                stop = start + len(one.slots)
                for index, layer in enumerate(one.layers):
                    rows[start:stop, index] = layer.numpy()
                start = stop
            return rows
        paddle = load_paddle()
        steps = [paddle.stack(one.layers, axis=1) for one in pending]
        stacked: RouteArray = paddle.concat(steps, axis=0).numpy().astype(self.card.dtype)
        return stacked

    def write(self, slots: Ints, generations: Ints, version: str, ids: RouteArray) -> None:
        """Rows `ids` [T, moe_layers, top_k] for `slots` [T]."""
        self.flush()
        if version not in self._versions:
            self._versions.append(version)
        self._buffer[slots] = ids
        self._generation[slots] = generations
        self._version[slots] = self._versions.index(version)

    def no_rows(self) -> RouteArray:
        """[0, moe_layers, top_k]."""
        return self._buffer[:0].copy()

    def copy_rows(self, slots: Ints, generation: int) -> CapturedRows:
        """The rows of a block that is leaving its slots."""
        self.flush()
        return CapturedRows(self._buffer[slots], self._generation[slots] == generation, self._version[slots])

    def restore_rows(self, slots: Ints, generation: int, rows: CapturedRows) -> None:
        """Puts a block's rows into other slots; those that were not valid are not valid there either."""
        self.flush()
        self._buffer[slots] = rows.ids
        self._generation[slots] = np.where(rows.valid, generation, 0)
        self._version[slots] = rows.version

    def gather(
        self, block_table: Sequence[int], generations: Sequence[int], rows: int
    ) -> tuple[RouteArray, tuple[tuple[int, str], ...]]:
        """A copy of a sequence's first `rows` rows, and the versions they were computed under.

        `generations`: of the blocks of `block_table`, as they were when the sequence took them.

        Raises:
            RouteMissing: naming the first row.
        """
        self.flush()
        slots = sequence_slots(block_table, rows, self._block_size)
        wanted = np.repeat(np.asarray(generations, dtype=np.int64), self._block_size)[:rows]
        bad = np.flatnonzero(self._generation[slots] != wanted)
        if len(bad):
            raise RouteMissing(f"routes: {len(bad)} of {rows} rows were not captured, the first is row {bad[0]}")
        routes: RouteArray = self._buffer[slots]
        return routes, version_spans([self._versions[index] for index in self._version[slots]])


class StepCapture:
    """The router hook of one forward: collects on the device."""

    def __init__(self, capture: RouteCapture, slots: Ints, generations: Ints, version: str) -> None:
        self._capture = capture
        self._where = (slots, generations, version)
        self._layers: dict[int, Tensor] = {}

    def __call__(self, layer: int, ids: Tensor) -> None:
        self._layers[layer] = ids

    def finish(self) -> None:
        """Hands the rows over.

        Raises:
            RouteMissing: a MoE layer of the model card was not seen, or one outside it was.
        """
        layers = self._capture.card.moe_layers
        if tuple(sorted(self._layers)) != layers:
            raise RouteMissing(f"routes: layers {sorted(self._layers)} were seen, the model card has {list(layers)}")
        self._capture.defer(*self._where, [self._layers[layer] for layer in layers])


class PositionCapture(StepCapture):
    """The position-coded self check: writes each token's position in place of its expert ids, so that a sequence's
    gathered rows must read 0, 1, 2, ... in every layer and k."""

    def __init__(self, capture: RouteCapture, slots: Ints, generations: Ints, version: str, positions: Ints) -> None:
        super().__init__(capture, slots, generations, version)
        self._positions = positions

    def __call__(self, layer: int, ids: Tensor) -> None:
        coded = np.broadcast_to(self._positions[:, None], tuple(ids.shape))
        super().__call__(layer, load_paddle().to_tensor(np.ascontiguousarray(coded)))
