"""Who may use a journal. Record locks: they belong to one process and do not follow a fork, but say nothing within the
process, and closing any descriptor of the file gives them back."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from moebus.observability.clock import Clock
from moebus.producers.routing.process import layout
from moebus.producers.routing.process.journal import Journal
from moebus.schemas.errors import SettingsError

TAKEOVER_SECONDS = 15.0
_PARENT_BYTE, _CHILD_BYTE = 0, 1
_look_again = threading.Event()  # never set: only to wait

Identity = tuple[int, int]
"""Device and inode of a journal."""
in_use: set[Identity] = set()
"""By publishers of this process."""
_guard = threading.Lock()


def lock(fd: int, path: Path | None, identity: Identity, clock: Clock, wait: float = TAKEOVER_SECONDS) -> None:
    """Takes both bytes, asking a child that was left alone to leave; `unlock_child` gives its byte back.

    Raises:
        SettingsError: another publisher has it, or a child of one did not leave within `wait` seconds.
    """
    refuse_twice(identity, path)
    with _guard:
        in_use.add(identity)
    deadline = clock.monotonic() + wait
    while not (held := try_lock(fd)) and clock.monotonic() < deadline:
        _ask_to_leave(fd)
        _look_again.wait(0.1)
    if not held:
        _ask_to_leave(fd, b"\0")
        forget(identity)
        raise taken(path)


def forget(identity: Identity) -> None:
    """The file was closed, and so the lock is given back."""
    with _guard:
        in_use.discard(identity)


def taken(path: Path | None) -> SettingsError:
    return SettingsError(f"publisher.journal: {path} is in use by another publisher; name another file")


def refuse_twice(identity: Identity, path: Path | None) -> None:
    """Raises SettingsError where a publisher of this process has it."""
    with _guard:
        if identity in in_use:
            raise SettingsError(f"publisher.journal: {path} is in use by another publisher of this process")


def try_lock(fd: int) -> bool:
    """Both bytes: no publisher has it and no child of one that is gone."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _PARENT_BYTE)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _CHILD_BYTE)
    except OSError:
        fcntl.lockf(fd, fcntl.LOCK_UN, 2, _PARENT_BYTE)
        return False
    return True


def unlock_child(fd: int) -> None:
    """From now on a child may start."""
    fcntl.lockf(fd, fcntl.LOCK_UN, 1, _CHILD_BYTE)


def child_may_start(fd: int, journal: Journal, owner: bytes, clock: Clock, wait: float = TAKEOVER_SECONDS) -> bool:
    """Takes the child's byte for good. False: another child has it, or another publisher the journal."""
    deadline = clock.monotonic() + wait
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _CHILD_BYTE)
            return journal.owner == owner
        except OSError:
            if clock.monotonic() >= deadline:
                return False
            _look_again.wait(0.1)


def _ask_to_leave(fd: int, wish: bytes = b"\1") -> None:
    """Or, with b"\\0", takes the wish back."""
    if layout.unpack_file(os.pread(fd, layout.FILE.size, 0)) is not None:
        os.pwrite(fd, wish, layout.TAKEOVER_AT)
