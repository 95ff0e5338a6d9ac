"""A damaged file of LMDB: that partition is read again from the log, the others serve on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moebus.consumers.store import RouteStore
from tests.support.routes import Attempt, make_attempt
from tests.support.store import SMALL, Rig, error_of, held, read
from tests.support.wait import wait_until

PAGE = 4096


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "data")


def file_of(rig: Rig, number: int) -> Path:
    return rig.folder / rig.topics.routes / f"{number:05d}" / "data.mdb"


def blank(file: Path, first: int, last: int | None = None) -> None:
    """Zeros where pages from `first` up to `last` were, as a lost block of a disk reads."""
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.seek(first * PAGE)
        handle.write(bytes((size if last is None else last * PAGE) - first * PAGE))


def attempts_of(rig: Rig, number: int, count: int) -> list[Attempt]:
    """In one partition."""
    groups = [f"g{n}" for n in range(60) if rig.partition(f"g{n}") == number]
    return [make_attempt(f"r{number}-{n}", number=100 * number + n + 1, group=groups[0]) for n in range(count)]


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no header": lambda file: blank(file, 0, 2),
    "no tables": lambda file: blank(file, 2),
    "cut": lambda file: os.truncate(file, 3 * PAGE),
    "something else": lambda file: (None, file.write_bytes(b"#!/bin/sh\n" * 2000))[0],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_one_that_is_found_at_the_start_is_read_again(
    rig: Rig, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = attempts_of(rig, 0, 20), attempts_of(rig, 1, 3)
    rig.put(*one, *other)
    with rig.running() as store:
        assert len(held(store)) == 23
    damage(file_of(rig, 0))
    before = file_of(rig, 1).stat().st_ino
    with rig.running() as store:
        for attempt in (*one, *other):
            np.testing.assert_array_equal(read(store, attempt.header.rollout_id), attempt.routes)
        assert store.failure() is None
        assert rig.metrics.value("moebus_store_records_total", kind="end", outcome="completed") == 20
    assert file_of(rig, 1).stat().st_ino == before, "the other one was not touched"
    (told,) = [one.getMessage() for one in caplog.records if "read again from the log" in one.getMessage()]
    assert "partition 0 " in told


def test_one_that_a_reader_finds_is_read_again_and_the_others_answer(rig: Rig) -> None:
    one, other = attempts_of(rig, 0, 20), attempts_of(rig, 1, 3)
    rig.put(*one, *other)
    with rig.running() as store:
        blank(file_of(rig, 0), 2)
        assert error_of(store, one[0].header.rollout_id, group=one[0].header.group) in ("StoreCatchingUp", "none")
        np.testing.assert_array_equal(read(store, "r1-0", group=other[0].header.group), other[0].routes)
        wait_until(lambda: error_of(store, "r0-19", group=one[0].header.group) == "none", 30, "the rollouts again")
        for attempt in one:
            np.testing.assert_array_equal(read(store, attempt.header.rollout_id), attempt.routes)
        assert store.failure() is None


def test_one_that_is_found_while_writing_is_read_again_and_loses_nothing(rig: Rig) -> None:
    one, other = attempts_of(rig, 0, 30), attempts_of(rig, 1, 3)
    rig.put(*one[:20])
    with rig.running() as store:
        blank(file_of(rig, 0), 2)
        rig.put(*one[20:], *other)
        wait_until(lambda: all_there(store, [*one, *other]), 30, "all of them")
        assert store.failure() is None


def all_there(store: RouteStore, attempts: list[Attempt]) -> bool:
    return all(error_of(store, one.header.rollout_id, group=one.header.group) == "none" for one in attempts)


def test_a_disk_that_damages_it_again_at_once_ends_the_store(rig: Rig) -> None:
    one = attempts_of(rig, 0, 20)
    rig.put(*one[:10])
    with rig.running(options=replace(SMALL, commit_interval=0.001)) as store:
        for number in (10, 11):
            blank(file_of(rig, 0), 2)
            rig.put(one[number])
            wait_until(lambda: store.failure() or all_there(store, one[: number + 1]), 30, "an answer")  # noqa: B023
        found = store.failure()
        assert found is not None
        assert "damaged twice within a minute" in found[1]
