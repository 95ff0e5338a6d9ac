"""A map, or a disk, that is full: ingest stops and says so, deletes make room, ingest goes on, nothing is lost."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moebus.consumers.store import RouteStore
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import Base, Delete
from tests.support.routes import Attempt, attempt_id, make_attempt
from tests.support.store import PARTITIONS, SMALL, Rig, error_of, held, read
from tests.support.wait import wait_until

TIGHT = replace(SMALL, map_bytes=2 << 20, commit_interval=0.002)
CARD = ModelCard(256, 8, tuple(range(10)))  # 80 bytes a row


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "data")


def big(rollout_id: str, number: int, group: str = "g", base: Base | None = None) -> Attempt:
    """100 KB in one chunk; all in one group unless told otherwise."""
    return make_attempt(rollout_id, number=number, rows=1250, group=group, card=CARD, base=base, codec="raw")


@contextmanager
def filled(rig: Rig, count: int = 40) -> Iterator[tuple[RouteStore, list[Attempt]]]:
    """A store that was offered twice what it can hold."""
    attempts = [big(f"r{number}:0:0:0", number) for number in range(1, count + 1)]
    rig.put(*attempts)
    with rig.running(options=TIGHT, ready=False) as store:
        number = rig.partition("g")
        lags = store.progress.lags
        # that it is full is said before the batch that filled it is committed
        wait_until(lambda: number in lags() and lags()[number].full and lags()[number].applied, 30, what="a full map")
        yield store, attempts


def test_full_is_said_and_what_is_held_stays_readable(rig: Rig) -> None:
    with filled(rig) as (store, attempts):
        number = rig.partition("g")
        assert f"partition {number}" in (store.waiting() or "")
        assert rig.metrics.value("moebus_store_ingest_stopped", partition=str(number)) == 1
        lag = store.progress.lags()[number]
        assert 10 < lag.applied < lag.end
        store.progress.follow(number, 0, lag.applied)  # as if it had been caught up before
        np.testing.assert_array_equal(read(store, "r1:0:0:0"), attempts[0].routes)
        assert store.failure() is None


def test_deletes_behind_the_stop_make_room(rig: Rig) -> None:
    with filled(rig) as (store, attempts):
        half = len(attempts) // 2
        for attempt in attempts[: half + 5]:
            rig.fence(Delete("run", attempt.header.rollout_id, attempt_id(200)))
        rig.caught_up(store)
        assert store.waiting() is None
        assert rig.metrics.value("moebus_store_ingest_stopped", partition=str(rig.partition("g"))) == 0
        assert held(store) == sorted(attempt.header.rollout_id for attempt in attempts[half + 5 :])
        for attempt in attempts[half + 5 :]:
            np.testing.assert_array_equal(read(store, attempt.header.rollout_id), attempt.routes)
        assert error_of(store, "r1:0:0:0") == "RouteDeleted"


def test_what_a_record_before_the_delete_names_as_base_is_spared(rig: Rig) -> None:
    with filled(rig) as (store, attempts):
        first = attempts[0]
        turn = make_attempt(
            "t:0:1:0", number=90, rows=3, group="g", card=CARD, base=Base(attempt_id(1), 1250, "r1:0:0:0")
        )
        rig.put(turn)
        for attempt in attempts[:30]:
            rig.fence(Delete("run", attempt.header.rollout_id, attempt_id(200)))
        rig.caught_up(store)
        np.testing.assert_array_equal(read(store, "t:0:1:0"), np.concatenate([first.routes, turn.routes]))
        assert error_of(store, "r1:0:0:0") == "RouteDeleted"
        assert held(store, "t") == ["t:0:1:0"]


def test_a_restart_while_full(rig: Rig) -> None:
    with filled(rig):
        pass
    with rig.running(options=TIGHT, ready=False) as store:
        number = rig.partition("g")
        wait_until(lambda: number in store.progress.lags() and store.progress.lags()[number].full, what="a full map")
    wider = replace(TIGHT, map_bytes=16 << 20)
    with rig.running(options=wider) as store:
        assert len(held(store)) == 40


@contextmanager
def disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root may mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """4 MiB."""
    with disk(tmp_path / "disk", "4m") as folder:
        yield folder


def test_a_full_disk_is_as_a_full_map(small_disk: Path) -> None:
    rig = Rig(small_disk / "data")
    attempts = [big(f"r{number}:0:0:0", number) for number in range(1, 61)]
    rig.put(*attempts)
    number = rig.partition("g")
    with rig.running(partitions=(number,), ready=False) as store:
        wait_until(lambda: number in store.progress.lags() and store.progress.lags()[number].full, what="a full disk")
        assert store.failure() is None
        for attempt in attempts[:40]:
            rig.fence(Delete("run", attempt.header.rollout_id, attempt_id(200)))
        rig.caught_up(store)
        assert held(store) == sorted(attempt.header.rollout_id for attempt in attempts[40:])
        for attempt in attempts[40:]:
            np.testing.assert_array_equal(read(store, attempt.header.rollout_id), attempt.routes)


def full(store: RouteStore, number: int) -> bool:
    lags = store.progress.lags()
    return number in lags and lags[number].full is not None


def test_partitions_of_one_full_disk_do_not_starve_each_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with disk(tmp_path / "disk", "12m") as folder, caplog.at_level(logging.INFO):
        rig = Rig(folder / "data")
        groups = {rig.partition(name): name for name in "abcdefgh"}  # one for each partition
        greedy, *others = range(PARTITIONS)
        rig.put(*(big(f"gone:{n}" if n <= 140 else f"g{n}", n, groups[greedy]) for n in range(1, 161)))  # 16 MB
        with rig.running(ready=False) as store:
            wait_until(lambda: full(store, greedy), 30, what="the greedy one to be full")
            for one in others:  # 4 MB each
                rig.put(*(big(f"gone:{n}" if n <= 30 else f"o{n}", one * 1000 + n, groups[one]) for n in range(1, 41)))
            wait_until(lambda: all(full(store, one) for one in others), 30, what="the others to be full")
            said = store.waiting() or ""
            assert all(f"partition {one} takes nothing in" in said for one in range(PARTITIONS))
            figures = store.figures()
            for one in others:  # each has had its part: a sixth of the disk, less the reserve for deletes
                assert figures[one][1].used_bytes > 0.8 * (12 << 20) / 2 / PARTITIONS
            assert store.failure() is None
            rig.fence(Delete("run", "gone", attempt_id(9999)))
            rig.caught_up(store)
            assert store.waiting() is None
            left = [f"g{n}" for n in range(141, 161)] + [f"o{n}" for n in range(31, 41) for _ in others]
            assert held(store) == sorted(left)
            for one in range(PARTITIONS):
                rollout_id = "g150" if one == greedy else "o35"
                assert read(store, rollout_id, group=groups[one]).shape == (1250, 10, 8)
        spoken = [record.getMessage() for record in caplog.records if record.name.endswith("store.follower")]
        assert sum("takes nothing in" in text for text in spoken) <= PARTITIONS + 1
        assert sum("takes records in again" in text for text in spoken) <= PARTITIONS + 1


def test_a_full_disk_is_quiet(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is deleted: it stands still, does not go on and stop again, and does not fill the log."""
    with caplog.at_level(logging.INFO):
        rig = Rig(small_disk / "data")
        rig.put(*(big(f"r{number}:0:0:0", number) for number in range(1, 61)))
        number = rig.partition("g")
        with rig.running(ready=False) as store:
            wait_until(lambda: full(store, number), 30, what="a full disk")
            changes: list[bool] = []
            ends = time.monotonic() + 1.5

            def seen_long_enough() -> bool:
                changes.append(full(store, number))
                return time.monotonic() > ends

            wait_until(seen_long_enough, 30, what="time to pass")
            assert all(changes)
    spoken = [record.getMessage() for record in caplog.records]
    assert sum("takes nothing in" in text for text in spoken) == 1
    assert sum("takes records in again" in text for text in spoken) == 0
