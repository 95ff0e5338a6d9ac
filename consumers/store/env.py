"""One LMDB environment: opening, the map's fill, and closing under the feet of readers without a crash."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from moebus.schemas.errors import SettingsError
from moebus.schemas.route_errors import StoreCatchingUp

TABLES = ("meta", "attempts", "owners", "blobs", "fences", "turns", "times", "trash", "usage", "cards", "doomed")
_FILES = ("data.mdb", "lock.mdb")
_MAX_READERS = 512
_FULL = (lmdb.MapFullError, lmdb.DiskError)
_CUT, _QUOTA = os.strerror(errno.EIO), os.strerror(errno.EDQUOT)
_SCARCE = 64 << 20
_TORN = (
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.BadDbiError,
    lmdb.BadTxnError,
    lmdb.IncompatibleError,
    lmdb.PanicError,
)
_GARBLED = (json.JSONDecodeError, UnicodeDecodeError, struct.error)
"""What the tables raise where a value is not one that they have written."""


class EnvClosed(Exception):
    """The environment was closed, or wiped, since the reader got hold of it."""


class EnvDamaged(StoreCatchingUp):
    """The file of an environment cannot be read any more; whoever writes makes it again from the log."""


def is_torn(error: BaseException) -> bool:
    """Whether an error says that the file is damaged, and not that it is full, or closed."""
    return isinstance(error, (*_TORN, *_GARBLED, EnvDamaged))


class Env:
    """An open environment. Write transactions belong to one thread; any thread may read."""

    def __init__(self, path: Path, map_bytes: int, *, sync: bool = True) -> None:
        """`map_bytes` is fixed until the next open: growing a map under a reader is a SIGBUS. `sync=False`: no fsync.

        Raises:
            SettingsError: the folder cannot be used.  EnvDamaged: its file cannot.
        """
        self.path = path
        self.damaged: str | None = None
        """Why its file cannot be read, once somebody found that."""
        self.map_bytes = map_bytes
        self._changed = threading.Condition()
        self._readers = 0
        self._closed = False
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._env: Any = lmdb.open(
                str(path), map_size=map_bytes, max_dbs=len(TABLES), max_readers=_MAX_READERS, sync=sync, metasync=sync
            )
        except (OSError, lmdb.Error) as error:
            raise _unusable(path, error) from error
        try:
            self._mend_length()
            self.tables: dict[str, Any] = {name: self._env.open_db(name.encode()) for name in TABLES}
        except (OSError, lmdb.Error) as error:
            self._env.close()
            raise _unusable(path, error) from error
        self.page = int(self._env.stat()["psize"])

    def _mend_length(self) -> None:
        """A file that was cut ends the process where a page behind its end is touched; zeros are found out instead."""
        length = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        file = self.path / _FILES[0]
        if file.stat().st_size < length <= self.map_bytes:
            os.truncate(file, length)

    def begin_write(self) -> Any:
        """A write transaction; the caller commits or aborts it."""
        return self._env.begin(write=True)

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """A read transaction. Keep it short: while it lives, no page it can see is used again.

        Raises:
            EnvClosed: closed in the meantime.  EnvDamaged: what it holds cannot be read.
        """
        with self._changed:
            if self._closed:
                raise EnvClosed
            self._readers += 1
        try:
            with self._env.begin() as txn:
                yield txn
        except Exception as error:
            if not is_torn(error):
                raise
            self.damaged = f"{self.path / _FILES[0]} is damaged: {error}"
            raise EnvDamaged(f"{self.damaged}; it is read again from the log") from error
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def used_bytes(self, txn: Any) -> int:
        """Bytes of all pages in use as `txn` sees it (free ones inside the map do not count)."""
        stats = (txn.stat(table) for table in self.tables.values())
        pages = sum(stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] for stat in stats)
        return int(pages) * self.page

    def room_bytes(self) -> int:
        """What the file may grow to: the map, or less where the disk has less. Any thread may ask."""
        try:
            return min(self.map_bytes, file_bytes(self.path) + shutil.disk_usage(self.path).free)
        except FileNotFoundError:  # wiped in the meantime
            return self.map_bytes

    def is_full(self, error: lmdb.Error) -> bool:
        """Whether a write failed because the map, or the disk under it, is full. The transaction is lost.

        LMDB says EIO, not ENOSPC, where the last write before the end of the disk was cut short; with room on the
        disk that is a fault of the disk.
        """
        if isinstance(error, _FULL):
            return True
        text = str(error)
        return text.endswith(_QUOTA) or (text.endswith(_CUT) and shutil.disk_usage(self.path).free < _SCARCE)

    def close(self) -> None:
        """Waits for the running reads, then closes; a second call does nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.wait_for(lambda: self._readers == 0)
        self._env.close()


def _unusable(path: Path, error: Exception) -> Exception:
    if is_torn(error):
        return EnvDamaged(f"{path / _FILES[0]} is damaged: {error}")
    return SettingsError(f"store.data_dir: {path} cannot be used: {error}")


def file_bytes(path: Path) -> int:
    """What the file of an environment takes of the disk; 0 where there is none."""
    try:
        return os.stat(os.path.join(path, _FILES[0])).st_blocks * 512  # asked with every commit of every partition
    except FileNotFoundError:
        return 0


def wipe(path: Path) -> None:
    """Removes the files of a closed environment, and nothing else in the folder."""
    for name in _FILES:
        (path / name).unlink(missing_ok=True)
