"""What a mirror's target may hold, on disk, so that no restart and no crash in the middle of a put leaves anything."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moebus.consumers.store.mirrors.port import Layout, Shelf
from moebus.schemas.errors import SettingsError

_TABLE = """
CREATE TABLE IF NOT EXISTS held
(id TEXT PRIMARY KEY, attempt BLOB, layers INTEGER, layout TEXT, bytes INTEGER) WITHOUT ROWID
"""
_SLICE = 500


@dataclass(frozen=True, slots=True)
class Held:
    """`attempt`: whose rows lie there; empty while that is in doubt. `bytes`: their size there."""

    shelf: Shelf
    attempt: bytes
    bytes: int


class Ledger:
    """One thread uses it. Written before what it tells of; not synced, since a kill of the process loses nothing."""

    def __init__(self, path: Path, forgets: bool) -> None:
        """`forgets`: what was held before this process may not be there any more.

        Raises:
            SettingsError: the file cannot be used.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise _unusable(path, error) from None
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=OFF")
            self._db.execute(_TABLE)
            if forgets:
                self._db.execute("UPDATE held SET attempt = x'', bytes = 0")
            total, self.count = self._db.execute("SELECT total(bytes), count(*) FROM held").fetchone()
            self.bytes = int(total)
        except sqlite3.Error as error:
            self._db.close()
            raise _unusable(path, error) from None

    def get(self, rollout_id: str) -> Held | None:
        row = self._db.execute("SELECT * FROM held WHERE id = ?", (rollout_id,)).fetchone()
        return _held(*row) if row else None

    def put(self, held: Held) -> None:
        old = self.get(held.shelf.rollout_id)
        shelf = held.shelf
        self._db.execute(
            "INSERT OR REPLACE INTO held VALUES (?, ?, ?, ?, ?)",
            (shelf.rollout_id, held.attempt, shelf.layers, shelf.layout, held.bytes),
        )
        self._count(held.bytes - (old.bytes if old else 0), old is None)

    def drop(self, rollout_id: str) -> None:
        old = self.get(rollout_id)
        if old is not None:
            self._db.execute("DELETE FROM held WHERE id = ?", (rollout_id,))
            self.bytes -= old.bytes
            self.count -= 1

    def all(self) -> Iterator[Held]:
        """In order of the ids; it may be written to meanwhile."""
        after = ""
        while rows := self._db.execute(
            "SELECT * FROM held WHERE id > ? ORDER BY id LIMIT ?", (after, _SLICE)
        ).fetchall():
            for row in rows:
                yield _held(*row)
            after = rows[-1][0]

    def close(self) -> None:
        self._db.close()

    def _count(self, change: int, is_new: bool) -> None:
        self.bytes += change
        self.count += is_new


def _unusable(path: Path, error: Exception) -> SettingsError:
    return SettingsError(f"store.data_dir: {path} cannot be used: {error}; it may be removed")


def _held(rollout_id: str, attempt: bytes, layers: int, layout: Layout, size: int) -> Held:
    return Held(Shelf(rollout_id, layers, layout), attempt, size)
