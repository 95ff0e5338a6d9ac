"""The homes of blobs as the contract wants them: how to open one, take it away, and look what lies there."""

from __future__ import annotations

import itertools
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moto.server import ThreadedMotoServer

from moebus.consumers.store.blobs.external import ExternalBlobs
from moebus.consumers.store.blobs.inline import InlineBlobs
from moebus.consumers.store.blobs.memory import MemoryObjects
from moebus.consumers.store.blobs.objects import ObstoreObjects
from moebus.consumers.store.blobs.place import Place
from moebus.consumers.store.blobs.port import Blobs, Objects
from moebus.consumers.store.decide import Rules
from moebus.consumers.store.partition import Guard, Partition

GUARD = Guard("cluster", "topic")
RULES = Rules(open_ttl_ms=1_000, keep_ttl_ms=10_000, fence_ttl_ms=50_000)
FOLDER = "t.routes.v1/00000"
_buckets = itertools.count()


class S3Server:
    """A real HTTP server that speaks S3; its buckets."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.endpoint = "http://{}:{}".format(*self._server.get_host_and_port())

    def bucket(self) -> str:
        """A new one."""
        name = f"bucket-{next(_buckets)}"
        self.request("PUT", name)
        return name

    def request(self, method: str, path: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{path}", method=method), timeout=10).close()

    def stop(self) -> None:
        self._server.stop()


class LmdbWorld:
    """Blobs beside their index."""

    external = False

    def __init__(self, folder: Path, rules: Rules = RULES) -> None:
        self.folder = folder
        self.rules = rules
        self.stopping = threading.Event()

    def blobs(self) -> Blobs:
        return InlineBlobs()

    def open(self) -> Partition:
        """What a store opens, with all that was committed."""
        return Partition(0, self.folder / "index", GUARD, self.rules, 16 << 20, sync=False, blobs=self.blobs())

    def close(self) -> None:
        """Ends what the world started."""


class ObjectWorld(LmdbWorld):
    """Blobs in memory, and what others share."""

    external = True

    def __init__(self, folder: Path, rules: Rules = RULES) -> None:
        super().__init__(folder, rules)
        self.objects: Objects = self.make()

    def make(self) -> Objects:
        return MemoryObjects()

    def blobs(self) -> Blobs:
        return ExternalBlobs(self.objects, FOLDER, self.stopping, again=0.1)

    def names(self) -> list[str]:
        """Of the partition's objects."""
        return sorted(self.objects.names(FOLDER))

    def lose(self, name: str) -> None:
        """An object is gone, and nobody of ours did it."""
        self.objects.delete([name]).result(10)

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Nothing can be written, read or deleted."""
        assert isinstance(self.objects, MemoryObjects)
        self.objects.down = "503"
        yield
        self.objects.down = None

    def close(self) -> None:
        self.objects.close()


class FolderWorld(ObjectWorld):
    """obstore on a local folder."""

    def make(self) -> Objects:
        made = ObstoreObjects(Place(path=self.folder / "blobs"), "store/home", 5.0)
        made.mark().result(10)
        return made

    @contextmanager
    def outage(self) -> Iterator[None]:
        """As a file system that is not mounted, with a file in the way so that nobody makes the folder anew."""
        root = self.folder / "blobs"
        root.rename(self.folder / "away")
        root.write_bytes(b"")
        yield
        root.unlink()
        shutil.move(self.folder / "away", root)


class S3World(ObjectWorld):
    """obstore on an S3 API. Set `server` first."""

    server: S3Server

    def make(self) -> Objects:
        self.bucket = self.server.bucket()
        made = ObstoreObjects(Place(bucket=self.bucket, prefix="a/b"), "store/home", 5.0, self.server.endpoint)
        made.mark().result(10)
        return made

    @contextmanager
    def outage(self) -> Iterator[None]:
        """The bucket is gone; it comes back with what it held."""
        from tests.support.moto_state import hidden_bucket

        with hidden_bucket(self.bucket):
            yield
