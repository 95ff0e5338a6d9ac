"""The ports of the store's blobs.

A *blob* is one stored CHUNK record, named by the owner's number and the chunk's index. The table `blobs` of a partition
holds an entry for each: what makes it visible, removed and counted is the index alone. `Blobs` says what the entry is:
the bytes themselves (LMDB), or where they lie in `Objects` (memory, a folder, an S3 API).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from moebus.consumers.store.tables import Tables

T = TypeVar("T")


class BlobsUnavailable(Exception):
    """The bytes cannot be written or read now; the text says where and why. Later it may go."""


class BlobMissing(Exception):
    """The index names bytes that are not there."""


def answer_of(asked: Future[T]) -> T:
    """Waits. Raises BlobMissing or BlobsUnavailable."""
    try:
        return asked.result()
    except CancelledError:
        raise BlobsUnavailable("the store stops") from None


class Objects(Protocol):
    """Named bytes that are written once, read in ranges, and deleted. Any thread may use it."""

    where: str

    def put(self, name: str, data: bytes) -> Future[None]:
        """Durable once the future is done; BlobsUnavailable as its exception. A name is never used for other bytes."""
        ...

    def get(self, name: str, start: int, stop: int) -> Future[bytes]:
        """Bytes [start, stop). BlobMissing (no such object, or a shorter one) or BlobsUnavailable as the exception."""
        ...

    def delete(self, names: Sequence[str]) -> Future[None]:
        """Names that are not there are no error. BlobsUnavailable as the exception: some may be left."""
        ...

    def names(self, folder: str) -> Iterator[str]:
        """Of everything below `folder`, in any order. Raises BlobsUnavailable, also in the middle."""
        ...

    def close(self) -> None:
        """Ends what is under way; what waits for it gets BlobsUnavailable."""
        ...


class Reading(Protocol):
    """`Partition.reading`: (tables, pending deletes) as of the last commit. Raises EnvClosed."""

    def __call__(self) -> AbstractContextManager[tuple[Tables, Any]]: ...


class Blobs(Protocol):
    """The blobs of one partition. `read`, `ask` and `sweep` belong to any thread, the rest to the one that writes."""

    identity: str
    """Data whose blobs lie elsewhere is of no use: it is read again from the log."""
    strays: bool
    """Whether there may be something to sweep away."""
    ahead: int
    """How many blobs to ask for before their turn: 0 where they are at hand."""

    def put(self, tables: Tables, owner: int, index: int, attempt: bytes, data: bytes) -> None:
        """Into the open batch: writes the entry."""
        ...

    def flush(self) -> None:
        """The batch is about to be committed: begin to write what is not being written yet."""
        ...

    def settle(self) -> None:
        """Returns once all bytes of the batch are durable. Raises BlobsUnavailable: the batch must not be committed."""
        ...

    def committed(self) -> None:
        """The batch is durable, index and all."""
        ...

    def abandoned(self) -> None:
        """The batch was dropped: its bytes are nobody's."""
        ...

    def read(self, owner: int, entry: bytes, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a blob of `owner`. Raises BlobMissing or BlobsUnavailable."""
        ...

    def ask(self, wanted: Sequence[tuple[int, bytes]]) -> list[Future[bytes]]:
        """Whole blobs, (owner, entry) each, without waiting; neighbours in one request."""
        ...

    def due(self, tables: Tables) -> bool:
        """Whether `free` has something to do. `tables`: as of the last commit, since what an open batch removes may
        come back."""
        ...

    def free(self, tables: Tables, limit: int) -> int:
        """Takes up to `limit` entries of removed owners away; fewer than `limit` in return: nothing is left."""
        ...

    def trouble(self) -> str | None:
        """Why blobs cannot be written now, as far as is known; asks again in the background."""
        ...

    def forget(self) -> None:
        """The index was wiped."""
        ...

    def sweep(self, reading: Reading) -> int:
        """Deletes what lies there without an entry; returns how many. Raises BlobsUnavailable."""
        ...
