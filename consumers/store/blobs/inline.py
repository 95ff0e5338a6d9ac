"""Blobs in LMDB, beside their index: the entry is the record."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from moebus.consumers.store.blobs.port import Reading
from moebus.consumers.store.tables import Tables


class InlineBlobs:
    """The default. Bytes, index and offset are one transaction, so there is nothing to settle and nothing to sweep."""

    identity = "lmdb"
    strays = False
    ahead = 0

    def put(self, tables: Tables, owner: int, index: int, attempt: bytes, data: bytes) -> None:
        tables.put_blob(owner, index, data)

    def flush(self) -> None:
        return None

    def settle(self) -> None:
        return None

    def committed(self) -> None:
        return None

    def abandoned(self) -> None:
        return None

    def read(self, owner: int, entry: bytes, start: int = 0, stop: int | None = None) -> bytes:
        return entry if start == 0 and stop is None else entry[start:stop]

    def ask(self, wanted: Sequence[tuple[int, bytes]]) -> list[Future[bytes]]:
        found: list[Future[bytes]] = []
        for _, entry in wanted:
            found.append(Future())
            found[-1].set_result(entry)
        return found

    def due(self, tables: Tables) -> bool:
        return bool(tables.trash(1))

    def free(self, tables: Tables, limit: int) -> int:
        left = limit
        for owner in tables.trash(limit):
            left -= max(1, tables.free(owner, left))  # the last one of a slice may be left with none
            if left <= 0:
                break
        return limit - left

    def trouble(self) -> str | None:
        return None

    def forget(self) -> None:
        return None

    def sweep(self, reading: Reading) -> int:
        return 0
