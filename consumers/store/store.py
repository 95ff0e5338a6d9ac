"""RouteStore: a materialised view of the routes topic."""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from moebus.broker.ports import Broker
from moebus.broker.topics import Topics
from moebus.consumers.dead_letters import DeadLetters
from moebus.consumers.store.answers import Answer, Answers, Question
from moebus.consumers.store.blobs.external import ExternalBlobs
from moebus.consumers.store.blobs.home import open_objects
from moebus.consumers.store.blobs.keeper import Keeper
from moebus.consumers.store.blobs.metered import MeteredObjects
from moebus.consumers.store.blobs.port import Blobs, Objects
from moebus.consumers.store.changes import Changes
from moebus.consumers.store.deletes import publish_delete
from moebus.consumers.store.env import EnvClosed, EnvDamaged
from moebus.consumers.store.figures import Figures, RunFigures
from moebus.consumers.store.follower import Follower
from moebus.consumers.store.mirrors.open import Mirrors, open_mirrors
from moebus.consumers.store.options import StoreOptions
from moebus.consumers.store.progress import Lag, Progress
from moebus.consumers.store.recorder import Recorder
from moebus.consumers.store.source import Source
from moebus.consumers.store.state import AttemptState
from moebus.consumers.store.watcher import Announcer, Watcher
from moebus.observability.clock import Clock, SystemClock
from moebus.observability.log import get_logger
from moebus.observability.metrics import Metrics
from moebus.schemas.attempt import new_attempt
from moebus.schemas.errors import MoebusError, SettingsError
from moebus.schemas.members import MemberState
from moebus.schemas.record import Delete
from moebus.schemas.rollout import check_epoch, check_prefix, check_run

_log = get_logger(__name__)
_STOP_SECONDS = 10.0
_LEAVE_SECONDS = 2.0


