"""A file with room in it, but not in one piece: LMDB wants the pages of a value to lie together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moebus.consumers.store.decide import Rules
from moebus.consumers.store.partition import Guard, Partition, StoreFull
from moebus.consumers.store.view import View, rows_of
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Delete, encode
from tests.support.routes import Attempt, attempt_id, make_attempt

CARD = ModelCard(256, 8, tuple(range(10)))  # 80 bytes a row
HOLE, LARGE = 800, 1600  # rows: 64 KB and twice that


def attempt(name: str, number: int, rows: int) -> Attempt:
    return make_attempt(name, number=number, rows=rows, card=CARD, codec="raw")


def open_at(path: Path) -> Partition:
    return Partition(0, path, Guard("cluster", "topic"), Rules(), 2 << 20, sync=False)


def feed(partition: Partition, *records: bytes) -> None:
    """One commit a record: a batch keeps apart what it takes."""
    for record in records:
        partition.apply(partition.next_offset or 0, record, 0)
        partition.commit()
    while partition.tidy(0):
        partition.commit()
    partition.commit()


def fits(partition: Partition, one: Attempt) -> bool:
    try:
        feed(partition, *one.records)
    except StoreFull:
        partition.rollback()
        return False
    return True


def rows(partition: Partition, one: Attempt) -> np.ndarray:
    view = View(partition)
    (state,) = view.find(one.header.key).attempts
    return np.concatenate(list(rows_of(view, view.plan(state, 0, one.routes.shape[0]))))


def full_of_holes(partition: Partition) -> list[Attempt]:
    """Filled to the brim, then every other rollout deleted; those that stay."""
    held = [one for one in (attempt(f"r{number}", number, HOLE) for number in range(1, 99)) if fits(partition, one)]
    assert 10 < len(held) < 98
    for one in held[::2]:
        feed(partition, encode(Delete("run", one.header.rollout_id, attempt_id(500 + held.index(one)))))
    return held[1::2]


def test_what_fits_in_no_hole_is_written_in_pieces(tmp_path: Path) -> None:
    partition = open_at(tmp_path)
    held = full_of_holes(partition)
    large = attempt("large", 100, LARGE)
    offset = partition.next_offset
    with pytest.raises(StoreFull) as caught:
        feed(partition, *large.records)
    assert caught.value.lost
    assert partition.next_offset == offset
    feed(partition, *large.records)
    for one in (large, *held):
        np.testing.assert_array_equal(rows(partition, one), one.routes)
    partition.close()
    again = open_at(tmp_path)
    np.testing.assert_array_equal(rows(again, large), large.routes)
    again.close()


def test_pieces_go_with_their_blob(tmp_path: Path) -> None:
    partition = open_at(tmp_path)
    held = full_of_holes(partition)
    large = attempt("large", 100, LARGE)
    with pytest.raises(StoreFull):
        feed(partition, *large.records)
    feed(partition, *large.records)
    for number, one in enumerate((large, *held)):
        feed(partition, encode(Delete("run", one.header.rollout_id, attempt_id(900 + number))))
    with partition.reading() as (tables, _):
        assert list(tables._keys("blobs")) == []
    feed(partition, *attempt("next", 101, LARGE).records)
    with partition.reading() as (tables, _):
        assert len(list(tables._keys("blobs"))) == 1  # in one piece again
    partition.close()
