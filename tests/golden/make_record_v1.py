"""Writes `record_v1/`: one file per case and `expected.json` with the values in it.

The files are frozen: records of version 1 must stay readable for ever. Run this only to add a case, and only ever
add (`python -m tests.golden.make_record_v1` leaves the files that exist alone).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import (
    Base,
    Chunk,
    Clear,
    CodecName,
    Delete,
    Header,
    Outcome,
    Record,
    decode,
    encode,
    encode_attempt,
    unpack,
)
from tests.support.routes import attempt_id, make_routes

FOLDER = Path(__file__).parent / "record_v1"


def describe(record: Record) -> dict[str, Any]:
    """The values of a record as JSON; the payload of a chunk as its ids."""
    values = asdict(record)
    if isinstance(record, Chunk):
        del values["payload"]
        values["routes"] = unpack(record).tolist()
    shown: dict[str, Any] = json.loads(json.dumps(values, default=lambda value: value.hex()))
    return {"kind": record.kind.name, **shown}


def cases() -> dict[str, bytes]:
    """Name -> bytes."""
    card8, card16, card32 = ModelCard(16, 2, (1, 5)), ModelCard(300, 4, (0, 1, 2)), ModelCard(70_000, 2, (3,))
    plain = Header("run-1", "a", "a:0:0:0", 0, attempt_id(1))
    base = Base(attempt_id(1), 3, "a:0:0:0", 0, "0f" * 16)
    turn = Header("run-1", "a", "a:0:1:0", 65_535, attempt_id(2), 7, base)
    wide = Header("run-1", "groß", "id é", 1, attempt_id(3), 2**63 - 1)
    outcome = Outcome("partial", "length", "1a" * 16, 2, "2b" * 16)
    return {
        **_attempt("uint8_raw", 3, plain, card8, Outcome(), "raw", ((0, "step-1"),)),
        **_attempt("uint16_zstd_base", 40, turn, card16, outcome, "zstd", ((0, "step-1"), (10, "step-2"))),
        **_attempt("uint32_zstd", 40, wide, card32, Outcome("aborted", "abort"), "zstd", ()),
        **_attempt("missing", 0, plain, card8, Outcome("missing"), "zstd", ()),
        "delete": encode(Delete("run-1", "a:1", attempt_id(4), 3)),
        "clear": encode(Clear("run-1", 4, attempt_id(5))),
    }


def _attempt(
    name: str, rows: int, header: Header, card: ModelCard, outcome: Outcome, codec: CodecName,
    versions: tuple[tuple[int, str], ...],
) -> dict[str, bytes]:  # fmt: skip
    routes = make_routes(rows, card, seed=3)
    records = list(encode_attempt(routes, header, card, outcome, versions=versions, codec=codec))
    return {f"{name}_{'end' if record is records[-1] else 'chunk'}": record for record in records}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    index = FOLDER / "expected.json"
    expected = json.loads(index.read_text()) if index.exists() else {}
    for name, data in cases().items():
        path = FOLDER / f"{name}.bin"
        if not path.exists():
            path.write_bytes(data)
            expected[name] = describe(decode(data))
    index.write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
