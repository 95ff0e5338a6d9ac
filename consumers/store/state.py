"""What a partition of the store knows of attempts, as values, and their compact JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Base, End, Header, Status, Versions
from moebus.schemas.rollout import RolloutKey

State = Literal["open", "whole", "spoilt", "lost", "gone"]
"""open: records are missing. whole: readable. spoilt: its records contradict each other. lost: not completed in
time, or its base is not held. gone: removed; what is left is a mark, so that a reader hears `RouteDeleted`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What all rows of a rollout have in common."""

    layers: tuple[int, ...]
    top_k: int
    num_experts: int

    @property
    def card(self) -> ModelCard:
        return ModelCard(self.num_experts, self.top_k, self.layers)


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """A chunk that is held: rows [start, start + rows) of its attempt, the checksum of its record."""

    index: int
    start: int
    rows: int
    checksum: int
    versions: Versions = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, stop) of a rollout, held by `owner`."""

    owner: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Owner:
    """The blobs of one attempt of `run`, `size` bytes in all. `refs`: how many attempts use them, its own included; at
    0 they are freed. `whole`: its own attempt was whole once."""

    number: int
    refs: int
    attempt: bytes
    shape: Shape | None = None
    chunks: tuple[ChunkInfo, ...] = ()
    run: str = ""
    size: int = 0
    whole: bool = False


@dataclass(frozen=True, slots=True)
class AttemptState:
    """One attempt. `parts`: its manifest, rows ascending without gaps (while open: those of its base).

    `owner`: number of its own blobs, 0 where it has none any more. `at_ms`: append time of its last record, its END
    or its removal. `reason`: why it is spoilt, lost or gone.
    """

    header: Header
    state: State
    owner: int
    at_ms: int
    parts: tuple[Part, ...] = ()
    shape: Shape | None = None
    end: End | None = None
    reason: str = ""

    @property
    def key(self) -> RolloutKey:
        return self.header.key

    def ended(self, state: Literal["spoilt", "lost", "gone"], reason: str, at_ms: int) -> AttemptState:
        """The mark that is left of it."""
        return replace(self, state=state, owner=0, parts=(), shape=None, end=None, reason=reason, at_ms=at_ms)


def cut(parts: tuple[Part, ...], rows: int) -> tuple[Part, ...]:
    """The manifest of the first `rows` rows."""
    return tuple(replace(part, stop=min(part.stop, rows)) for part in parts if part.start < rows)


WHOLE = b'{"s":"whole"'
"""What the bytes of a whole attempt start with."""


def dump_attempt(state: AttemptState) -> bytes:
    header, end = state.header, state.end
    base = header.base
    fields: dict[str, Any] = {
        "s": state.state, "o": state.owner, "t": state.at_ms, "g": header.group, "e": header.epoch,
        "b": base and [base.attempt.hex(), base.rows, base.rollout_id, base.choice, base.token_hash],
        "p": [[part.owner, part.start, part.stop] for part in state.parts], "h": _dump_shape(state.shape),
        "n": end and [
            end.rows, end.chunks, end.checksum, end.status, end.finish_reason, end.card_digest, end.token_hash,
            end.prompt_rows, end.prompt_hash,
        ],
        "r": state.reason,
    }  # fmt: skip
    return _json({name: value for name, value in fields.items() if value not in (None, "", [])})


def load_attempt(key: RolloutKey, attempt: bytes, data: bytes) -> AttemptState:
    fields: dict[str, Any] = json.loads(data)
    base = fields.get("b")
    found = Base(bytes.fromhex(base[0]), *base[1:]) if base else None
    header = Header(key.run, fields["g"], key.rollout_id, key.choice, attempt, fields["e"], found)
    end = End(header, *fields["n"]) if "n" in fields else None
    parts = tuple(Part(*part) for part in fields.get("p", ()))
    shape = _load_shape(fields.get("h"))
    return AttemptState(header, fields["s"], fields["o"], fields["t"], parts, shape, end, fields.get("r", ""))


def dump_owner(owner: Owner) -> bytes:
    chunks = [[c.index, c.start, c.rows, c.checksum, c.versions] for c in owner.chunks]
    return _json({
        "r": owner.refs, "a": owner.attempt.hex(), "h": _dump_shape(owner.shape), "c": chunks, "n": owner.run,
        "b": owner.size, "w": owner.whole,
    })  # fmt: skip


def load_owner(number: int, data: bytes) -> Owner:
    fields: dict[str, Any] = json.loads(data)
    chunks = tuple(
        ChunkInfo(index, start, rows, checksum, tuple((row, version) for row, version in versions))
        for index, start, rows, checksum, versions in fields["c"]
    )
    attempt, shape = bytes.fromhex(fields["a"]), _load_shape(fields["h"])
    return Owner(number, fields["r"], attempt, shape, chunks, fields["n"], fields["b"], fields["w"])


def _dump_shape(shape: Shape | None) -> list[object] | None:
    return [shape.layers, shape.top_k, shape.num_experts] if shape else None


def _load_shape(value: Any) -> Shape | None:
    return Shape(tuple(value[0]), value[1], value[2]) if value else None


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def status_of(state: AttemptState) -> Status | None:
    """The status of a whole attempt."""
    return state.end.status if state.end and state.state == "whole" else None
