"""The journal file: what was written is read, half an entry is none, damage is noticed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moebus.producers.routing.parcel import Parcel
from moebus.producers.routing.process import layout
from moebus.producers.routing.process.entries import fence_meta, parcel_meta, read_fence, read_parcel
from moebus.producers.routing.process.journal import Cursor, Journal, format_file
from moebus.schemas.errors import BadRecord, SettingsError
from moebus.schemas.record import Base, Delete, Header, Outcome
from tests.support.routes import CARD, attempt_id, make_routes

CAPACITY = 1 << 16


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    made = os.open(tmp_path / "journal", os.O_RDWR | os.O_CREAT)
    os.ftruncate(made, layout.HEAD_BYTES + CAPACITY)
    format_file(made, CAPACITY)
    yield made
    os.close(made)


@pytest.fixture
def journal(fd: int) -> Iterator[Journal]:
    made = Journal(fd)
    yield made
    made.close()


def test_an_entry_is_read_as_it_was_written(journal: Journal) -> None:
    rows = make_routes(50).astype("int64")
    size = layout.entry_size(layout.ROLLOUT, 5, rows.size)
    journal.write(1, 0, size, layout.ROLLOUT, 123, b"12345", rows, np.uint8)
    entry = journal.entry(0, 1)
    assert entry is not None
    assert (entry.kind, entry.created_ms, journal.meta(entry)) == (layout.ROLLOUT, 123, b"12345")
    assert np.array_equal(journal.data(entry).reshape(rows.shape), rows)
    assert journal.whole(entry)
    assert not journal.settled(0)
    journal.mark(0)
    assert journal.settled(0)
    assert journal.entry(0, 1) == entry, "the mark is not under the checksum"
    assert journal.entry(0, 2) is None, "another number: not written yet"


@pytest.mark.parametrize("at", [0, 4, 9, 17, 40, 53])
def test_half_a_header_is_no_entry(fd: int, journal: Journal, at: int) -> None:
    journal.write(1, 0, 1024, layout.ROLLOUT, 5, b"meta")
    raw = os.pread(fd, 1, layout.HEAD_BYTES + at)
    os.pwrite(fd, bytes([raw[0] ^ 0xFF]), layout.HEAD_BYTES + at)
    assert journal.entry(0, 1) is None


def test_damaged_rows_and_meta_are_noticed(fd: int, journal: Journal) -> None:
    for seq, offset in ((1, layout.ALIGN), (2, 2 * layout.ALIGN)):
        position = (seq - 1) * 1024
        entry = journal.write(seq, position, 1024, layout.ROLLOUT, 5, b"meta", make_routes(3))
        assert journal.whole(entry)
        os.pwrite(fd, b"\xff", layout.HEAD_BYTES + position + offset)
        assert not journal.whole(entry)


def test_the_cursor_goes_round(journal: Journal) -> None:
    journal.write(7, CAPACITY - 1024, 1024, layout.ROLLOUT, 0, b"last")
    journal.write_pad(8, 0, 64)
    journal.write(9, 64, 1024, layout.FENCE, 0, b"first")
    cursor = Cursor(journal, CAPACITY - 1024, 7)
    found = [cursor.next() for _ in range(4)]
    assert [entry and entry.kind for entry in found] == [layout.ROLLOUT, layout.PAD, layout.FENCE, None]
    assert journal.settled(0)


@pytest.mark.parametrize("damaged", layout.TAIL_AT)
def test_one_copy_of_the_tail_is_enough(fd: int, journal: Journal, damaged: int) -> None:
    journal.set_tail(64, 2)
    journal.set_tail(128, 3)
    assert Journal(fd).tail() == (128, 3)
    os.pwrite(fd, b"\xff", damaged + 3)
    assert Journal(fd).tail() in ((64, 2), (128, 3))
    for at in layout.TAIL_AT:
        os.pwrite(fd, bytes(layout.TAIL.size), at)
        os.pwrite(fd, b"\xff", at)
    with pytest.raises(SettingsError, match="damaged"):
        journal.tail()


def test_another_file_is_refused(tmp_path: Path) -> None:
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    os.pwrite(other, b"not a journal" * 1000, 0)
    with pytest.raises(SettingsError, match=r"publisher\.journal"):
        Journal(other)
    os.close(other)


def test_a_parcel_comes_back_with_all_that_its_bytes_follow_from() -> None:
    base = Base(attempt_id(3), 4, 'ä "quoted"', 2, "0" * 32)
    header = Header("run", "gröup", "a:0:1:0", 5, attempt_id(9), 7, base)
    outcome = Outcome("partial", "length", "1" * 32, 2, "2" * 32)
    rows = make_routes(6)
    parcel = Parcel("name", rows, header, outcome, ((4, "v1"), (6, "v2")), CARD, 99, "00-trace", "raw", 12_345)
    again = read_parcel(parcel_meta(parcel), rows.reshape(-1), 99)
    assert np.array_equal(again.rows, rows)
    for field in ("name", "header", "outcome", "versions", "card", "created_ms", "traceparent", "codec", "target"):
        assert getattr(again, field) == getattr(parcel, field), field


def test_a_fence_comes_back() -> None:
    fence = Delete("run", "a:1", attempt_id(4), 3)
    assert read_fence(fence_meta(fence, "delete it")) == (fence, "delete it")
    with pytest.raises(BadRecord):
        read_fence(b'{"name": "x", "record": "00"}')
