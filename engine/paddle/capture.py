"""Routes on the host, one row per KV slot: they live and die with the block that holds the token's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle.device import CpuDevice, Device, HostCopy
from moebus.engine.paddle.model import Tensor
from moebus.engine.paddle.runtime import load_paddle
from moebus.engine.paddle.slots import Ints, sequence_slots
from moebus.engine.port import EngineFailed
from moebus.engine.spans import version_spans
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.model_card import ModelCard

FLUSH_STEPS = 64
FLUSH_ROWS = 1024
"""What steps captured waits on the device until there are this many steps, or rows, of it."""

Spans = tuple[tuple[int, str], ...]


class RouteMissing(EngineFailed):
    """A row that a request needs was never captured, or belongs to what the slot held before."""


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """Rows of a block apart from their slots: `ids` [n, moe_layers, top_k], `valid`, `recorded` and `version` [n]."""

    ids: RouteArray
    valid: npt.NDArray[np.bool_]
    recorded: npt.NDArray[np.bool_]
    version: npt.NDArray[np.int32]


_Ids = dict[int, Tensor]


class _Step(NamedTuple):
    """What one step captured: `slots` and `generations` [T]; `ids` by layer, or on their way to the host, or None while
    capture is suspended. `whole`: all experts in order, of which the first `top_k` are the ids."""

    slots: Ints
    generations: Sequence[int] | Ints
    version: str
    ids: _Ids | HostCopy | None
    whole: bool


class RouteCapture:
    """`buffer` [slots, moe_layers, top_k], of the smallest type that holds the ids. A row is valid for a block's
    generation only, so what an evicted block left behind can not be taken for new rows; it is recorded unless capture
    was suspended when it was computed.

    What steps captured goes to the buffer many steps at a time, always before anybody reads it: a copy for each step
    would cost more than all else that capture does. Also a hook for a model of the user's own: see `docs/paddle.md`.
    `device`: with `default_device()` ids leave a GPU beside the computation; without, they are read when needed.
    """

    def __init__(self, card: ModelCard, num_slots: int, block_size: int, device: Device | None = None) -> None:
        self.card = card
        self.device: Device = device or CpuDevice()
        self.suspended = False
        self._block_size = block_size
        self._buffer = np.zeros((num_slots, len(card.moe_layers), card.top_k), dtype=card.dtype)
        self._generation = np.zeros(num_slots, dtype=np.int64)  # 0: never written
        self._recorded = np.zeros(num_slots, dtype=np.bool_)
        self._version = np.zeros(num_slots, dtype=np.int32)
        self._versions: list[str] = []
        self._version_index: dict[str, int] = {}
        self._pending: list[tuple[Ints, Sequence[int] | Ints, str, _Ids | HostCopy | None, bool]] = []  # of _Step
        self._waiting_rows = 0
        self._on_cpu = self.device.kind == "cpu"

    def step(self, slots: Ints, generations: Ints, version: str) -> StepCapture:
        """What the router hook of one forward writes to. `slots` [T], `generations` [T] of their blocks."""
        return StepCapture(self, slots, generations, version)

    @property
    def takes_whole(self) -> bool:
        """Whether `add` with `whole` is the quicker way: where tensors are read in place."""
        return self._on_cpu

    def add(
        self, slots: Ints, generations: Sequence[int] | Ints, version: str, ids: _Ids, *, whole: bool = False
    ) -> None:
        """What one step captured: the ids [T, top_k] of each MoE layer by its global number, which nobody changes any
        more; with `whole` [T, experts] in order of preference. Written sooner or later. Lean, as it runs between
        kernels in every step; `step` is the way with checks."""
        if self._on_cpu and not self.suspended:
            self._pending.append((slots, generations, version, ids, whole))
        elif self.suspended:
            self._pending.append((slots, generations, version, None, False))
        else:
            copy = self.device.begin_copy(list(self.in_order(ids).values()), "int32")  # shows an id out of range
            self._pending.append((slots, generations, version, copy, False))
        self._waiting_rows += len(slots)
        if len(self._pending) >= FLUSH_STEPS or self._waiting_rows >= FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Writes what was added, in order.

        Raises:
            RouteMissing: a layer is missing or gave something else than ids; the rows of these steps count as missing.
        """
        pending = [_Step(*one) for one in self._pending]
        self._pending, self._waiting_rows = [], 0
        if not pending:
            return
        slots = np.concatenate([one.slots for one in pending])
        ids = self._on_host(pending, len(slots))
        # of a slot that occurs twice the last row stays
        self._buffer[slots] = ids
        self._generation[slots] = np.concatenate([one.generations for one in pending])
        self._recorded[slots] = self._each(pending, [one.ids is not None for one in pending])
        self._version[slots] = self._each(pending, [self.version_index(one.version) for one in pending])

    @staticmethod
    def _each(pending: Sequence[_Step], values: list[Any]) -> Any:
        """One value per step as one per row, or as a single one where all are the same."""
        if values.count(values[0]) == len(values):
            return values[0]
        return np.repeat(values, [len(one.slots) for one in pending])

    def _on_host(self, pending: Sequence[_Step], rows: int) -> RouteArray:
        """[rows, moe_layers, top_k] of all steps; zeros for those that were suspended."""
        card = self.card
        flat = self._in_one(pending) if all(one.whole for one in pending) else self._one_by_one(pending)
        try:
            whole = flat.reshape(len(card.moe_layers), rows, card.top_k)
        except ValueError:
            raise RouteMissing(f"routes: {flat.shape[0]} rows of ids for {rows} tokens") from None
        # in the model's own type: a narrow one would hide an id that is out of range; below 0 is far above
        if whole.size and whole.view(f"u{whole.itemsize}").max() >= card.num_experts:
            raise RouteMissing(f"routes: an id outside 0..{card.num_experts - 1} was captured")
        return whole.transpose(1, 0, 2).astype(card.dtype)

    def _in_one(self, pending: Sequence[_Step]) -> npt.NDArray[Any]:
        """[moe_layers * rows, top_k] of steps that are whole: to join small tensors costs less than to read each."""
        steps = [self.in_order(one.ids) for one in pending if isinstance(one.ids, dict)]
        every = [step[layer] for layer in self.card.moe_layers for step in steps]
        with load_paddle().no_grad():
            joined = load_paddle().concat(every, axis=0)
        return np.ascontiguousarray(joined.numpy()[:, : self.card.top_k])

    def _one_by_one(self, pending: Sequence[_Step]) -> npt.NDArray[Any]:
        """The same of any steps."""
        steps = [self._read(one) for one in pending]
        return np.concatenate([step[layer] for layer in range(len(self.card.moe_layers)) for step in steps])

    def _read(self, step: _Step) -> Sequence[npt.NDArray[Any]]:
        """The ids of each MoE layer, [T, top_k]."""
        ids, top_k = step.ids, self.card.top_k
        if isinstance(ids, dict):
            return [one.numpy()[:, :top_k] for one in self.in_order(ids).values()]
        if ids is not None:
            return ids.result()
        return [np.zeros((len(step.slots), top_k), np.int64)] * len(self.card.moe_layers)

    def in_order(self, ids: _Ids) -> _Ids:
        """By layer of the card. Raises RouteMissing unless these are its layers."""
        layers = self.card.moe_layers
        if tuple(ids) == layers:  # as a rule
            return ids
        if tuple(sorted(ids)) != layers:
            raise RouteMissing(f"routes: layers {sorted(ids)} were seen, the model card has {list(layers)}")
        return {layer: ids[layer] for layer in layers}

    def version_index(self, version: str) -> int:
        """The number that stands for `version` in this buffer."""
        index = self._version_index.setdefault(version, len(self._versions))
        if index == len(self._versions):
            self._versions.append(version)
        return index

    def write(self, slots: Ints, generations: Ints, version: str, ids: RouteArray) -> None:
        """Rows `ids` [T, moe_layers, top_k] for `slots` [T]."""
        self.flush()
        self._buffer[slots] = ids
        self._generation[slots] = generations
        self._recorded[slots] = True
        self._version[slots] = self.version_index(version)

    def no_rows(self) -> RouteArray:
        """[0, moe_layers, top_k]."""
        return self._buffer[:0].copy()

    def copy_rows(self, slots: Ints, generation: int) -> CapturedRows:
        """The rows of a block that is leaving its slots."""
        self.flush()
        valid = self._generation[slots] == generation
        return CapturedRows(self._buffer[slots], valid, self._recorded[slots], self._version[slots])

    def rows_of(self, ids: RouteArray | None, versions: Sequence[str]) -> CapturedRows:
        """Rows that come from elsewhere, with the version of each; None: computed while capture was suspended."""
        index = {version: self.version_index(version) for version in set(versions)}
        everything = np.ones(len(versions), dtype=np.bool_)
        return CapturedRows(
            np.zeros(self.card.shape(len(versions)), self.card.dtype) if ids is None else ids,
            everything,
            everything if ids is not None else ~everything,
            np.asarray([index[version] for version in versions], dtype=np.int32),
        )

    def restore_rows(self, slots: Ints, generation: int | Ints, rows: CapturedRows) -> None:
        """Puts rows into other slots, of blocks of `generation`; those that were not valid are not valid there
        either."""
        self.flush()
        self._buffer[slots] = rows.ids
        self._generation[slots] = np.where(rows.valid, generation, 0)
        self._recorded[slots] = rows.recorded
        self._version[slots] = rows.version

    def gather(self, block_table: Sequence[int], generations: Sequence[int], rows: int) -> tuple[RouteArray, Spans]:
        """A copy of a sequence's first `rows` rows, and the versions they were computed under.

        `generations`: of the blocks of `block_table`, as they were when the sequence took them.

        Raises:
            RouteMissing: naming the first row; also for rows computed while capture was suspended.
        """
        routes, spans = self.gather_recorded(block_table, generations, rows)
        if routes is None:
            raise RouteMissing(f"routes: some of {rows} rows were computed while capture was suspended")
        return routes, spans

    def gather_recorded(
        self, block_table: Sequence[int], generations: Sequence[int], rows: int, start: int = 0
    ) -> tuple[RouteArray | None, Spans]:
        """As `gather`, of rows `start` to `rows`; None for the routes where capture was suspended for any of them.

        Raises:
            RouteMissing: as `gather`, for rows that are not there.
        """
        self.flush()
        slots = sequence_slots(block_table, rows, self._block_size)[start:]
        wanted = np.repeat(np.asarray(generations, dtype=np.int64), self._block_size)[start:rows]
        bad = np.flatnonzero(self._generation[slots] != wanted)
        if len(bad):
            raise RouteMissing(
                f"routes: {len(bad)} of {rows} rows were not captured, the first is row {start + bad[0]}"
            )
        spans = version_spans([self._versions[index] for index in self._version[slots]])
        return (self._buffer[slots] if self._recorded[slots].all() else None), spans


