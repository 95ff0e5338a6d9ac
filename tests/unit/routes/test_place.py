"""Where the journal lies: its size, refusals by name, one publisher at a time."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from moebus.observability.clock import SystemClock
from moebus.producers.routing.process import layout, locks, place
from moebus.producers.routing.process.locks import child_may_start
from moebus.producers.routing.process.place import Place, open_place
from moebus.schemas.errors import SettingsError
from tests.support.fork import exit_code, in_a_fork
from tests.support.routes import make_routes

CLOCK = SystemClock()
MB = 1 << 20


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(place, "SHARED_MEMORY", folder)
    return folder


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(os, "fstatvfs", lambda fd: SimpleNamespace(f_bavail=size // 4096, f_frsize=4096))


def size_of(opened: Place) -> int:
    size = opened.journal.capacity
    opened.close()
    return size


def test_half_of_a_small_dev_shm_by_default(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 64 * MB)
    assert size_of(open_place(None, None, CLOCK)) == 32 * MB


def test_256_mb_where_there_is_room(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _sparse)
    free(monkeypatch, 4096 * MB)
    assert size_of(open_place(None, None, CLOCK)) == 256 * MB


def _sparse(fd: int, offset: int, size: int) -> None:
    os.ftruncate(fd, offset + size)


def test_a_size_that_does_not_fit_is_refused_by_name(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 64 * MB)
    with pytest.raises(SettingsError, match=r"publisher\.max_bytes: 104857600 bytes do not fit"):
        open_place(None, 100 * MB, CLOCK)
    free(monkeypatch, MB)
    with pytest.raises(SettingsError, match=r"publisher\.journal: 1048576 bytes are free"):
        open_place(None, None, CLOCK)
    assert list(shm.iterdir()) == []


def test_an_allocation_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SettingsError, match=r"publisher\.max_bytes"):
        open_place(tmp_path / "journal", 2 * MB, CLOCK)
    monkeypatch.undo()
    assert size_of(open_place(tmp_path / "journal", 2 * MB, CLOCK)) == 2 * MB


def test_a_journal_without_a_name_leaves_no_file(shm: Path) -> None:
    opened = open_place(None, 2 * MB, CLOCK)
    assert list(shm.iterdir()) == []
    opened.close()


def test_one_publisher_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "journal"
    first = open_place(path, 2 * MB, CLOCK)
    with pytest.raises(SettingsError, match="another publisher of this process"):
        open_place(path, 2 * MB, CLOCK)
    assert exit_code(in_a_fork(lambda: _open_as_a_stranger(path))) == 0, "the refusal gave the lock away"
    first.close()
    open_place(path, 2 * MB, CLOCK).close()


def test_a_publisher_of_another_process_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = open_place(path, 2 * MB, CLOCK)
    assert exit_code(in_a_fork(lambda: _open_as_a_stranger(path))) == 0
    assert not first.journal.takeover, "the stranger's wish outlived its try"
    first.close()


def _open_as_a_stranger(path: Path) -> int:
    """Record locks do not follow a fork."""
    locks.in_use.clear()
    try:
        open_place(path, 2 * MB, CLOCK, wait=0.3)
    except SettingsError as exc:
        return 0 if "in use by another publisher" in str(exc) else 1
    return 2


def test_a_child_of_another_publisher_may_not_start(tmp_path: Path) -> None:
    opened = open_place(tmp_path / "journal", 2 * MB, CLOCK)
    assert child_may_start(opened.fd, opened.journal, opened.journal.owner, CLOCK)
    assert not child_may_start(opened.fd, opened.journal, b"somebody", CLOCK)
    opened.close()


def test_what_is_unsent_keeps_the_file_and_its_size(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    opened = open_place(path, 2 * MB, CLOCK)
    opened.journal.write(1, 0, 1024, layout.ROLLOUT, 0, b"{}")
    opened.close()
    again = open_place(path, 4 * MB, CLOCK)
    assert again.journal.entry(0, 1) is not None
    again.journal.mark(0)
    assert size_of(again) == 2 * MB
    assert size_of(open_place(path, 4 * MB, CLOCK)) == 4 * MB, "an empty one is made anew"


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_bytes(b"data" * 5000)
    with pytest.raises(SettingsError, match="not a journal"):
        open_place(path, 2 * MB, CLOCK, wait=0.0)
    assert path.read_bytes() == b"data" * 5000
    with pytest.raises(SettingsError, match="cannot be opened"):
        open_place(path / "below", 2 * MB, CLOCK)


def test_rows_are_summed_on_a_disk_and_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(place, "MOUNTS", mounts)
    for kind, summed in (("tmpfs", False), ("ext4", True)):
        mounts.write_text(f"36 35 {os.major(device)}:{os.minor(device)} / /x rw - {kind} none rw\n")
        opened = open_place(tmp_path / kind, 2 * MB, CLOCK)
        entry = opened.journal.write(1, 0, 1024, layout.ROLLOUT, 0, b"meta", make_routes(5))
        assert entry.data_summed is summed
        opened.journal.data(entry)[:] = 0
        assert opened.journal.whole(entry) is not summed
        opened.close()
