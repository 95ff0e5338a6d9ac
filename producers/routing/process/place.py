"""Where a journal lies, how big it is, and who may use it."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moebus.observability.clock import Clock
from moebus.producers.routing.process import layout
from moebus.producers.routing.process.journal import Cursor, Journal, format_file
from moebus.schemas.errors import SettingsError

DEFAULT_BYTES = 256 << 20
LEAST_BYTES = 1 << 20
SHARED_MEMORY = Path("/dev/shm")
MOUNTS = Path("/proc/self/mountinfo")
TAKEOVER_SECONDS = 15.0
PARENT_BYTE, CHILD_BYTE = 0, 1
_here: set[tuple[int, int]] = set()
_here_lock = threading.Lock()
_look_again = threading.Event()  # never set: a wait that a test can see through


@dataclass
class Place:
    """An open journal. `path` is None for one that nobody else can see and that goes with its processes."""

    fd: int
    path: Path | None
    journal: Journal
    identity: tuple[int, int]

    def close(self) -> None:
        """A named file stays, with what is unsent in it."""
        self.journal.close()
        os.close(self.fd)  # and with it the lock
        with _here_lock:
            _here.discard(self.identity)


def open_place(path: Path | None, size: int | None, clock: Clock, wait: float = TAKEOVER_SECONDS) -> Place:
    """Opens the journal at `path`, with what a publisher before left in it, or makes one of `size` bytes (default:
    the smaller of 256 MB and half of what is free there).

    Raises:
        SettingsError: publisher.journal or publisher.max_bytes, and why: no room, no permission, in use.
    """
    fd = _anonymous() if path is None else _named(path)
    identity = (os.fstat(fd).st_dev, os.fstat(fd).st_ino)
    try:
        _lock(fd, path, identity, clock, wait)
        try:
            keep = _has_open_entries(fd)
            if not _try_lock(fd):  # closing the map, which has a descriptor of its own, gave the lock back
                raise SettingsError(f"publisher.journal: {path} is in use by another publisher; name another file")
            if not keep:
                _make(fd, path or SHARED_MEMORY, size)
            journal = Journal(fd, populate=True, sum_rows=not _in_memory(identity[0]))
        except BaseException:
            with _here_lock:
                _here.discard(identity)
            raise
    except BaseException:
        os.close(fd)
        raise
    journal.set_owner(secrets.token_bytes(8))
    fcntl.lockf(fd, fcntl.LOCK_UN, 1, CHILD_BYTE)
    return Place(fd, path, journal, identity)


def _anonymous() -> int:
    folder = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    fd, name = tempfile.mkstemp(prefix="moebus-publisher-", dir=folder)
    os.unlink(name)  # it lives as long as a process holds it: nothing is left behind after a crash
    return fd


def _named(path: Path) -> int:
    with suppress(OSError):
        found = os.stat(path)
        _refuse_twice((found.st_dev, found.st_ino), path)  # not even opened: closing it would give the lock back
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise SettingsError(f"publisher.journal: {path} cannot be opened: {exc.strerror}") from None


def _lock(fd: int, path: Path | None, identity: tuple[int, int], clock: Clock, wait: float) -> None:
    """Record locks: they belong to one process and do not follow a fork, but say nothing within the process."""
    _refuse_twice(identity, path)
    with _here_lock:
        _here.add(identity)
    deadline = clock.monotonic() + wait
    while not (held := _try_lock(fd)):
        if clock.monotonic() >= deadline:
            break
        _ask_to_leave(fd)
        _look_again.wait(0.1)
    if not held:
        _ask_to_leave(fd, b"\0")
        with _here_lock:
            _here.discard(identity)
        raise SettingsError(f"publisher.journal: {path} is in use by another publisher; name another file")


def _refuse_twice(identity: tuple[int, int], path: Path | None) -> None:
    with _here_lock:
        if identity in _here:
            raise SettingsError(f"publisher.journal: {path} is in use by another publisher of this process")


def _try_lock(fd: int) -> bool:
    """Both bytes: no publisher has it and no child of one that is gone."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, PARENT_BYTE)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, CHILD_BYTE)
    except OSError:
        fcntl.lockf(fd, fcntl.LOCK_UN, 2, PARENT_BYTE)
        return False
    return True


def child_may_start(fd: int, journal: Journal, owner: bytes, clock: Clock, wait: float = TAKEOVER_SECONDS) -> bool:
    """Takes the child's byte for good. False: another child has it, or another publisher the journal."""
    deadline = clock.monotonic() + wait
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, CHILD_BYTE)
            return journal.owner == owner
        except OSError:
            if clock.monotonic() >= deadline:
                return False
            _look_again.wait(0.1)


def _ask_to_leave(fd: int, wish: bytes = b"\1") -> None:
    """Or, with b"\\0", takes the wish back."""
    if layout.unpack_file(os.pread(fd, layout.FILE.size, 0)) is not None:
        os.pwrite(fd, wish, layout.TAKEOVER_AT)


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
