"""A record in words, for people and for JSON lines."""

from __future__ import annotations

from moebus.schemas.attempt import attempt_text
from moebus.schemas.errors import BadRecord
from moebus.schemas.record.decode import decode
from moebus.schemas.record.types import Chunk, Clear, Delete, End, Header


def describe(data: bytes | None) -> dict[str, object]:
    """What a record of the routes topic says, without its rows; never raises.

    `kind`: chunk, end, delete, clear, or unreadable (with `reason` and `detail`). `bytes`: size of the value.
    """
    size = len(data or b"")
    try:
        record = decode(data)
    except BadRecord as error:
        return {"kind": "unreadable", "bytes": size, "reason": error.reason, "detail": error.detail}
    fields: dict[str, object] = {"kind": record.kind.name.lower(), "bytes": size}
    if isinstance(record, Delete):
        return {**fields, "run": record.run, "prefix": record.prefix, "epoch": record.epoch,
                "id": attempt_text(record.id)}  # fmt: skip
    if isinstance(record, Clear):
        return {**fields, "run": record.run, "through_epoch": record.through_epoch, "id": attempt_text(record.id)}
    return fields | _header(record.header) | (_chunk(record) if isinstance(record, Chunk) else _end(record))


def _header(header: Header) -> dict[str, object]:
    base = header.base
    fields: dict[str, object] = {
        "run": header.run, "rollout_id": header.rollout_id, "choice": header.choice, "group": header.group,
        "attempt": header.attempt_text, "epoch": header.epoch,
    }  # fmt: skip
    if base is not None:
        fields["base"] = {"rollout_id": base.rollout_id, "choice": base.choice, "rows": base.rows,
                          "attempt": attempt_text(base.attempt)}  # fmt: skip
    return fields


def _chunk(chunk: Chunk) -> dict[str, object]:
    return {
        "index": chunk.index, "start": chunk.start, "rows": chunk.rows, "layers": list(chunk.layers),
        "top_k": chunk.top_k, "num_experts": chunk.num_experts, "codec": chunk.codec,
        "versions": [list(entry) for entry in chunk.versions],
    }  # fmt: skip


def _end(end: End) -> dict[str, object]:
    return {
        "rows": end.rows, "chunks": end.chunks, "status": end.status, "finish_reason": end.finish_reason,
        "prompt_rows": end.prompt_rows, "token_hash": end.token_hash, "card_digest": end.card_digest,
    }  # fmt: skip
