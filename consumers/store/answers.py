"""Questions to the partitions of a store, answered from what is committed and what the open batch has made whole."""

from __future__ import annotations

import heapq
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moebus.broker.partitioner import partition_for
from moebus.consumers.store import keys
from moebus.consumers.store.env import EnvClosed
from moebus.consumers.store.partition import Partition
from moebus.consumers.store.progress import Progress
from moebus.consumers.store.select import select
from moebus.consumers.store.state import AttemptState
from moebus.consumers.store.view import Finding, Plan, View, rows_of
from moebus.schemas.errors import InvalidInput
from moebus.schemas.record import rows_checksum
from moebus.schemas.rollout import RolloutKey, partition_key
from moebus.schemas.route_answer import RouteAnswer
from moebus.schemas.route_errors import RouteNotYet, StoreCatchingUp
from moebus.schemas.route_ref import RouteRef

_LOOKS = 5
"""A stream of deletes may be faster than one can look."""
BodyFormat = Literal["npy", "raw"]


@dataclass(frozen=True, slots=True)
class Question:
    """Which rollout, and which part of it. `attempt`: 16 bytes. `layers`: global numbers, None for all. `stop`: None
    for the last row. `min_offset`: the partition must have been read that far."""

    key: RolloutKey
    attempt: bytes | None = None
    group: str | None = None
    partition: int | None = None
    layers: tuple[int, ...] | None = None
    start: int = 0
    stop: int | None = None
    min_offset: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What was found; `body` reads the rows."""

    meta: RouteAnswer
    view: View
    plan: Plan
    columns: tuple[int, ...] | None

    def header(self, form: BodyFormat) -> bytes:
        """What stands before the rows."""
        if form == "raw":
            return b""
        head = io.BytesIO()
        shape = {"descr": self.meta.dtype.str, "fortran_order": False, "shape": self.meta.shape}
        np.lib.format.write_array_header_1_0(head, shape)
        return head.getvalue()

    def rows(self) -> Iterator[memoryview]:
        """The bytes of the rows, one piece a stored chunk. Raises RouteDeleted or RouteCorrupt, also in the middle."""
        for rows in rows_of(self.view, self.plan, self.columns):
            yield rows.reshape(-1).view(np.uint8).data

    def read(self) -> tuple[Answer, list[memoryview]]:
        """All rows at once, and the answer with their checksum. Raises as `rows`."""
        pieces = list(self.rows())
        return replace(self, meta=replace(self.meta, checksum=rows_checksum(pieces))), pieces


class Answers:
    """Any thread may ask."""

    def __init__(self, partitions: Mapping[int, Partition], progress: Progress) -> None:
        self._partitions = partitions
        self._progress = progress

    def find(self, question: Question, total: int) -> Answer:
        """`total`: partitions of the topic.

        Raises:
            RouteError: one of its subclasses.  InvalidInput: field `layers`, `start`, `stop`, `partition` or
                `min_offset` (of which partition?).
        """
        number = self._number(question, total)
        if question.min_offset is not None and number is None and total != 1:
            raise InvalidInput(
                "min_offset", "says nothing without the partition that it is of: name partition or group"
            )
        self._check_ready(number)
        if number is not None and number not in self._partitions:
            raise RouteNotYet(f"{question.key} belongs to partition {number}, which this store does not follow")
        chosen = dict(self._partitions) if number is None else {number: self._partitions[number]}
        try:
            return self._find(question, chosen)
        except EnvClosed:
            raise StoreCatchingUp("the store is being rebuilt or stopped") from None

    def committed(self) -> Callable[[], bool]:
        """A function that says whether all that can be found at this moment has come to its commit, as `page` needs."""
        batches = [(one, one.fresh) for one in list(self._partitions.values())]
        ahead = [(one, fresh) for one, fresh in batches if fresh.readable]
        return lambda: all(one.fresh is not fresh for one, fresh in ahead)

    def page(self, run: str, prefix: str | None, after: bytes, limit: int) -> list[tuple[int, AttemptState]]:
        """(partition, whole attempt) of what is committed, in order of `position`, behind `after`."""
        self._check_ready(None)
        try:
            pages = [[(n, s) for s in View(p).page(run, prefix, after, limit)] for n, p in self._partitions.items()]
        except EnvClosed:
            raise StoreCatchingUp("the store is being rebuilt or stopped") from None
        return list(heapq.merge(*pages, key=lambda entry: position(entry[1])))[:limit]

    def _check_ready(self, number: int | None) -> None:
        reason = self._progress.unready(number if number in self._partitions else None)
        if reason is not None:
            raise StoreCatchingUp(reason)

    def _number(self, question: Question, total: int) -> int | None:
        if question.partition is not None:
            if total and question.partition >= total:
                raise InvalidInput("partition", f"{question.partition}; the topic has {total}")
            return question.partition
        if question.group is None or not total:
            return None
        return partition_for(partition_key(question.key.run, question.group), total)

    def _find(self, question: Question, partitions: dict[int, Partition]) -> Answer:
        held: list[AttemptState] = []
        place: dict[bytes, tuple[int, int, View]] = {}
        fence = None
        for number, partition in partitions.items():
            view, found = _look(partition, question.key)
            if question.min_offset is not None and found.applied < question.min_offset:
                raise RouteNotYet(f"{question.key}: partition {number} is read up to {found.applied}")
            attempts = [s for s in found.attempts if question.group in (None, s.header.group)]
            held += attempts
            place.update({state.header.attempt: (number, found.applied, view) for state in attempts})
            fence = fence or found.fence
        chosen = select(question.key, held, question.attempt, fence)
        return _answer(question, chosen, *place[chosen.header.attempt])


def _look(partition: Partition, key: RolloutKey) -> tuple[View, Finding]:
    """As of one moment: else what came behind a delete could be seen beside what it removes, or the other way round."""
    for _ in range(_LOOKS):
        turn = partition.turns
        view = View(partition, partition.fresh)  # before the tables are read: after a commit it is in them
        found = view.find(key)
        if partition.turns == turn:
            break
    return view, found


def position(state: AttemptState) -> bytes:
    """Where an attempt stands in a listing."""
    return keys.attempt_key(state.key, state.header.attempt)


def ref_of(state: AttemptState) -> RouteRef:
    """Of a whole attempt."""
    end, header = state.end, state.header
    assert end is not None
    return RouteRef(
        header.run, header.rollout_id, header.choice, header.attempt_text, end.rows, header.group,
        end.token_hash, end.prompt_rows, end.prompt_hash,
    )  # fmt: skip


def _answer(question: Question, state: AttemptState, number: int, applied: int, view: View) -> Answer:
    end, shape = state.end, state.shape
    assert end is not None
    stop = end.rows if question.stop is None else question.stop
    if not question.start <= stop <= end.rows:
        raise InvalidInput("stop" if stop > end.rows else "start", f"rows {question.start} to {stop} of {end.rows}")
    layers = question.layers if question.layers is not None else shape.layers if shape else ()
    plan = view.plan(state, question.start, stop)
    meta = RouteAnswer(
        ref_of(state), question.start, stop - question.start, layers, shape.top_k if shape else 0,
        shape.num_experts if shape else 0, end.status, end.finish_reason, state.header.epoch, plan.versions,
        end.card_digest, number, applied, view.checked,
    )  # fmt: skip
    return Answer(meta, view.only(plan), plan, _columns(layers, shape.layers if shape else ()))


def _columns(layers: tuple[int, ...], held: tuple[int, ...]) -> tuple[int, ...] | None:
    if layers == held:
        return None
    missing = [layer for layer in layers if layer not in held]
    if missing:
        raise InvalidInput("layers", f"{missing[0]} is no MoE layer of this rollout; it has {list(held)}")
    return tuple(held.index(layer) for layer in layers)