class StepCapture:
    """The router hook of one forward: collects on the device."""

    def __init__(self, capture: RouteCapture, slots: Ints, generations: Ints, version: str) -> None:
        self._capture = capture
        self._where = (slots, generations, version)
        self._seen: dict[int, Tensor] = {}

    def __call__(self, layer: int, ids: Tensor) -> None:
        self._seen[layer] = ids

    def finish(self) -> None:
        """Hands the rows over.

        Raises:
            RouteMissing: a MoE layer of the model card was not seen, or one outside it was, or one gave something else
            than ids [T, top_k].
        """
        ids, wanted = self._capture.in_order(self._seen), [len(self._where[0]), self._capture.card.top_k]
        for layer, one in ids.items():
            if list(one.shape) != wanted:
                raise RouteMissing(f"routes: layer {layer} gave ids {list(one.shape)}, {wanted} is needed")
        self._capture.add(*self._where, ids)


class PositionCapture(StepCapture):
    """The position-coded self check: writes each token's position in place of its expert ids, so that a sequence's
    gathered rows must read 0, 1, 2, ... in every layer and k."""

    def __init__(self, capture: RouteCapture, slots: Ints, generations: Ints, version: str, positions: Ints) -> None:
        super().__init__(capture, slots, generations, version)
        self._positions = positions

    def __call__(self, layer: int, ids: Tensor) -> None:
        coded = np.broadcast_to(self._positions[:, None], tuple(ids.shape))
        super().__call__(layer, load_paddle().to_tensor(np.ascontiguousarray(coded)))
