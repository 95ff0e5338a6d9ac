"""What one worker says of itself: member state, heartbeats, last operations. Snapshots are appended in the order
they were taken, whichever thread takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from moebus.broker.ports import Receipt
from moebus.consumers.control.journal import Journal
from moebus.consumers.control.lifecycle import State
from moebus.consumers.control.state_record import to_record
from moebus.engine.port import Engine, EngineUnreachable, Inspection
from moebus.observability.log import get_logger
from moebus.schemas.members import MAX_OPS, DoneOperation, MemberOps, MemberState, Operation
from moebus.schemas.responses import Lifecycle, WorkerState

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker to host. `http`: address of its page of metrics, shown in members.

    `labels`: what selectors match, at most 384 bytes in all. `trouble`: why the engine does not answer now, None while
    it does; asked often, so it must not wait.
    """

    worker_id: str
    engine: Engine
    labels: dict[str, str] = field(default_factory=dict)
    http: str | None = None
    trouble: Callable[[], str | None] = lambda: None


def _first_identity(engine: Engine) -> str:
    """Of an engine whose server has not answered yet: a word for it, replaced at the take-over."""
    try:
        return engine.identity()[:128]
    except EngineUnreachable:
        return "not reached yet"


class Reporter:
    """Thread-safe: the worker's thread sets the fields, the host's thread beats."""

    def __init__(self, spec: WorkerSpec, boot_id: str, journal: Journal) -> None:
        self.spec = spec
        self.boot_id = boot_id
        self.engine_id = _first_identity(spec.engine)
        self.state = State(phase=Lifecycle.STARTING)
        self.shown: Lifecycle | None = Lifecycle.STARTING
        self.digest: str | None = None
        self.digest_of: str | None = None
        self.since = 0
        self.applied = 0
        self.operation: Operation | None = None
        self.busy_until: int | None = None
        self.ready = False
        self.waiting: str | None = "starting"
        self.found: Inspection | None = None
        self._journal = journal
        self._lock = threading.Lock()
        self._beat: Receipt | None = None
        self._ops: list[DoneOperation] = []
        self._said = ""

    def view(self) -> WorkerState:
        """The state as answers show it; `shown` overrides the lifecycle while something goes on."""
        view = self.state.view()
        return view.model_copy(update={"lifecycle": self.shown}) if self.shown is not None else view

    def member(self) -> MemberState:
        """The state of now. Looks at the engine; keeps the last look where it does not answer."""
        self.look()
        trouble = self.spec.trouble()
        reason = self.state.reason if self.state.fault is not None else self.waiting or trouble
        return MemberState(
            kind="worker",
            member_id=self.spec.worker_id,
            boot_id=self.boot_id,
            engine_id=self.engine_id,
            engine_kind=self.spec.engine.kind[:64],
            labels=dict(self.spec.labels),
            run=self.state.run,
            state=self.view(),
            bytes=dict(self.found.bytes_by_tag) if self.found is not None else {},
            weights_digest=self.known_digest(),
            since=self.since,
            applied=self.applied,
            operation=self.operation,
            busy_until=self.busy_until,
            ready=self.ready and trouble is None,
            reason=reason[:200] if reason else None,
            desired=to_record(self.state),
            http=self.spec.http,
        )

    def known_digest(self) -> str | None:
        """Digest of the weights that the state asks for, where one was ever seen."""
        return self.digest if self.digest_of is not None and self.digest_of == self.state.version else None

    def look(self) -> None:
        """Takes in what the engine says of itself."""
        try:
            found = self.spec.engine.inspect()
        except Exception as error:
            if str(error) != self._said:
                _log.warning("control.inspect_failed", str(error), worker_id=self.spec.worker_id)
            self._said = str(error)
            return
        self.found, self._said = found, ""
        if found.weights_digest is not None and found.version == self.state.version:
            self.digest, self.digest_of = found.weights_digest, found.version

    def record(self) -> None:
        """Appends the state and returns once it is in the log. Raises Stopped."""
        with self._lock:
            receipt = self._journal.append(self._journal.member(self.member()))
        self._journal.settle(receipt, lambda: self._journal.member(self.member()))

    def beat(self) -> bool:
        """Appends the state without waiting, unless the last one has not settled yet."""
        with self._lock:
            if self._beat is not None and not self._beat.done():
                return False
            self._beat = self._journal.append(self._journal.member(self.member()))
            return True

    def note(self, done: DoneOperation) -> None:
        """Adds to the last operations and publishes them."""
        self._ops = [*self._ops[-(MAX_OPS - 1) :], done]
        self._journal.append(self._journal.ops(MemberOps(member_id=self.spec.worker_id, ops=self._ops)))

    def leave(self) -> None:
        """Writes the last state and the tombstones, acknowledged. Raises Stopped."""
        self.ready = False
        self.waiting = "left"
        self.record()
        with self._lock:
            receipts = [self._journal.append(record) for record in self._journal.tombstones(self.spec.worker_id)]
        for receipt in receipts:
            self._journal.wait(receipt)
