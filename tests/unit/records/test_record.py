from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import (
    Base,
    Chunk,
    Clear,
    Delete,
    End,
    Header,
    Outcome,
    Record,
    assemble,
    check_routes,
    chunk_rows,
    decode,
    encode,
    encode_attempt,
    merge_versions,
    record_key,
    stored_checksum,
    unpack,
)
from moebus.schemas.record.codec import check_ids, pack
from tests.support.routes import CARD, attempt_id, make_attempt, make_routes

HEADER = Header("run", "g", "a:0:1:0", 3, attempt_id(7), 2)
BASE = Base(attempt_id(1), 5, "a:0:0:0", 3, "ab" * 16)


def chunks_of(records: list[bytes]) -> list[Chunk]:
    decoded = [decode(record) for record in records]
    return [record for record in decoded if isinstance(record, Chunk)]


def end_of(records: list[bytes]) -> End:
    end = decode(records[-1])
    assert isinstance(end, End)
    return end


@pytest.mark.parametrize("experts", [4, 256, 257, 70_000])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_routes_survive(experts: int, codec: str) -> None:
    card = ModelCard(experts, 3, (0, 2))
    routes = make_routes(200, card)
    records = list(encode_attempt(routes, HEADER, card, Outcome(), codec=codec, target=1000))  # type: ignore[arg-type]
    chunks = chunks_of(records)
    assert len(chunks) > 1
    back = assemble(end_of(records), chunks, [stored_checksum(record) for record in records[:-1]])
    assert back.dtype == card.dtype
    np.testing.assert_array_equal(back, routes)
    assert [encode(decode(record)) for record in records] == records
    assert end_of(records).card_digest == card.digest


def test_chunks_are_even_and_records_stay_small() -> None:
    card = ModelCard(60_000, 8, tuple(range(60)))
    rng = np.random.default_rng(1)
    routes = rng.integers(0, 60_000, (2000, 60, 8), dtype=np.uint16)  # does not compress
    records = list(encode_attempt(routes, HEADER, card, Outcome()))
    assert [chunk.rows for chunk in chunks_of(records)] == [666, 667, 667]
    assert {chunk.codec for chunk in chunks_of(records)} == {"raw"}
    assert max(map(len, records)) < 900_000
    assert min(len(record) for record in records[:-1]) > 256_000


def test_base_moves_the_start() -> None:
    attempt = make_attempt(base=BASE, rows=4, chunks=2, choice=3, number=2)
    first, second = chunks_of(attempt.records)
    assert (first.start, second.start, end_of(attempt.records).rows) == (5, 7, 9)
    assert end_of(attempt.records).header.base == BASE


def test_versions_are_cut_to_the_chunks_and_merge_again() -> None:
    versions = ((0, "v1"), (3, "v2"), (8, "v3"))
    attempt = make_attempt(rows=10, chunks=2, versions=versions)
    parts = [chunk.versions for chunk in chunks_of(attempt.records)]
    assert parts == [((0, "v1"), (3, "v2")), ((5, "v2"), (8, "v3"))]
    assert merge_versions(parts) == versions


def test_no_rows() -> None:
    attempt = make_attempt(rows=0, chunks=0, outcome=Outcome("missing"))
    end = end_of(attempt.records)
    assert (end.rows, end.chunks, end.status) == (0, 0, "missing")
    assert assemble(end, [], []).shape == (0, 0, 0)


@pytest.mark.parametrize(
    "record",
    [
        Delete("run", "a:1", attempt_id(3), 5),
        Clear("run", 2**63 - 1, attempt_id(4)),
        End(HEADER, 0, 0, 0, "aborted", "", None, None, None, None),
        End(replace(HEADER, base=BASE), 9, 1, 2**64 - 1, "partial", "length", "0" * 32, "1" * 32, 4, "2" * 32),
        End(replace(HEADER, base=replace(BASE, token_hash=None)), 5, 0, 1, "complete", "stop", None, None, 0, None),
    ],
)
def test_other_records_survive(record: Record) -> None:
    assert decode(encode(record)) == record


