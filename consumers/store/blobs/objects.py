"""Objects in a folder or behind an S3 API, through obstore (extra `object-storage`).

Calls run in one event loop of their own thread: many at a time, and at the end they are cancelled, whatever a server
does. Every request has a timeout and few repetitions; what fails then is for the caller to try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, S3Store

from moebus.consumers.store.blobs.place import Place
from moebus.consumers.store.blobs.port import BlobMissing, BlobsUnavailable, Objects
from moebus.schemas.errors import SettingsError

T = TypeVar("T")
_AT_ONCE = 32
_RETRIES = 3
_MARKER = "moebus-blobs"
_SAID = tuple(
    re.compile(text) for text in (r"status code: (\d+ [\w ]+)", r"<Code>(.*?)</Code>", r"<Message>(.*?)</Message>")
)
_HALF = re.compile(r".+#\d+")
"""The local store writes under such a name first, and never lists it."""
_TIME = re.compile(r" in [\d.]+[mµn]?s\b")
_FAULTS = (BaseError, OSError, ValueError)


class ObstoreObjects(Objects):
    """See `Objects`. Objects lie below `home`, which nobody else may use; a marker there tells a lost object from a
    lost bucket, or a file system that is not mounted."""

    def __init__(self, place: Place, home: str, timeout: float, endpoint: str | None = None, sync: bool = True) -> None:
        """`timeout`: seconds of one request. `endpoint`: of an S3 API that is not Amazon's. `sync=False`: no fsync.

        Raises:
            SettingsError: the place cannot be used at all. That it does not answer is no such error.
        """
        self.where = f"{str(place).rstrip('/')}/{home}"
        self._home = home
        self._folder = place.path if sync else None
        self._persisted: set[Path] = set()
        self._store = _open(place, timeout, endpoint)
        if place.path is not None:
            _clean(place.path / home)
        self._loop = asyncio.new_event_loop()
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="moebus-store-blobs", daemon=True)
        self._thread.start()

    def put(self, name: str, data: bytes) -> Future[None]:
        return self._begin(self._put(f"{self._home}/{name}", data))

    def get(self, name: str, start: int, stop: int) -> Future[bytes]:
        return self._begin(self._get(f"{self._home}/{name}", start, stop))

    def delete(self, names: Sequence[str]) -> Future[None]:
        return self._begin(self._delete([f"{self._home}/{name}" for name in names]))

    def names(self, folder: str) -> Iterator[str]:
        stream = obstore.list(self._store, prefix=f"{self._home}/{folder}", chunk_size=1000)
        while page := self._wait(_next(stream)):
            for found in page:
                yield str(found["path"]).removeprefix(f"{self._home}/")

    def mark(self) -> Future[None]:
        """Writes the marker: from now on, what is not there is lost."""
        return self.put(_MARKER, b"Blobs of a moebus route store. Do not edit.\n")

    def homes(self) -> list[str]:
        """What lies beside this home. Raises BlobsUnavailable."""
        return self._wait(self._homes())

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        failed: Future[T] = Future()
        failed.set_exception(BlobsUnavailable(f"{self.where} is closed"))
        return failed

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._begin(work).result()
        except asyncio.CancelledError:
            raise BlobsUnavailable(f"{self.where} is closed") from None

    async def _put(self, name: str, data: bytes) -> None:
        async with self._room:
            try:
                await obstore.put_async(self._store, name, data, use_multipart=False)
                if self._folder is not None:
                    await asyncio.to_thread(_persist, self._folder, name, self._persisted)
            except _FAULTS as error:
                raise self._unavailable(error) from None

    async def _get(self, name: str, start: int, stop: int) -> bytes:
        try:
            data = bytes(await obstore.get_range_async(self._store, name, start=start, end=stop))
        except FileNotFoundError as error:
            await self._check_marker(error)
            raise BlobMissing(f"{self.where} has no {name.removeprefix(self._home + '/')}") from None
        except _FAULTS as error:
            raise self._unavailable(error) from None
        if len(data) != stop - start:
            raise BlobMissing(f"{self.where}: {name.removeprefix(self._home + '/')} ends before byte {stop}")
        return data

    async def _check_marker(self, error: Exception) -> None:
        try:
            await obstore.head_async(self._store, f"{self._home}/{_MARKER}")
        except FileNotFoundError:
            text = f"{self.where} is empty, its marker is gone too; if that is for good, start the store again"
            raise BlobsUnavailable(f"{text} ({_short(error)})") from None
        except _FAULTS as fault:
            raise self._unavailable(fault) from None

    async def _delete(self, names: list[str]) -> None:
        async with self._room:
            try:
                if isinstance(self._store, S3Store):
                    await obstore.delete_async(self._store, names)
                    return
                for name in names:
                    await self._delete_file(name)
            except _FAULTS as error:
                raise self._unavailable(error) from None

    async def _delete_file(self, name: str) -> None:
        try:
            await obstore.delete_async(self._store, name)
        except FileNotFoundError:
            return

    async def _homes(self) -> list[str]:
        try:
            found = await obstore.list_with_delimiter_async(self._store, prefix=self._home.rpartition("/")[0])
        except _FAULTS as error:
            raise self._unavailable(error) from None
        return [str(prefix) for prefix in found["common_prefixes"]]

    def _unavailable(self, error: Exception) -> BlobsUnavailable:
        return BlobsUnavailable(f"{self.where}: {_short(error)}")


async def _next(stream: AsyncIterator[Sequence[Any]]) -> Sequence[Any]:
    """The next page; empty at the end."""
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return ()
    except _FAULTS as error:
        raise BlobsUnavailable(f"the objects cannot be listed: {_short(error)}") from None


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _open(place: Place, timeout: float, endpoint: str | None) -> LocalStore | S3Store:
    try:
        if place.path is not None:
            return LocalStore(prefix=place.path, mkdir=True)
        more = {"endpoint": endpoint} if endpoint is not None else {}
        return S3Store(
            place.bucket, prefix=place.prefix or None,
            client_options={
                "timeout": timedelta(seconds=timeout), "connect_timeout": timedelta(seconds=min(5.0, timeout)),
                "allow_http": bool(endpoint and endpoint.startswith("http://")),
            },
            retry_config={
                "max_retries": _RETRIES, "retry_timeout": timedelta(seconds=timeout * _RETRIES),
                "backoff": {
                    "init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2,
                },
            },
            **more,  # type: ignore[arg-type]
        )  # fmt: skip
    except _FAULTS as error:
        raise SettingsError(f"store.blobs: {place} cannot be used: {_short(error)}") from None


def _clean(home: Path) -> None:
    """What a killed process left half written, and folders that nothing is in."""
    for folder, _, files in os.walk(home, topdown=False):
        for name in files:
            if _HALF.fullmatch(name):
                os.unlink(os.path.join(folder, name))
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(folder)


def _persist(folder: Path, name: str, known: set[Path]) -> None:
    """fsync of a file, of its folder, and of the folders that lead there unless they are `known` to last."""
    path = folder / name
    leading = [parent for parent in path.parents if parent == folder or folder in parent.parents]
    fresh = [parent for parent in leading[1:] if leading[0] not in known]
    for one in (path, leading[0], *fresh):
        handle = os.open(one, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    known.add(leading[0])


def _short(error: Exception) -> str:
    """obstore's errors go on for a page. What a server said is enough; and the same fault is the same text."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    said = [match[1] for match in (pattern.search(text) for pattern in _SAID) if match is not None]
    text = ": ".join(said) if said else _TIME.sub("", text)
    return text if len(text) <= 300 else text[:297] + "..."