class RouteStore:
    """Follows partitions of the routes topic, persists them, answers from them. `start` returns at once: brokers that
    are not there are waited for, and reads answer StoreCatchingUp until the log end seen at the start is reached."""

    def __init__(
        self,
        broker: Broker,
        topics: Topics,
        data_dir: Path,
        partitions: Sequence[int] | None = None,
        *,
        store_id: str = "store",
        url: str | None = None,
        options: StoreOptions | None = None,
        metrics: Metrics | None = None,
        clock: Clock | None = None,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        objects: Objects | None = None,
        run: str = "default",
    ) -> None:
        """`partitions`: those to follow, None for all. `url`: where its HTTP answers, announced in members.
        `objects`: where blobs lie, instead of where the options say. `run`: that is mirrored unless the options name
        another."""
        self.clock: Clock = clock or SystemClock()
        self.progress = Progress(self.clock)
        self._data_dir = data_dir
        self._id = store_id
        self._url = url
        self._random = random_bytes
        self._boot = random_bytes(8).hex()
        self._topics = topics
        self._stopping = threading.Event()
        self._failure: tuple[int, str] | None = None
        self._lock: int | None = None
        self._admin = broker.admin()
        self._writer = broker.writer(f"moebus-{store_id}")
        self._source = Source(self._admin, topics.routes, partitions)
        self._options = options or StoreOptions()
        self._metrics = metrics or Metrics()
        self._objects = objects
        self._run_name = run
        self._mirrors: Mirrors | None = None
        recorder = Recorder(self._metrics, self.clock)
        dead = DeadLetters(self._writer, topics.dlt, store_id)
        self._follower = Follower(
            broker, self._source, data_dir, self._options, dead, self.progress, recorder, self.clock, self._stopping,
            self._blobs, self._changed if self._options.mirrors else None,
        )  # fmt: skip
        self.courtesy = self._follower.courtesy
        """See `Follower.courtesy`."""
        self._announcer = Announcer(self._writer, topics.members, store_id, self._learn_time)
        watcher = Watcher(self._source, self._follower, self.progress, recorder, self.clock, self._stopping, self._beat)
        self._answers = Answers(self._follower.partitions, self.progress)
        self._keeper: Keeper | None = None
        self._threads = [self._thread("follower", self._follower.run), self._thread("watcher", watcher.run)]

    def start(self) -> None:
        """Raises SettingsError where another store uses the folder, it cannot be written, or blobs or mirrors have no
        place."""
        self._lock = _lock_folder(self._data_dir)
        keeper = self._open_objects()
        if keeper is not None:
            self._keeper = keeper
            self._threads.append(self._thread("keeper", keeper.run))
        if self._options.mirrors:
            self._mirrors = open_mirrors(
                self._options.mirrors, self._options.mirror, self._run_name, self._id, self._data_dir,
                self._follower.partitions, self.progress, self._metrics, self._stopping,
            )  # fmt: skip
            self._mirrors.start()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Leaves members and closes; what is not committed is read again by the next start. Again: does nothing."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._objects is not None:
            self._objects.close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_STOP_SECONDS)
        if self._mirrors is not None:
            self._mirrors.join(_LEAVE_SECONDS)  # what it holds is told by its ledger
        self._announcer.leave()
        self._writer.close(_LEAVE_SECONDS)
        self._admin.close()
        if self._lock is not None:
            os.close(self._lock)

    def failure(self) -> tuple[int, str] | None:
        """(exit code, reason) once it can no longer go on; None while well."""
        return self._failure

    def waiting(self) -> str | None:
        """Why it cannot do all of its work now (for `/readyz`); None when it can."""
        if self._failure is not None:
            return self._failure[1]
        lags = sorted(self.progress.lags().items())
        full = "; ".join(f"partition {number} takes nothing in: {lag.full}" for number, lag in lags if lag.full)
        trouble = f"blobs: {self._keeper.trouble}" if self._keeper is not None and self._keeper.trouble else None
        return full or self.progress.unready() or trouble  # what is full falls behind

    def find(self, question: Question) -> Answer:
        """See `Answers.find`."""
        return self._answers.find(question, self._source.total)

    def committed(self) -> Callable[[], bool]:
        """See `Answers.committed`."""
        return self._answers.committed()

    def page(self, run: str, prefix: str | None, after: bytes, limit: int) -> list[tuple[int, AttemptState]]:
        """See `Answers.page`."""
        return self._answers.page(run, prefix, after, limit)

    def delete(self, run: str, prefix: str, epoch: int, timeout: float) -> tuple[bytes, dict[int, int]]:
        """Publishes a DELETE to every partition: (its id, offset by partition), after all acknowledged it.

        Raises:
            InvalidInput: naming the field.  BrokerUnavailable, AppendFailed, AppendUnknown: see `publish_delete`.
        """
        identity = new_attempt(self.clock.now_ms(), self._random(10))
        record = Delete(check_run(run), check_prefix(prefix), identity, check_epoch(epoch))
        total = self._source.total or self._source.count()
        return identity, publish_delete(self._writer, self._topics.routes, total, record, self._id, timeout)

    def figures(self) -> dict[int, tuple[Lag, Figures]]:
        """How far and how full each partition is."""
        partitions = self._follower.partitions
        return {n: (lag, partitions[n].figures()) for n, lag in self.progress.lags().items()}

    def runs(self) -> dict[int, list[RunFigures]]:
        """What the runs hold in each partition; of one that is being rebuilt, nothing."""
        found: dict[int, list[RunFigures]] = {}
        for number, partition in dict(self._follower.partitions).items():
            try:
                found[number] = partition.runs()
            except (EnvClosed, EnvDamaged):
                found[number] = []
        return found

    def _open_objects(self) -> Keeper | None:
        """What keeps the objects in order; None where blobs lie in LMDB."""
        options, marked = self._options, None
        if self._objects is None and options.blobs is not None:
            marked = self._objects = open_objects(
                options.blobs, self._id, self._data_dir, options.blobs_timeout, options.blobs_endpoint, options.sync
            )
        if self._objects is None:
            return None
        self._objects = MeteredObjects(self._objects, self._metrics, self.clock)
        return Keeper(self._follower.partitions, marked, self._metrics, self.clock, self._stopping)

    def _blobs(self, number: int) -> Blobs | None:
        if self._objects is None:
            return None
        return ExternalBlobs(self._objects, f"{self._topics.routes}/{number:05d}", self._stopping)

    def _changed(self, changes: Changes | None) -> None:
        if self._mirrors is None:
            return
        if changes is None:
            self._mirrors.look_again()
        else:
            self._mirrors.changed(changes)

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._run, args=(work,), name=f"moebus-store-{name}", daemon=True)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # the process has to end, with this reason
            code = error.exit_code if isinstance(error, MoebusError) else 1
            known = isinstance(error, MoebusError)
            self._failure = (code, str(error) if known else f"{type(error).__name__}: {error}")
            _log.error("store.failed", self._failure[1], exc=None if known else error)
            self.progress.wait_for(f"the store has failed: {self._failure[1]}")

    def _learn_time(self, broker_ms: int) -> None:
        self._follower.broker_now_ms = broker_ms

    def _beat(self) -> None:
        lags = self.progress.lags()
        reason = self.waiting()
        self._announcer.say(
            MemberState(
                kind="store",
                member_id=self._id,
                boot_id=self._boot,
                ready=reason is None,
                reason=reason[:200] if reason else None,
                http=self._url,
                url=self._url,
                partitions=sorted(lags),
                offsets={str(number): lag.applied for number, lag in sorted(lags.items())},
            )
        )


def _lock_folder(folder: Path) -> int:
    """Two stores on one folder would each apply every record."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / "store.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise SettingsError(f"store.data_dir: {folder} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise SettingsError(f"store.data_dir: {folder} is in use by another store; give each its own") from None
    return handle
