"""Whatever happens to the bytes, the outcome is BadRecord or the true record; never a crash, never a wrong array."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebus.schemas.errors import BadRecord
from moebus.schemas.record import REASONS, Chunk, Record, decode, record_checksum, unpack
from moebus.schemas.record.layout import CHECKSUM_AT, FIXED
from tests.golden.make_record_v1 import cases

GOOD = sorted(cases().values())


def read(data: bytes) -> Record | None:
    """The record with its rows unpacked, or None for a BadRecord with a known reason."""
    try:
        record = decode(data)
        if isinstance(record, Chunk):
            assert unpack(record).shape == (record.rows, len(record.layers), record.top_k)
    except BadRecord as error:
        return None if error.reason in REASONS else pytest.fail(f"unknown reason {error.reason}")
    return record


def sealed(data: bytes | bytearray) -> bytes:
    """The bytes with length and checksum made right again, so that the inner checks are reached."""
    data = bytearray(data)
    data[8:12] = len(data).to_bytes(4, "little")
    data[CHECKSUM_AT : CHECKSUM_AT + 8] = record_checksum(data).to_bytes(8, "little")
    return bytes(data)


@pytest.mark.parametrize("index", range(len(GOOD)))
def test_every_truncation_is_refused(index: int) -> None:
    for size in range(len(GOOD[index])):
        assert read(GOOD[index][:size]) is None


@pytest.mark.parametrize("index", range(len(GOOD)))
def test_every_flipped_bit_is_refused(index: int) -> None:
    data = GOOD[index]
    for bit in range(min(len(data), 300) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert read(bytes(flipped)) is None


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    assert read(data) is None
    assert read(b"MOER\x01" + data) is None


@settings(max_examples=400)
@given(st.sampled_from(GOOD), st.data())
def test_damage_behind_a_right_checksum(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = draw.draw(st.integers(0, 255))
    cut = draw.draw(st.integers(FIXED.size, len(damaged)))
    assert isinstance(read(sealed(damaged)), (*get_args(Record), type(None)))
    read(sealed(damaged[:cut]))
    read(sealed(damaged + draw.draw(st.binary(max_size=8))))


def test_reasons_are_stable() -> None:
    good = cases()["uint8_raw_chunk"]
    wrong = {
        "empty": b"",
        "magic": b"XXXX" + good[4:],
        "truncated": good[:-1],
        "version": good[:4] + b"\x02" + good[5:],
        "checksum": good[:-1] + bytes((good[-1] ^ 1,)),
        "kind": sealed(good[:5] + b"\x09" + good[6:]),
        "bounds": good + b"x",
    }
    for reason, data in wrong.items():
        with pytest.raises(BadRecord) as caught:
            decode(data)
        assert caught.value.reason == reason
    with pytest.raises(BadRecord, match="empty"):
        decode(None)


def test_payload_damage_never_gives_another_array() -> None:
    data = cases()["uint16_zstd_base_chunk"]
    true = decode(data)
    assert isinstance(true, Chunk)
    refused = 0
    for at in range(len(data) - len(true.payload), len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x55
        try:
            record = decode(bytes(damaged))
        except BadRecord:
            refused += 1
        else:
            assert isinstance(record, Chunk)
            np.testing.assert_array_equal(unpack(record), unpack(true))
    assert refused == len(true.payload)
