"""A whole attempt of the stream, put together: its own chunks after the rows of its base."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from moebus.consumers.reader.assembly import Open
from moebus.consumers.reader.rollout import Rollout
from moebus.schemas.attempt import attempt_text
from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.record import Base, Chunk, End, Header, assemble, merge_versions
from moebus.schemas.route_errors import RouteCorrupt, RouteDeleted, RouteNeverComing, RouteNotYet
from moebus.schemas.route_ref import RouteRef

CardCheck = Callable[[Rollout], Rollout]
"""The rollout itself, or RouteCorrupt where it does not fit the trainer's model card."""


class BaseSource(Protocol):
    """Where the rows of a base come from: a store."""

    def __call__(self, ref: RouteRef, wait: float) -> Rollout:
        """The rollout that `ref` names. Raises the errors of `moebus.schemas.route_errors`."""
        ...


def make_rollout(attempt: Open, again: Mapping[int, Chunk], bases: BaseSource, base_wait: float) -> Rollout:
    """The rollout of a whole attempt. `again`: evicted chunks by offset. `base_wait`: seconds that the store gets to
    take in what was just read.

    Raises:
        RouteCorrupt: the records do not fit one another or the base.  And what `bases` raises.
    """
    end = attempt.end
    if end is None:
        raise RouteCorrupt(f"{attempt.header.key}: no END")
    held = [attempt.chunks[index] for index in sorted(attempt.chunks)]
    chunks = [one.chunk or again[one.offset] for one in held]
    try:
        own = assemble(end, chunks, [one.checksum for one in held])
    except (InvalidInput, BadRecord) as exc:
        raise RouteCorrupt(f"{end.header.key}: {exc}") from exc
    versions = merge_versions([chunk.versions for chunk in chunks])
    layers, top_k, experts = _shape(chunks)
    base = end.header.base
    if base is not None:
        try:
            before = bases(base_ref(end.header, base), 0.0)
        except (RouteNotYet, RouteDeleted, RouteNeverComing):
            return _as_stored(end, bases, base_wait)
        layers, top_k, experts = _shape(chunks) if chunks else (before.layers, before.top_k, before.num_experts)
        if (before.layers, before.top_k, before.num_experts) != (layers, top_k, experts):
            raise RouteCorrupt(f"{end.header.key}: its base {before.ref.key} has other layers or experts")
        own = np.concatenate([before.routes[: base.rows], own.reshape(-1, len(layers), top_k)])
        cut = tuple(entry for entry in before.versions or () if entry[0] < base.rows)
        versions = merge_versions([cut, versions])
    if len(own) != end.rows:
        raise RouteCorrupt(f"{end.header.key}: {len(own)} rows where the END says {end.rows}")
    return Rollout(
        ref=end_ref(end), routes=own, layers=layers, top_k=top_k, num_experts=experts, status=end.status,
        finish_reason=end.finish_reason, epoch=end.header.epoch, versions=versions, card_digest=end.card_digest,
    )  # fmt: skip


def _as_stored(end: End, bases: BaseSource, wait: float) -> Rollout:
    """The attempt itself from the store, where its base cannot be had: the store knows whether the base was whole when
    the attempt began, and keeps those rows when the base goes. So nobody waits for a base that will never be there."""
    found = bases(end_ref(end), wait)
    if len(found.routes) != end.rows:
        raise RouteCorrupt(f"{end.header.key}: the store has {len(found.routes)} rows where the END says {end.rows}")
    return found


def end_ref(end: End) -> RouteRef:
    """The RouteRef of the attempt that `end` commits."""
    h = end.header
    return RouteRef(
        h.run, h.rollout_id, h.choice, h.attempt_text, end.rows, h.group,
        end.token_hash, end.prompt_rows, end.prompt_hash,
    )  # fmt: skip


def base_ref(header: Header, base: Base) -> RouteRef:
    """Names the base; `rows` are those that are used of it."""
    return RouteRef(header.run, base.rollout_id, base.choice, attempt_text(base.attempt), base.rows, header.group)


def _shape(chunks: list[Chunk]) -> tuple[tuple[int, ...], int, int]:
    return (chunks[0].layers, chunks[0].top_k, chunks[0].num_experts) if chunks else ((), 0, 1)
