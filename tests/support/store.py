"""A route store on an in-memory broker, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from moebus.broker.memory import MemoryBroker
from moebus.broker.partitioner import partition_for
from moebus.broker.ports import OutRecord, Position
from moebus.broker.topics import Topics, ensure
from moebus.consumers.store import Question, RouteStore, StoreOptions
from moebus.observability.metrics import Metrics
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.record import Clear, Delete, encode, record_key
from moebus.schemas.record.decode import decode
from moebus.schemas.rollout import partition_key, rollout_key
from moebus.schemas.route_errors import RouteError
from tests.support.routes import Attempt
from tests.support.wait import wait_until

PARTITIONS = 3
SMALL = StoreOptions(map_bytes=16 << 20, commit_interval=0.005, sync=False)


class Rig:
    """A broker with the topics of one fleet, and what a publisher would do."""

    def __init__(self, folder: Path, broker: MemoryBroker | None = None) -> None:
        self.folder = folder
        self.broker = broker or MemoryBroker()
        self.topics = Topics("t")
        ensure(self.broker.admin(), self.topics, routes_partitions=PARTITIONS)
        self.writer = self.broker.writer("test")
        self.metrics = Metrics()

    def put(self, *attempts: Attempt) -> None:
        """Every record of these attempts, in order, acknowledged."""
        for attempt in attempts:
            for record in attempt.records:
                self.put_raw(record)

    def put_raw(self, value: bytes | None, partition: int | None = None, key: bytes | None = None) -> Position:
        """One record; a readable CHUNK or END goes where its group says unless told otherwise."""
        if key is None and partition is None and value is not None:
            key = record_key(decode(value))
        receipt = self.writer.append(OutRecord(self.topics.routes, value, key, (), partition))
        return receipt.result(5)

    def fence(self, record: Delete | Clear) -> None:
        """Into every partition."""
        for number in range(PARTITIONS):
            self.put_raw(encode(record), number, record_key(record))

    def partition(self, group: str, run: str = "run") -> int:
        return partition_for(partition_key(run, group), PARTITIONS)

    def store(self, *, partitions: tuple[int, ...] | None = None, options: StoreOptions = SMALL) -> RouteStore:
        self.metrics = Metrics()
        return RouteStore(
            self.broker, self.topics, self.folder, partitions, store_id="s1", url="http://127.0.0.1:1",
            options=options, metrics=self.metrics,
        )  # fmt: skip

    @contextmanager
    def running(
        self, *, partitions: tuple[int, ...] | None = None, options: StoreOptions = SMALL, ready: bool = True
    ) -> Iterator[RouteStore]:
        """A store that has read all there is (unless not `ready`)."""
        store = self.store(partitions=partitions, options=options)
        store.start()
        try:
            if ready:
                self.caught_up(store)
            yield store
        finally:
            store.stop()

    def caught_up(self, store: RouteStore) -> None:
        """Waits until the store has applied everything that is in the log now."""
        numbers = range(PARTITIONS)
        logs = {n: self.broker.cluster.topics[self.topics.routes].logs[n] for n in numbers}

        def done() -> bool:
            lags = store.progress.lags()
            return store.progress.unready() is None and all(lag.applied >= logs[n].end for n, lag in lags.items())

        wait_until(done, 30, what="the store to catch up")


def read(store: RouteStore, rollout_id: str, choice: int = 0, **more: object) -> RouteArray:
    """The rows of a rollout of `run`."""
    answer = store.find(Question(rollout_key("run", rollout_id, choice), **more))  # type: ignore[arg-type]
    return np.frombuffer(b"".join(answer.rows()), answer.meta.dtype).reshape(answer.meta.shape)


def error_of(store: RouteStore, rollout_id: str, choice: int = 0, **more: object) -> str:
    """Name of the error that reading a rollout gives; `none` where it can be read."""
    try:
        read(store, rollout_id, choice, **more)
    except RouteError as error:
        return error.name
    return "none"


def held(store: RouteStore, prefix: str | None = None) -> list[str]:
    """Ids of the whole rollouts of `run`, sorted."""
    return sorted(state.key.rollout_id for _, state in store.page("run", prefix, b"", 1000))
