"""Where a journal lies and how big it is."""

from __future__ import annotations

import os
import secrets
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moebus.observability.clock import Clock
from moebus.producers.routing.process import layout, locks
from moebus.producers.routing.process.journal import Cursor, Journal, format_file
from moebus.schemas.errors import SettingsError

DEFAULT_BYTES = 256 << 20
LEAST_BYTES = 1 << 20
SHARED_MEMORY = Path("/dev/shm")
MOUNTS = Path("/proc/self/mountinfo")


@dataclass
class Place:
    """An open journal. `path` is None for one that nobody else can see and that goes with its processes."""

    fd: int
    path: Path | None
    journal: Journal
    identity: locks.Identity

    @property
    def aside(self) -> Path:
        """Folder for entries that end the child each time. Not on /dev/shm: it would fill up for ever."""
        if self.path is not None:
            return self.path.with_name(f"{self.path.name}.aside")
        return Path(tempfile.gettempdir()) / f"moebus-aside-{os.getuid()}"

    def close(self) -> None:
        """A named file stays, with what is unsent in it."""
        self.journal.close()
        os.close(self.fd)  # and with it the lock
        locks.forget(self.identity)


def open_place(path: Path | None, size: int | None, clock: Clock, wait: float = locks.TAKEOVER_SECONDS) -> Place:
    """Opens the journal at `path`, with what a publisher before left in it, or makes one of `size` bytes (default:
    the smaller of 256 MB and half of what is free there).

    Raises:
        SettingsError: publisher.journal or publisher.max_bytes, and why: no room, no permission, in use.
    """
    fd = _anonymous() if path is None else _named(path)
    identity = (os.fstat(fd).st_dev, os.fstat(fd).st_ino)
    try:
        locks.lock(fd, path, identity, clock, wait)
        try:
            journal = _open(fd, path, identity, size)
        except BaseException:
            locks.forget(identity)
            raise
    except BaseException:
        os.close(fd)
        raise
    return Place(fd, path, journal, identity)


def _open(fd: int, path: Path | None, identity: locks.Identity, size: int | None) -> Journal:
    keep = _has_open_entries(fd)
    if not locks.try_lock(fd):  # closing the map, which has a descriptor of its own, gave the lock back
        raise locks.taken(path)
    if not keep:
        _make(fd, path or SHARED_MEMORY, size)
    journal = Journal(fd, populate=True, sum_rows=not _in_memory(identity[0]))
    journal.set_owner(secrets.token_bytes(8))
    locks.unlock_child(fd)
    return journal


def _anonymous() -> int:
    folder = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    fd, name = tempfile.mkstemp(prefix="moebus-publisher-", dir=folder)
    os.unlink(name)  # it lives as long as a process holds it: nothing is left behind after a crash
    return fd


def _named(path: Path) -> int:
    with suppress(OSError):
        found = os.stat(path)
        locks.refuse_twice((found.st_dev, found.st_ino), path)  # not even opened: closing it would give the lock back
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise SettingsError(f"publisher.journal: {path} cannot be opened: {exc.strerror}") from None


def _has_open_entries(fd: int) -> bool:
    """Whether the file is a journal with something unsent, which keeps its size.

    Raises:
        SettingsError: it holds something else.
    """
    if os.fstat(fd).st_size == 0:
        return False
    journal = Journal(fd)
    try:
        cursor = Cursor(journal, *journal.tail())
        while (entry := cursor.next()) is not None:
            if not journal.settled(entry.position):
                return True
        return False
    finally:
        journal.close()


def _in_memory(device: int) -> bool:
    """Whether this device number is a tmpfs."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        for line in MOUNTS.read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split(" ")[2] == wanted:
                return rest.split(" ")[0] in ("tmpfs", "ramfs")
    return False


def _make(fd: int, where: Path, size: int | None) -> None:
    """Allocates every block now: a full filesystem is an error here and not a SIGBUS later."""
    os.ftruncate(fd, 0)
    space = os.fstatvfs(fd)
    free = space.f_bavail * space.f_frsize
    wanted = min(DEFAULT_BYTES, free // 2) if size is None else size
    capacity = wanted // layout.ALIGN * layout.ALIGN
    if capacity < LEAST_BYTES:
        raise SettingsError(
            f"publisher.journal: {free} bytes are free on {where}; at least {2 * LEAST_BYTES} are needed"
        )
    try:
        if layout.HEAD_BYTES + capacity > free:
            raise OSError
        os.posix_fallocate(fd, 0, layout.HEAD_BYTES + capacity)
    except OSError:
        os.ftruncate(fd, 0)
        raise SettingsError(
            f"publisher.max_bytes: {capacity} bytes do not fit {where}, where {free} are free; "
            "ask for less or put publisher.journal elsewhere"
        ) from None
    format_file(fd, capacity)
