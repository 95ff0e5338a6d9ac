"""Parcels and fences as entries of the journal, and back."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from moebus.producers.routing.parcel import Parcel
from moebus.schemas.attempt import attempt_text, parse_attempt
from moebus.schemas.errors import BadRecord
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Base, Clear, Delete, Header, Outcome, decode, encode

_encoder = json.JSONEncoder(separators=(",", ":"))  # made once: this runs on the thread of the generation step


@lru_cache(maxsize=16)
def _card_meta(card: ModelCard) -> bytes:
    return b"\n" + card.to_json().encode()


def parcel_meta(parcel: Parcel) -> bytes:
    """Everything but the rows: a line of JSON, and one for the card."""
    header, base, outcome = parcel.header, parcel.header.base, parcel.outcome
    fields = {
        "name": parcel.name,
        "shape": parcel.rows.shape,
        "header": [
            header.run, header.group, header.rollout_id, header.choice, attempt_text(header.attempt), header.epoch,
        ],
        "base": base and [attempt_text(base.attempt), base.rows, base.rollout_id, base.choice, base.token_hash],
        "outcome": [
            outcome.status, outcome.finish_reason, outcome.token_hash, outcome.prompt_rows, outcome.prompt_hash,
        ],
        "versions": parcel.versions,
        "trace": parcel.traceparent,
        "codec": parcel.codec,
        "target": parcel.target,
    }  # fmt: skip
    return _encoder.encode(fields).encode() + _card_meta(parcel.card)


def read_parcel(meta: bytes, data: npt.NDArray[np.uint8], created_ms: int) -> Parcel:
    """The inverse; the rows stay where `data` is."""
    line, _, card_line = meta.partition(b"\n")
    fields: dict[str, Any] = json.loads(line)
    card = ModelCard.from_json(card_line)
    run, group, rollout_id, choice, attempt, epoch = fields["header"]
    base = None
    if fields["base"] is not None:
        base_attempt, rows, base_id, base_choice, token_hash = fields["base"]
        base = Base(parse_attempt(base_attempt), rows, base_id, base_choice, token_hash)
    return Parcel(
        name=fields["name"],
        rows=data.view(card.dtype).reshape(fields["shape"]),
        header=Header(run, group, rollout_id, choice, parse_attempt(attempt), epoch, base),
        outcome=Outcome(*fields["outcome"]),
        versions=tuple((row, version) for row, version in fields["versions"]),
        card=card,
        created_ms=created_ms,
        traceparent=fields["trace"],
        codec=fields["codec"],
        target=fields["target"],
    )


def fence_meta(fence: Delete | Clear, name: str) -> bytes:
    return json.dumps({"name": name, "record": encode(fence).hex()}).encode()


def read_fence(meta: bytes) -> tuple[Delete | Clear, str]:
    fields = json.loads(meta)
    fence = decode(bytes.fromhex(fields["record"]))
    if not isinstance(fence, (Delete, Clear)):
        raise BadRecord("kind", "a journal entry of a fence that holds another record")
    return fence, fields["name"]


def name_of(meta: bytes) -> str:
    """What people call the entry; also of one that is damaged."""
    try:
        return str(json.loads(meta.partition(b"\n")[0])["name"])
    except (ValueError, KeyError, TypeError):
        return "a damaged entry"