def test_keys() -> None:
    assert record_key(End(HEADER, 0, 0, 0)) == b"run/g"
    assert record_key(Delete("run", "a", attempt_id(3))) == b"run/"


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        (np.zeros((2, 3), np.uint8), "shape"),
        (np.zeros((2, 3, 3), np.uint8), "shape"),
        (np.zeros((2, 3, 2), np.float32), "integers"),
        (np.full((1, 3, 2), [0, 16], np.int64), "expert id 16"),
        (np.full((1, 3, 2), [0, 256], np.int64), "expert id 256"),
        (np.full((1, 3, 2), [0, -1], np.int64), "expert id -1"),
        (np.full((1, 3, 2), [4, 4], np.uint8), "twice"),
    ],
)
def test_bad_routes_are_refused(routes: np.ndarray[tuple[int, ...], np.dtype[np.integer]], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        check_routes(routes, CARD)


def test_a_wide_top_k_is_checked_too() -> None:
    card = ModelCard(64, 20, (0,))
    routes = make_routes(5, card).astype(np.int64)
    assert check_routes(routes, card).dtype == "uint8"
    routes[3, 0, 19] = routes[3, 0, 2]
    with pytest.raises(InvalidInput, match="twice"):
        check_routes(routes, card)


def good_chunk() -> Chunk:
    return chunks_of(make_attempt(rows=4).records)[0]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rows": 0}, "rows"), ({"index": -1}, "index"), ({"top_k": 17}, "top_k"), ({"layers": (2, 1)}, "moe_layers"),
        ({"codec": "lz4"}, "codec"), ({"versions": ((1, "v"),)}, "versions"),
        ({"versions": ((0, "v" * 256),)}, "versions"),
        ({"versions": ((0, "v"), (0, "w"))}, "versions"), ({"versions": ((0, "v"), (4, "w"))}, "versions"),
        ({"rows": 1 << 20}, "decoded size"), ({"header": replace(HEADER, base=BASE)}, "start"),
        ({"header": replace(HEADER, run="")}, "run"), ({"header": replace(HEADER, attempt=b"")}, "attempt"),
        ({"header": replace(HEADER, base=replace(BASE, attempt=HEADER.attempt))}, "base.attempt"),
    ],
)  # fmt: skip
def test_chunks_that_may_not_be_written(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        encode(replace(good_chunk(), **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"chunks": 0}, "chunks"), ({"status": "done"}, "status"), ({"token_hash": "x"}, "token_hash"),
        ({"prompt_hash": "0" * 32}, "prompt_hash"), ({"finish_reason": "r" * 256}, "finish_reason"),
        ({"rows": -1}, "rows"), ({"chunks": 5}, "chunks"),
    ],
)  # fmt: skip
def test_ends_that_may_not_be_written(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidInput, match=field):
        encode(replace(End(HEADER, 4, 1, 0), **change))  # type: ignore[arg-type]


def test_a_row_that_fits_no_record() -> None:
    with pytest.raises(InvalidInput, match="one row"):
        list(chunk_rows(make_routes(1), HEADER, CARD, target=5))


def test_assemble_refuses_what_does_not_fit() -> None:
    attempt, other = make_attempt(rows=6, chunks=2), make_attempt(rows=6, chunks=2, seed=9)
    chunks, end = chunks_of(attempt.records), end_of(attempt.records)
    sums = [stored_checksum(record) for record in attempt.chunks]
    with pytest.raises(InvalidInput, match="chunks"):
        assemble(end, chunks[:1], sums[:1])
    with pytest.raises(InvalidInput, match="chunks"):
        assemble(end, chunks[::-1], sums[::-1])
    with pytest.raises(InvalidInput, match="checksum"):
        assemble(end, chunks_of(other.records), [stored_checksum(record) for record in other.chunks])
    with pytest.raises(InvalidInput, match="rows"):
        assemble(replace(end, rows=7), chunks, sums)
    with pytest.raises(InvalidInput, match="go on"):
        assemble(end, [chunks[0], replace(chunks[1], start=4)], sums)


def test_a_frame_that_claims_more_is_not_unpacked() -> None:
    card = ModelCard(16, 2, (0,))
    big = next(chunk_rows(make_routes(1000, card), HEADER, card))
    assert big.codec == "zstd"
    small = replace(big, rows=10)
    for lying in (small, replace(big, payload=big.payload[:-1]), replace(big, payload=big.payload + b"x")):
        with pytest.raises(BadRecord, match="payload"):
            unpack(lying)
    with pytest.raises(BadRecord, match="payload"):
        unpack(replace(big, codec="raw"))


def test_what_does_not_shrink_is_not_packed_and_what_does_is() -> None:
    rng = np.random.default_rng(1)
    even = rng.integers(0, 256, (2000, 40, 8), dtype=np.uint8)
    assert pack(even, "zstd") == ("raw", even.tobytes())
    few = rng.integers(0, 128, (2000, 40, 8), dtype=np.uint8)
    name, packed = pack(few, "zstd")
    assert name == "zstd"
    assert len(packed) < 0.9 * few.nbytes
    wide = rng.integers(0, 384, (2000, 40, 8)).astype(np.uint16)
    assert pack(wide, "zstd")[0] == "zstd"


@pytest.mark.parametrize("top_k", [1, 2, 3, 8, 16, 17])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_one_pair_anywhere_among_many_rows_is_found(top_k: int, dtype: type[np.unsignedinteger]) -> None:
    rng = np.random.default_rng(top_k)
    rows = 70_000 // top_k
    first = rng.integers(0, 200, (rows, 3, 1))
    good = ((first + np.arange(top_k) * 7) % 200).astype(dtype)
    check_ids(good, 200)
    for _ in range(5 if top_k > 1 else 0):
        bad = good.copy()
        row, layer = rng.integers(rows), rng.integers(3)
        a, b = rng.choice(top_k, 2, replace=False)
        bad[row, layer, a] = bad[row, layer, b]
        with pytest.raises(InvalidInput, match="twice"):
            check_ids(bad, 200)


def test_deletes_are_said_without_their_bytes() -> None:
    assert str(Delete("run", "a:1", attempt_id(1), 2)) == "delete run/a:1 (epoch <= 2)"
    assert str(Clear("run", 3, attempt_id(1))) == "clear run (epoch <= 3)"
