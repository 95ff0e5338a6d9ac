"""Entries that a child ended with: counted, taken alone, set aside at last. The child is a thread here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moebus.broker.errors import AppendFailed
from moebus.observability.metrics import Metrics
from moebus.producers.routing.process import layout
from moebus.producers.routing.process.journal import Journal, format_file
from moebus.producers.routing.process.poison import MAX_TRIES, set_aside
from moebus.schemas.record import End
from tests.contract.publisher_world import WAIT, JournalWorld, decoded
from tests.support.routes import make_routes

MB = 1 << 20


@pytest.fixture
def world() -> Iterator[JournalWorld]:
    made = JournalWorld()
    yield made
    made.broker.close()


def held(path: Path, number: int) -> None:
    """As a child leaves it that ends with entry `number` (from 0) in hand."""
    with path.open("r+b") as file:
        position = 0
        for _ in range(number):
            file.seek(layout.HEAD_BYTES + position)
            entry = layout.unpack_entry(file.read(layout.ALIGN), position)
            assert entry is not None
            position += entry.size
        file.seek(layout.HEAD_BYTES + position + layout.HAND_AT)
        file.write(b"\1")


def test_a_mark_that_five_children_left_sets_the_entry_aside(
    world: JournalWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, metrics = tmp_path / "j", Metrics()
    with world.outage():
        publisher = world.make(journal=path, max_bytes=MB)
        for name in ("a", "b", "c"):
            publisher.submit(make_routes(100), name)
        assert len(publisher.close(0)) == 3
        for count in range(1, MAX_TRIES):
            held(path, 1)
            publisher = world.make(journal=path, max_bytes=MB)
            assert publisher.stats().recovered == 3, f"after {count} it is still tried"
            assert len(publisher.close(0)) == 3
        held(path, 1)
        publisher = world.make(metrics, journal=path, max_bytes=MB)
        assert (publisher.stats().recovered, publisher.stats().set_aside) == (2, 1)
    assert publisher.flush(WAIT)
    assert publisher.close(WAIT) == []
    assert {record.header.rollout_id for record in decoded(world) if isinstance(record, End)} == {"a", "c"}
    assert metrics.value("moebus_routes_set_aside_total") == 1
    (kept,) = (tmp_path / "j.aside").iterdir()
    assert make_routes(100).tobytes() in kept.read_bytes()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert f"run/b#0 attempt {_attempt_in(caplog.text)}" in caplog.text
    assert str(kept) in caplog.text


def _attempt_in(text: str) -> str:
    return text.split("run/b#0 attempt ")[1][:26]


def test_a_suspect_waits_for_those_before_it_and_those_after_wait_for_it(world: JournalWorld, tmp_path: Path) -> None:
    path = tmp_path / "j"
    with world.outage():
        publisher = world.make(journal=path, max_bytes=MB)
        for number in range(9):
            publisher.submit(make_routes(2), f"r{number}", group="one")
        assert len(publisher.close(0)) == 9
        held(path, 4)
    publisher = world.make(journal=path, max_bytes=MB)
    assert publisher.flush(WAIT)
    assert publisher.close(WAIT) == []
    ends = [record.header.rollout_id for record in decoded(world) if isinstance(record, End)]
    assert ends == [f"r{number}" for number in range(9)]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, layout.HEAD_BYTES + MB)
    format_file(fd, MB)
    made = Journal(fd)
    os.close(fd)
    yield made
    made.close()


def test_only_what_was_in_hand_is_counted_and_a_new_entry_starts_at_nothing(journal: Journal) -> None:
    rows = np.arange(64, dtype=np.uint8)
    journal.write(1, 0, 4096, layout.ROLLOUT, 0, b"{}", rows)
    assert journal.count_try(0) == 0
    for count in (1, 2):
        journal.hold(0, True)
        assert journal.count_try(0) == count
        assert journal.count_try(0) == 0, "once for each end"
    assert journal.suspect(0)
    assert journal.entry(0, 1) is not None, "the header is as whole as before"
    journal.write(2, 0, 4096, layout.ROLLOUT, 0, b"{}", rows)
    assert not journal.suspect(0)


def test_where_nothing_can_be_kept_the_receipt_says_so(journal: Journal, tmp_path: Path) -> None:
    journal.write(1, 0, 4096, layout.ROLLOUT, 0, b"{}", np.arange(64, dtype=np.uint8))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "taken").write_text("")
    for folder in ("link", "taken"):
        outcome = set_aside(journal, 0, 1, "run/x#0 attempt A", tmp_path / folder)
        assert isinstance(outcome, AppendFailed)
        assert "run/x#0 attempt A: entry 1 of the journal ended the publisher's process 5 times" in str(outcome)
        assert "could not be kept" in str(outcome)
    assert list((tmp_path / "real").iterdir()) == []
