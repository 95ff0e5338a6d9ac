"""Made-up routes and the records that carry them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moebus.schemas.dtypes import RouteArray
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Base, CodecName, Header, Outcome, Versions, encode_attempt
from moebus.schemas.rollout import rollout_key
from moebus.schemas.route_ref import token_hash

CARD = ModelCard(num_experts=16, top_k=2, moe_layers=(1, 2, 5))


def make_routes(rows: int, card: ModelCard = CARD, seed: int = 0) -> RouteArray:
    """Random routes [rows, layers, top_k] of the card: ids in range, no id twice in a top-k."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, card.num_experts, (rows, len(card.moe_layers), 1))
    ids = (first + np.arange(card.top_k)) % card.num_experts
    return ids.astype(card.dtype)


def make_tokens(rows: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Random token ids [rows]."""
    return np.random.default_rng(seed + 1).integers(0, 1000, rows, dtype=np.int64)


def attempt_id(number: int) -> bytes:
    """A 16-byte attempt id that is easy to read."""
    return number.to_bytes(16, "big")


@dataclass(frozen=True)
class Attempt:
    """One attempt: what was recorded, and its encoded records (chunks, then END)."""

    header: Header
    routes: RouteArray
    records: list[bytes] = field(repr=False)

    @property
    def chunks(self) -> list[bytes]:
        return self.records[:-1]

    @property
    def end(self) -> bytes:
        return self.records[-1]


def make_attempt(
    rollout_id: str = "a:0:0:0",
    *,
    run: str = "run",
    choice: int = 0,
    number: int = 1,
    rows: int = 10,
    chunks: int = 1,
    epoch: int = 0,
    group: str | None = None,
    base: Base | None = None,
    card: ModelCard = CARD,
    outcome: Outcome | None = None,
    versions: Versions = (),
    seed: int | None = None,
    codec: CodecName = "zstd",
) -> Attempt:
    """An attempt of `rows` own rows cut into `chunks` chunks; its content follows from `seed` (default `number`)."""
    seed = number if seed is None else seed
    header = Header.of(rollout_key(run, rollout_id, choice), attempt_id(number), group=group, epoch=epoch, base=base)
    routes = make_routes(rows, card, seed)
    row_bytes = len(card.moe_layers) * card.top_k * card.dtype.itemsize
    target = row_bytes * -(-rows // chunks) if rows else row_bytes
    outcome = outcome or Outcome(token_hash=token_hash(make_tokens(rows, seed)) if base is None else None)
    records = list(encode_attempt(routes, header, card, outcome, versions=versions, codec=codec, target=target))
    assert len(records) == (chunks if rows else 0) + 1
    return Attempt(header, routes, records)
